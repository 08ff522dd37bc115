"""`penstock keys create`, `list`, `rotate` and `revoke`: the API keys of a server."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest

import penstock
from penstock.server.api_keys import KeyFile, is_key_text
from penstock.server.key_ring import KeyRing
from penstock.words.clock import MINUTE, SECOND, SystemClock
from tests.cli.conftest import CommandLine


def created(cli: CommandLine, *more: str) -> str:
    """The text of a new key named web."""
    ran = cli.run("keys", "create", "web", *(more or ("--scope", "read")))
    assert is_key_text(ran.out.rstrip("\n"))
    return ran.out.rstrip("\n")


def test_the_text_of_a_key_is_printed_once(orders_cli: CommandLine) -> None:
    ran = orders_cli.run("keys", "create", "web", "--scope", "produce", "--scope", "look", "--prefix", "orders", "--prefix", "bills")
    text = ran.out.rstrip("\n")
    found = KeyRing(str(orders_cli.target)).check(text)
    assert found is not None
    assert (found.name, set(found.scopes), found.prefixes) == ("web", {"look", "produce"}, ("bills", "orders"))
    assert ran.err == f"penstock: this is the text of API key {found.id} (web); it is not shown again\n"
    secret = text.split("_")[2]
    assert secret not in orders_cli.run("keys", "list").out + orders_cli.run("keys", "list", "--json").out
    assert [name for name, data in orders_cli.files().items() if secret.encode() in data] == []


def test_a_new_key_as_json(orders_cli: CommandLine) -> None:
    ran = orders_cli.run("keys", "create", "web", "--scope", "admin", "--json")
    assert ran.err == ""
    found = json.loads(ran.out)
    assert is_key_text(found.pop("text"))
    (listed,) = orders_cli.json("keys", "list")
    assert found == listed
    assert (listed["scopes"], listed["prefixes"], listed["state"], listed["last_used_at"]) == (["admin"], [], "valid", None)
    assert set(listed) == {
        "id", "name", "scopes", "prefixes", "state", "created_at", "expires_at", "rotated_at", "revoked_at", "last_used_at",
    }  # fmt: skip


@pytest.mark.parametrize("option", [("--expires-in", "1d"), ("--expires-at", "2999-01-01T00:00:00Z")])
def test_a_key_that_expires(orders_cli: CommandLine, option: tuple[str, str]) -> None:
    created(orders_cli, "--scope", "read", *option)
    (listed,) = orders_cli.json("keys", "list")
    left = datetime.fromisoformat(listed["expires_at"]).timestamp() - SystemClock().read().wall / SECOND
    assert listed["expires_at"] == "2999-01-01T00:00:00Z" if option[0] == "--expires-at" else 86_000 < left <= 86_400


def test_the_list_shows_what_became_of_keys(orders_cli: CommandLine) -> None:
    assert orders_cli.out("keys", "list") == "there are no API keys"
    text = created(orders_cli, "--scope", "consume", "--scope", "produce", "--prefix", "orders")
    orders_cli.run("keys", "create", "ops", "--scope", "admin")
    orders_cli.run("keys", "rotate", "ops")
    orders_cli.run("keys", "revoke", "ops")
    ring = KeyRing(str(orders_cli.target))
    assert ring.check(text) is not None
    ring.close()
    heading, web, ops = orders_cli.out("keys", "list").splitlines()
    assert heading.split("  ")[0] == "ID" and heading.endswith("LAST USED")
    assert [cell.strip() for cell in web.split("  ") if cell.strip()][1:5] == ["web", "valid", "produce, consume", "orders"]
    assert [cell.strip() for cell in ops.split("  ") if cell.strip()][1:5] == ["ops", "revoked", "admin", "all"]
    assert ops.endswith("–") and not web.endswith("–")
    first, second = orders_cli.json("keys", "list")
    assert first["last_used_at"] is not None and first["revoked_at"] is None
    assert second["revoked_at"] is not None and second["rotated_at"] is not None and second["state"] == "revoked"


def test_a_rotation_prints_the_new_text(orders_cli: CommandLine) -> None:
    first = created(orders_cli)
    second = orders_cli.run("keys", "rotate", "web", "--grace", "1h").out.rstrip("\n")
    ring = KeyRing(str(orders_cli.target))
    assert ring.check(first) is not None and ring.check(second) is not None
    third = orders_cli.json("keys", "rotate", second.split("_")[1])["text"]
    ring = KeyRing(str(orders_cli.target))
    assert [ring.check(text) is not None for text in (first, second, third)] == [False, False, True]


def test_a_revocation_ends_the_key_of_a_running_server(orders_cli: CommandLine) -> None:
    text, ended = created(orders_cli), []
    ring, clock = KeyRing(str(orders_cli.target)), SystemClock()
    ring.watch(ring.check(text), lambda: ended.append(1))
    said = orders_cli.out("keys", "revoke", "web")
    assert said == f"API key {text.split('_')[1]} (web) is revoked"
    ring.refresh()
    assert ended == [1] and ring.check(text) is None
    found = orders_cli.json("keys", "revoke", text.split("_")[1])  # again
    assert clock.read().wall - datetime.fromisoformat(found["revoked_at"]).timestamp() * SECOND < MINUTE


def test_keys_are_managed_beside_an_owner_that_shares_nothing(orders_cli: CommandLine) -> None:
    with penstock.open(orders_cli.target, exclusive=True):
        text = created(orders_cli)
        orders_cli.run("keys", "rotate", "web")
        orders_cli.run("keys", "revoke", text.split("_")[1])
        assert [key["state"] for key in orders_cli.json("keys", "list")] == ["revoked"]


def test_a_directory_with_keys_opens_without_its_marker(orders_cli: CommandLine) -> None:
    created(orders_cli)
    (orders_cli.target / "penstock.json").unlink()
    with orders_cli.open() as broker:
        assert broker.queue("orders").stats().ready == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["create", "web"], "the key would allow nothing; give one or several times --scope look, read, produce, consume, admin"),
        (["create", "web", "--scope", "fly"], "--scope is 'fly'; give one or several times --scope look"),
        (["create", "web", "--scope", "read", "--prefix", "a b"], "'a b' is no name for a queue; use"),
        (["create", "", "--scope", "read"], "name is ''; give 1 to 100 printable characters"),
        (["create", "web", "--scope", "read", "--expires-at", "2020-01-01T00:00:00Z"], "--expires-at is in the past; give a later time"),
        (["create", "web", "--scope", "read", "--expires-in", "0s"], "--expires-in is '0s'; give a longer time, such as 90d"),
        (
            ["create", "web", "--scope", "read", "--expires-in", "1d", "--expires-at", "2999-01-01"],
            "--expires-in and --expires-at were both given; leave one out",
        ),
        (["rotate", "old"], "API key .* is revoked; create a new one"),
        (["rotate", "web", "--grace", "soon"], "--grace is 'soon'; give seconds"),
        (["rotate", "web", "--grace", "1000d"], "--grace is .*; "),
    ],
)
def test_wrong_keys_are_refused(orders_cli: CommandLine, line: list[str], said: str) -> None:
    old = orders_cli.json("keys", "create", "old", "--scope", "read")["id"]
    orders_cli.run("keys", "revoke", "old")
    orders_cli.run("keys", "create", "taken", "--scope", "read")
    line = [old if word == "old" else "taken" if word == "web" and line[0] == "rotate" else word for word in line]
    before = orders_cli.files()
    found = orders_cli.refused("keys", *line)
    assert re.match(said, found), found
    assert orders_cli.files() == before


@pytest.mark.parametrize("verb", ["rotate", "revoke"])
def test_an_unknown_key_is_not_found(orders_cli: CommandLine, verb: str) -> None:
    assert orders_cli.refused("keys", verb, "nobody", code=5) == "there is no valid API key 'nobody'; penstock keys list shows them"


def test_damaged_keys_are_an_error(orders_cli: CommandLine) -> None:
    created(orders_cli)
    Path(KeyFile(str(orders_cli.target)).path).write_text("nonsense")
    for line in (["list"], ["create", "ops", "--scope", "admin"], ["revoke", "web"]):
        assert "is damaged" in orders_cli.refused("keys", *line, code=6)


@pytest.mark.parametrize("address", ["http://127.0.0.1:2319", "https://queues.example"])
def test_keys_are_managed_on_the_machine_of_the_server(orders_cli: CommandLine, address: str) -> None:
    said = orders_cli.refused("keys", "list", broker=address)
    assert said == "API keys are managed on the server's machine; run this command there, with --broker and the directory of the broker"


def test_there_are_no_keys_where_there_is_no_broker(cli: CommandLine) -> None:
    assert "there is no directory" in cli.refused("keys", "create", "web", "--scope", "read", code=5)
    assert not cli.target.exists()
