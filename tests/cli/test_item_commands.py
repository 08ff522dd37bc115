"""`penstock stats`, `items`, `item`, `explain`, `keys`, `dead`, `watch`."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime

import pytest

import penstock
from penstock.cli import dead, stats
from tests.cli.conftest import CommandLine


@pytest.fixture
def busy(orders_cli: CommandLine) -> CommandLine:
    """Orders in every state: one of key ann is leased and one waits for it; others are buried, scheduled, completed."""
    with orders_cli.open_unthreaded() as broker:
        orders = broker.queue("orders")
        orders.produce({"n": 0}, kind="order")
        orders.lease().complete()
        orders.produce({"n": 1}, key="ann", kind="order")
        orders.produce({"n": 2}, key="ann", kind="order")
        assert len(orders.lease(consumer="me", lease_timeout=3600)) == 1
        orders.produce(b"\xff\x00", key="bob", headers={"a": "1", "raw": b"\xff"}, reference="r", ttl=3600)
        orders.lease()[0].bury("no\ngood")
        orders.produce("later", at=datetime(3000, 1, 1, tzinfo=UTC))
    return orders_cli


LOOKS = [
    ["queue", "list"],
    ["queue", "info", "orders"],
    ["stats"],
    ["stats", "orders"],
    ["watch", "--once"],
    ["watch", "orders", "--once"],
    ["items", "orders"],
    ["find", "orders", "--key", "ann"],
    ["item", "orders", "0-0"],
    ["explain", "orders", "0-0"],
    ["keys", "held", "orders"],
    ["dead", "list"],
    ["dead", "list", "orders"],
    ["dead", "redrive", "orders.dead", "--to", "orders", "--preview"],
    ["verify"],
]


@pytest.mark.parametrize("args", LOOKS, ids=" ".join)
@pytest.mark.parametrize("owner", ["no owner", "an owner that does not share"])
def test_looking_commands_write_nothing(busy: CommandLine, args: list[str], owner: str) -> None:
    with penstock.open(busy.target, threaded=False) if owner != "no owner" else nullcontext():
        before = busy.files()
        busy.out(*args)
        busy.json(*args)
        assert busy.files() == before


@pytest.mark.parametrize("args", LOOKS, ids=" ".join)
def test_looking_commands_make_no_directory(cli: CommandLine, args: list[str]) -> None:
    assert "there is no directory" in cli.refused(*args, code=5)
    cli.target.mkdir()
    assert "holds no broker" in cli.refused(*args, code=5)
    assert not any(cli.target.iterdir())


# -- counts ------------------------------------------------------------------------------------------


def test_stats_of_all(busy: CommandLine) -> None:
    heading, orders, dead, *_ = busy.out("stats").splitlines()
    assert heading.split() == ["QUEUE", "READY", "SCHEDULED", "LEASED", "BURIED", "MOVING", "COMPLETED", "PRODUCED", "OLDEST"]
    assert orders.split()[:6] == ["orders", "1", "1", "1", "0", "0"] and orders.split()[7] == "5"
    assert dead.split()[:2] == ["orders.dead", "1"]
    assert [(one["name"], one["depth"]) for one in busy.json("stats")["queues"]] == [("orders", 3), ("orders.dead", 1)]


def test_stats_of_one(busy: CommandLine) -> None:
    text = busy.out("stats", "orders")
    assert "consumers  me (1)" in text
    found = busy.json("stats", "orders")
    assert found["consumers"] == {"me": 1} and [one["partition"] for one in found["partitions"]] == [0, 1]
    assert sum(one["scheduled"] for one in found["partitions"]) == found["scheduled"] == 1


def test_warnings_are_shown(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "x")
    assert "! orders: 1 item is ready and no consumer is there; start one" in orders_cli.out("stats").splitlines()
    orders_cli.run("queue", "pause", "orders")
    assert any("paused" in line for line in orders_cli.out("watch", "--once").splitlines())
    assert "active (lease and produce paused)" in orders_cli.out("stats", "orders")


# -- items -------------------------------------------------------------------------------------------


def test_items(busy: CommandLine) -> None:
    found = busy.json("items", "orders")
    assert {one["state"] for one in found} == {"completed", "leased", "ready", "scheduled"}
    assert [one["value"] for one in busy.json("items", "orders", "--state", "ready", "--state", "leased")] == [{"n": 1}, {"n": 2}]
    lines = busy.out("items", "orders", "--state", "ready").splitlines()
    assert lines[0].split() == ["ID", "STATE", "KEY", "KIND", "ATTEMPTS", "PRODUCED", "PAYLOAD", "REASON"]
    assert '{"n":2}' in lines[1]
    assert busy.out("items", "orders", "--state", "buried") == "there are no such items"


def test_pages_of_items(busy: CommandLine) -> None:
    ran = busy.run("items", "orders", "--limit", "2")
    last = ran.out.splitlines()[-1].split()[0]
    assert ran.err == f"penstock: there may be more: --after {last}\n"
    rest = busy.json("items", "orders", "--after", last)
    assert len(rest) >= 2 and last not in [one["id"] for one in rest]


def test_an_item_with_its_history(busy: CommandLine) -> None:
    (leased,) = busy.json("items", "orders", "--state", "leased")
    found = busy.json("item", "orders", leased["id"])
    assert [event["event"] for event in found["history"]] == ["produced", "leased"]
    assert found["history"][1]["consumer"] == "me" and found["history"][1]["attempt"] == 1
    assert found["item"]["value"] == {"n": 1} and found["state"]["state"] == "leased"
    text = busy.out("item", "orders", leased["id"])
    assert "state     leased by me" in text and "payload   {" in text


def test_a_history_through_two_queues(busy: CommandLine) -> None:
    (letter,) = busy.json("dead", "list", "orders.dead")
    found = busy.json("item", "orders.dead", letter["id"])
    assert [(event["event"], event["queue"]) for event in found["history"]][:3] == [
        ("produced", "orders"),
        ("leased", "orders"),
        ("buried", "orders"),
    ]
    assert found["history"][-1]["queue"] == "orders.dead"
    assert found["item"]["origin"]["queue"] == "orders" and found["item"]["payload_base64"] == "/wA="
    text = busy.out("item", "orders", letter["origin"]["id"])
    assert text.split("\n")[0].split() == ["item", letter["id"], "in", "queue", "orders.dead"]
    assert r"no\ngood" in text and "header raw" in text and "<2 bytes>" in text


def test_explain(busy: CommandLine) -> None:
    leased, waiting = busy.json("items", "orders", "--state", "ready", "--state", "leased")
    assert busy.out("explain", "orders", waiting["id"]).startswith(f"{waiting['id']} is ready: its key is held: item ")
    assert busy.json("explain", "orders", waiting["id"])["held_by"] == leased["id"]
    (letter,) = busy.json("dead", "list", "orders")
    moved = busy.out("explain", "orders", letter["origin"]["id"])
    assert moved.startswith(f"{letter['origin']['id']} (now {letter['id']} in queue orders.dead) is ready: ")


@pytest.mark.parametrize("command", ["item", "explain"])
def test_wrong_ids_are_refused(busy: CommandLine, command: str) -> None:
    assert "is not the id of an item" in busy.refused(command, "orders", "x")
    assert "there is no item" in busy.refused(command, "orders", "0-999", code=5)
    assert "has no partition 9" in busy.refused(command, "orders", "9-0", code=5)
    assert "there is no queue" in busy.refused(command, "nope", "0-0", code=5)


# -- keys --------------------------------------------------------------------------------------------


def test_held_keys(busy: CommandLine) -> None:
    (held,) = busy.json("keys", "held", "orders")
    assert (held["key"], held["why"]) == ("ann", "leased")
    assert busy.out("keys", "held", "orders").splitlines()[1].split() == [
        "ann",
        *map(str, (held["partition"], "leased", held["item"], held["waiting"])),
    ]
    assert busy.out("keys", "held", "orders.dead") == "no key is held"


def test_a_parked_key_is_released(cli: CommandLine) -> None:
    with cli.open() as broker:
        parking = broker.create_queue("parking", on_bury="park")
        parking.produce_many([penstock.NewItem(b"1", key=b"k\xff"), penstock.NewItem(b"2", key=b"k\xff"), penstock.NewItem(b"3", key="b")])
        for lease in parking.lease(5):
            lease.bury()
    assert {(one.get("key"), one.get("key_base64"), one["why"]) for one in cli.json("keys", "held", "parking")} == {
        (None, "a/8=", "parked"),
        ("b", None, "parked"),
    }
    assert r"k\xff" in cli.out("keys", "held", "parking")
    assert cli.json("keys", "release", "parking", "b")["key"] == "b"
    assert len(cli.json("keys", "held", "parking")) == 1
    assert cli.out("keys", "release", "parking", "nobody", code=1) == "no item parks this key; `penstock keys held parking` lists the keys"


# -- times and attempts ------------------------------------------------------------------------------


def fact(terminal: CommandLine, id: str, name: str) -> str | None:
    """What `item` says of an item of the queue orders."""
    lines = terminal.out("item", "orders", id).partition("\n\n")[0].splitlines()
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), None)


def test_the_time_of_a_rescheduled_item_is_the_new_one(orders_cli: CommandLine) -> None:
    id = orders_cli.out("produce", "orders", "x", "--at", "2090-01-01T12:00")
    assert fact(orders_cli, id, "not before") == "2090-01-01 12:00:00"
    orders_cli.run("reschedule", "orders", id, "--at", "2091-02-02T12:00")
    assert str(fact(orders_cli, id, "not before")).startswith("2091-02-02 12:00:0")
    assert "(at 2091-02-02 12:00:0" in orders_cli.out("explain", "orders", id)
    orders_cli.run("reschedule", "orders", id, "--now")
    assert fact(orders_cli, id, "not before") is None


def test_the_attempts_of_a_completed_item_are_those_of_its_history(orders_cli: CommandLine) -> None:
    id = orders_cli.out("produce", "orders", "x")
    assert fact(orders_cli, id, "attempts") == "0"
    orders_cli.run("complete", orders_cli.out("lease", "orders", "--tokens"))
    assert fact(orders_cli, id, "attempts") == "1"
    assert orders_cli.out("items", "orders").splitlines()[1].split()[4] == "–"


# -- dead letters ------------------------------------------------------------------------------------


def test_dead_letters(busy: CommandLine) -> None:
    assert busy.json("dead", "list") == [
        {"queue": "orders", "dead_queue": "orders.dead", "buried": 0, "waiting": 1, "counted_all": True},
        {"queue": "orders.dead", "dead_queue": None, "buried": 0, "waiting": 1, "counted_all": True},
    ]
    assert [line.split() for line in busy.out("dead", "list").splitlines()[1:]] == [
        ["orders", "orders.dead", "0", "1"],
        ["orders.dead", "–", "0", "1"],
    ]
    for queue in ("orders", "orders.dead"):
        (letter,) = busy.json("dead", "list", queue)
        assert letter["queue"] == "orders.dead" and letter["origin"]["reason"] == "no\ngood" and letter["key"] == "bob"
        assert r"no\ngood" in busy.out("dead", "list", queue)


def test_dead_letters_are_counted_as_they_are_listed(busy: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    with busy.open() as broker:
        other = broker.create_queue("other", dead_queue="orders.dead")
        other.produce_many(["a", "b", "c"])
        other.lease(2).bury("bad")
        broker.queue("orders.dead").produce("no dead letter")
    counts = {one["queue"]: one["buried"] + one["waiting"] for one in busy.json("dead", "list")}
    assert counts == {"orders": 1, "orders.dead": 4, "other": 2}
    assert {name: len(busy.json("dead", "list", name)) for name in counts} == counts
    monkeypatch.setattr(dead, "MAX_COUNTED", 2)
    assert [line.split()[-3:] for line in busy.out("dead", "list").splitlines()[1:]] == [
        ["at", "least", "1"],
        ["–", "0", "4"],
        ["at", "least", "1"],
    ]


def test_items_buried_without_a_dead_queue(cli: CommandLine) -> None:
    with cli.open() as broker:
        queue = broker.create_queue("q")
        queue.produce_many(["a", "b", "c"])
        for lease in queue.lease(3):
            lease.bury("because")
    assert [(one["payload"], one["reason"], one["state"]) for one in cli.json("dead", "list", "q", "--limit", "2")] == [
        ("a", "because", "buried"),
        ("b", "because", "buried"),
    ]
    assert cli.out("dead", "redrive", "q", "--to", "q", "--limit", "1") == "1 item sent from q to q"
    assert cli.json("stats", "q")["ready"] == 1
    assert cli.json("dead", "redrive", "q", "--to", "q")["items"] == 2
    assert cli.out("dead", "list", "q") == "there are no dead letters"


def test_redrive_with_a_filter(cli: CommandLine) -> None:
    with cli.open_unthreaded() as broker:
        broker.create_queue("dead")
        queue = broker.create_queue("q", dead_queue="dead")
        queue.produce_many([penstock.NewItem(str(number), kind="invoice" if number % 2 else "order") for number in range(6)])
        for lease in queue.lease(6):
            lease.bury("x")
    where = ["dead", "redrive", "dead", "--to", "q", "--where", "kind=invoice", "--where", "origin_queue=q"]
    preview = cli.json(*where, "--preview")
    assert preview["items"] == 3 and len(preview["ids"]) == 3
    first = preview["sample"][0]
    assert (first["id"], first["kind"], first["reason"], first["attempts"], first["payload"]) == (preview["ids"][0], "invoice", "x", 1, "1")
    lines = cli.out(*where, "--preview").splitlines()
    assert lines[0] == "3 items would be sent from dead to q" and len(lines) == 5
    assert lines[1].split()[:4] == ["ID", "STATE", "FROM", "ATTEMPTS"]
    assert lines[2].split()[:4] == [preview["ids"][0], "ready", "q", "1"] and lines[2].split()[-2:] == ["invoice", "1"]
    assert cli.json(*where, "--limit", "2")["items"] == 2
    assert cli.out(*where) == "1 item sent from dead to q"
    assert cli.out(*where) == "0 items sent from dead to q"
    assert sorted(one["payload"] for one in cli.json("items", "q", "--state", "ready")) == ["1", "3", "5"]


def test_a_long_preview_is_cut(cli: CommandLine) -> None:
    with cli.open_unthreaded() as broker:
        broker.create_queue("other")
        broker.create_queue("q").produce_many([b"x"] * 103)
    lines = cli.out("dead", "redrive", "q", "--to", "other", "--preview").splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("103 items would be sent from q to other", "and 3 items more", 103)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--to", "orders", "--where", "colour=red"], 2, "items cannot be chosen by 'colour'"),
        (["--to", "orders", "--where", "kind"], 2, "--where is 'kind'; give it as kind=invoice"),
        (["--to", "orders", "--limit", "0"], 2, "--limit is 0"),
        (["--to", "nope"], 5, "there is no queue 'nope'"),
        ([], 2, "missing option '--to'"),
    ],
)
def test_a_wrong_redrive(busy: CommandLine, args: list[str], code: int, said: str) -> None:
    assert said in busy.refused("dead", "redrive", "orders.dead", *args, code=code)


# -- watch -------------------------------------------------------------------------------------------


class ScriptedEvent:
    """Replaces Event: each wait changes the queue instead; the third one raises KeyboardInterrupt."""

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps

    def __call__(self) -> "ScriptedEvent":
        return self

    def wait(self, seconds: float) -> None:
        if next(self._steps, 0) == 0:
            raise KeyboardInterrupt


def produced(terminal: CommandLine) -> Iterator[None]:
    with terminal.open() as broker:
        for number in (10, 20):
            broker.queue("orders").produce_many([b"x"] * number)
            yield


def test_watching_shows_what_changes(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "Event", ScriptedEvent(produced(orders_cli)))
    ran = orders_cli.run("watch", "--json", code=130)
    looks = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.err == ""
    assert [look["queues"][0]["ready"] for look in looks] == [0, 10, 30]
    assert looks[0]["queues"][0]["produced_per_second"] is None
    assert all(look["queues"][0]["produced_per_second"] > 0 for look in looks[1:])


def test_watching_in_a_pipe(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "Event", ScriptedEvent(produced(orders_cli)))
    lines = orders_cli.run("watch", "orders", "--interval", "5s", code=130).out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("orders ")] == ["0", "10", "30"]


def test_wrong_options_of_watch(orders_cli: CommandLine) -> None:
    assert "--interval is '0'" in orders_cli.refused("watch", "--interval", "0")
    assert "there is no queue 'nope'" in orders_cli.refused("watch", "nope", "--once", code=5)


# -- find, cancel, reschedule --------------------------------------------------------------------------


def only_id(cli: CommandLine, *states: str) -> str:
    """The id of the only item in these states."""
    (found,) = cli.json("items", "orders", *(word for state in states for word in ("--state", state)))
    return str(found["id"])


def test_items_are_found_by_key_and_reference(busy: CommandLine) -> None:
    first, second = busy.json("find", "orders", "--key", "ann")
    assert [first["state"], second["state"]] == ["leased", "ready"]
    assert busy.json("find", "orders", "--key", "ann", "--state", "ready") == [second]
    assert f"there may be more: --after {first['id']}" in busy.run("find", "orders", "--key", "ann", "-n", "1").err
    assert [one["id"] for one in busy.json("find", "orders", "--key", "ann", "--after", first["id"])] == [second["id"]]
    assert busy.out("find", "orders", "--reference", "nothing", code=1).strip() == "there are no such items"
    assert "neither a key nor a reference is given" in busy.refused("find", "orders")


def test_waiting_items_are_cancelled(busy: CommandLine) -> None:
    ready, scheduled, leased, completed = (only_id(busy, state) for state in ("ready", "scheduled", "leased", "completed"))
    said = busy.out("cancel", "orders", ready, scheduled, leased, completed, "0-99", code=1)
    assert said.splitlines() == [
        "2 items cancelled",
        f"{leased} was not cancelled (leased)",
        f"{completed} was not cancelled (completed)",
        "0-99 was not cancelled (not found)",
    ]
    assert "cancelled  2 items" in busy.out("stats", "orders")
    assert "cancelled while it waited" in busy.out("explain", "orders", ready)
    assert [event["event"] for event in busy.json("item", "orders", scheduled)["history"]] == ["scheduled", "cancelled"]


def test_waiting_items_are_rescheduled(busy: CommandLine) -> None:
    item = only_id(busy, "scheduled")
    assert busy.out("reschedule", "orders", item, "--now").strip() == "1 item rescheduled"
    assert f"{item} is ready" in busy.out("explain", "orders", item)
    assert busy.json("reschedule", "orders", item, "--delay", "1h") == [{"id": item, "outcome": "rescheduled"}]
    assert f"{item} is scheduled" in busy.out("explain", "orders", item)
    busy.out("reschedule", "orders", item, "--at", "2999-01-01T00:00:00Z")
    events = busy.json("item", "orders", item)["history"]
    assert [event["event"] for event in events] == ["scheduled", "due", "rescheduled", "rescheduled"]
    assert events[-1]["reason"] == "not before 2999-01-01T00:00:00+00:00"


@pytest.mark.parametrize("times", [[], ["--now", "--delay", "1h"]])
def test_a_reschedule_needs_one_time(busy: CommandLine, times: list[str]) -> None:
    assert "give one of --at, --delay and --now" in busy.refused("reschedule", "orders", only_id(busy, "scheduled"), *times)
