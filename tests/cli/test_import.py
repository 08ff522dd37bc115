"""`penstock import ledgerq`: whole messages are imported, damage is listed, and the directory is not changed."""

import hashlib
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock import Queue
from penstock.cli import ledgerq_import, ledgerq_reader
from penstock.cli.ledgerq_reader import MessageBatch
from penstock.words.clock import SystemClock
from tests.cli.conftest import CommandLine
from tests.cli.ledgerq_files import NOW, LedgerQDirectory, dedup_state, entry, retry_state, zipped


@pytest.fixture
def left(tmp_path: Path) -> LedgerQDirectory:
    return LedgerQDirectory(tmp_path / "ledger")


def soon() -> int:
    return SystemClock().read().wall * 1_000 + 3_600 * 1_000_000_000


def test_messages_become_items(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"old"), entry(2, b"one", headers={b"trace": b"t1", b"raw": b"\xff"}))
    left.add(zipped(3, b"two", priority=2), entry(4, b"three", expires=soon(), priority=1), entry(5, b"gone", expires=NOW + 1))
    left.read_up_to(2)
    before = {path.name: path.read_bytes() for path in left.directory.iterdir()}

    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")
    assert {name: found[name] for name in ("imported", "consumed", "expired", "last_id", "skipped")} == {
        "imported": 3, "consumed": 1, "expired": 1, "last_id": 4, "skipped": [],
    }  # fmt: skip
    one, two, three = sorted(orders_cli.json("items", "orders"), key=lambda item: str(item["reference"]))
    assert [item["payload"] for item in (one, two, three)] == ["one", "two", "three"]
    assert one["headers"] == {"trace": "t1", "raw_base64": "/w==", "ledgerq.time": "2023-11-14T22:13:20Z"}
    assert [item["reference"] for item in (one, two, three)] == ["ledgerq:2", "ledgerq:3", "ledgerq:4"]
    assert [item["priority"] for item in (one, two, three)] == [5, 1, 3]
    assert "ttl" not in one and 3_500 < three["ttl"] <= 3_600
    assert {path.name: path.read_bytes() for path in left.directory.iterdir()} == before


def test_the_answer_as_text(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"a", priority=1), entry(2, b"b"), entry(3, b"c", expires=NOW + 1))
    left.read_up_to(2)
    ran = orders_cli.run("import", "ledgerq", str(left), "--queue", "orders")
    assert ran.out.splitlines() == ["1 item imported", "1 skipped: already delivered by LedgerQ", "1 skipped: expired"]
    assert ran.err.count("\n") == 1 and "--all imports them all" in ran.err


def test_import_all_includes_delivered_messages(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"a"), entry(2, b"b"))
    left.read_up_to(3)
    assert orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")["imported"] == 0
    assert orders_cli.json("import", "ledgerq", str(left), "--queue", "orders", "--all")["imported"] == 2


def test_the_order_is_kept_over_many_batches(orders_cli: CommandLine, left: LedgerQDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgerq_reader, "BATCH", 7)
    for first in range(1, 101, 20):
        left.add(*(entry(id, str(id).encode(), headers={b"customer": b"ann"}) for id in range(first, first + 20)))
    assert orders_cli.json("import", "ledgerq", str(left), "--queue", "orders", "--key-header", "customer")["imported"] == 100
    items = orders_cli.json("items", "orders")
    assert [item["payload"] for item in items] == [str(id) for id in range(1, 101)]
    assert {item["key"] for item in items} == {"ann"}


def test_a_crash_left_a_torn_end_and_no_metadata(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    path = left.add(entry(1, b"whole"), entry(2, b"torn"))
    os.truncate(path, path.stat().st_size - 10)
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")
    assert found["imported"] == 1 and found["torn"] == 1
    (skipped,) = found["skipped"]
    assert skipped == {"file": path.name, "byte": 64 + 35, "size": 24, "why": "cut off at the end", "torn": True}
    assert "there is no metadata.dat" in found["notes"][0]


def test_damage_is_skipped_and_listed(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    path = left.add(entry(1, b"one"), entry(2, b"two"), entry(3, b"three"))
    data = bytearray(path.read_bytes())
    data[64 + 33 + 25] ^= 1
    path.write_bytes(data)
    left.read_up_to(1)
    ran = orders_cli.run("import", "ledgerq", str(left), "--queue", "orders", code=1)
    assert ran.out.splitlines() == ["2 items imported", f"! {path.name}, byte 97: damaged (33 bytes)"]
    assert [item["payload"] for item in orders_cli.json("items", "orders")] == ["one", "three"]


def test_entries_behind_a_damaged_header_are_imported(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    path = left.add(entry(1, b"one"))
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders", code=1)
    assert found["imported"] == 1 and found["skipped"][0]["why"] == "the header is damaged"


def test_foreign_files_and_unknown_versions_are_skipped(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"one"))
    (left.directory / f"{5:020d}.log").write_bytes(b"something else entirely, but as long as the header of a segment must be")
    (left.directory / f"{6:020d}.log").write_bytes(b"")
    (left.directory / "notes.log").write_bytes(b"")
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders", code=1)
    assert found["imported"] == 1
    assert [one["why"] for one in found["skipped"]] == ["it is not a segment of LedgerQ", "the header is cut off"]


def test_messages_over_the_limits_of_an_item_are_listed(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"a", headers={b"customer": b"k" * 2000}), entry(2, b"b", headers={b"customer": b"ann"}))
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders", "--key-header", "customer", code=1)
    assert found["imported"] == 1
    assert found["skipped"][0]["why"].startswith("message 1 is not imported: a key has 2000 bytes")


def test_a_dry_run_stores_nothing(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"one"))
    before = orders_cli.files()
    assert orders_cli.run("import", "ledgerq", str(left), "--queue", "orders", "--dry-run").out == "1 item would be imported\n"
    assert orders_cli.files() == before


def test_import_after_a_message(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(*(entry(id, b"x") for id in range(1, 11)))
    left.read_up_to(1)
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders", "--after", "6")
    assert (found["imported"], found["imported_before"], found["consumed"]) == (4, 6, 0)


# -- once ----------------------------------------------------------------------------------------------


def payloads(cli: CommandLine, queue: str = "orders") -> list[str]:
    """The payloads in the order of the partitions, so sorted here."""
    return sorted(item["payload"] for item in cli.json("items", queue))


def test_a_second_import_takes_only_what_is_new(orders_cli: CommandLine, left: LedgerQDirectory, tmp_path: Path) -> None:
    left.add(*(entry(id, str(id).encode()) for id in (1, 2, 3, 4)))
    path = left.add(entry(5, b"5"), entry(6, b"6"))
    left.read_up_to(3)
    command = ("import", "ledgerq", str(left), "--queue", "orders")
    assert orders_cli.json(*command)["imported"] == 4
    again = orders_cli.run(*command)
    assert again.out.splitlines() == ["0 items imported", "2 skipped: already delivered by LedgerQ", "4 skipped: imported before"]
    path.write_bytes(path.read_bytes() + entry(7, b"7") + entry(8, b"8"))
    left.read_up_to(7)
    moved = left.directory.rename(tmp_path / "moved")
    command = ("import", "ledgerq", str(moved), "--queue", "orders")
    assert orders_cli.run(*command, "--dry-run").out.splitlines()[0] == "2 items would be imported"
    found = orders_cli.json(*command)
    assert (found["imported"], found["imported_before"], found["consumed"]) == (2, 4, 2)
    everything = orders_cli.json(*command, "--all")
    assert (everything["imported"], everything["imported_before"]) == (2, 6), "those that were left out are imported now"
    assert orders_cli.json(*command, "--all")["imported"] == 0
    assert payloads(orders_cli) == [str(id) for id in range(1, 9)]


def test_a_directory_that_was_made_anew_is_another_source(orders_cli: CommandLine, left: LedgerQDirectory, tmp_path: Path) -> None:
    left.add(entry(1, b"old"))
    orders_cli.run("import", "ledgerq", str(left), "--queue", "orders")
    left.directory.rename(tmp_path / "away")
    LedgerQDirectory(left.directory, created=NOW + 1).add(entry(1, b"new"))
    assert orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")["imported"] == 1
    assert payloads(orders_cli) == ["new", "old"]


def test_the_queues_of_a_broker_remember_their_imports_apart(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"a"))
    orders_cli.run("queue", "create", "other")
    for queue in ("orders", "other"):
        assert orders_cli.json("import", "ledgerq", str(left), "--queue", queue)["imported"] == 1


def test_an_import_that_is_killed_continues_where_it_ended(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    """The process is killed when its second batch is published and nothing was told to the user yet."""
    left.add(*(entry(id, str(id).encode()) for id in range(1, 21)))
    left.add(*(entry(id, str(id).encode()) for id in range(21, 31)))
    script = (
        "import os; from penstock.cli import ledgerq_import, ledgerq_reader; from penstock.cli.app import app\n"
        "ledgerq_reader.BATCH = 4; send = ledgerq_import._send; sent = []\n"
        "def killed(queue, batch):\n"
        "    sent.append(send(queue, batch)); len(sent) < 2 or os.kill(os.getpid(), 9)\n"
        "    return True\n"
        "ledgerq_import._send = killed; app()\n"
    )
    args = ["import", "ledgerq", str(left), "--queue", "orders"]
    ran = subprocess.run([sys.executable, "-c", script, "--broker", str(orders_cli.target), *args], timeout=60, check=False)
    assert ran.returncode == -9
    found = orders_cli.json(*args)
    assert (found["imported"], found["imported_before"]) == (22, 8)
    assert payloads(orders_cli) == sorted(str(id) for id in range(1, 31))


def test_a_paused_or_full_queue_says_how_to_continue(
    orders_cli: CommandLine, left: LedgerQDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgerq_reader, "BATCH", 3)
    left.add(*(entry(id, str(id).encode()) for id in range(1, 11)))
    orders_cli.run("queue", "create", "small", "--max-items", "6")
    command = ("import", "ledgerq", str(left), "--queue", "small", "--timeout", "100ms")
    with orders_cli.open() as broker:
        broker.queue("small").pause(lease=False)
    assert "producing to queue 'small' is paused; resume it" in orders_cli.refused(*command, code=9)
    with orders_cli.open() as broker:
        broker.queue("small").resume()
    assert "takes no items for now (is it paused or full?)" in orders_cli.refused(*command, code=9)
    orders_cli.run("queue", "update", "small", "--max-items", "0")
    assert orders_cli.json(*command)["imported"] == 0, "the rest waited in the inbox"
    assert payloads(orders_cli, "small") == sorted(str(id) for id in range(1, 11))


def test_another_import_of_the_same_directory_meanwhile(
    orders_cli: CommandLine, left: LedgerQDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgerq_reader, "BATCH", 2)
    left.add(*(entry(id, str(id).encode()) for id in range(1, 8)))
    sent: list[MessageBatch] = []
    send = ledgerq_import._send

    def overtaken(queue: Queue, batch: MessageBatch) -> bool:
        if not sent:
            sent.append(batch)
            monkeypatch.setattr(ledgerq_reader, "BATCH", 3)
            orders_cli.run("import", "ledgerq", str(left), "--queue", "orders")
            monkeypatch.setattr(ledgerq_reader, "BATCH", 2)
        return send(queue, batch)

    monkeypatch.setattr(ledgerq_import, "_send", overtaken)
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")
    assert (found["imported"], found["imported_before"]) == (0, 7)
    assert payloads(orders_cli) == [str(id) for id in range(1, 8)]


# -- side files ----------------------------------------------------------------------------------------


def test_failed_messages_are_imported_with_their_attempts(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(*(entry(id, str(id).encode()) for id in range(1, 7)))
    left.read_up_to(5)
    (left.directory / ".retry_state.json").write_bytes(retry_state((2, 1, "timeout"), (4, 2, "no route"), (99, 1, "gone")))
    ran = orders_cli.run("import", "ledgerq", str(left), "--queue", "orders")
    assert ran.out.splitlines() == ["4 items imported", "2 of them with failed attempts", "2 skipped: already delivered by LedgerQ"]
    found = {item["payload"]: item for item in orders_cli.json("items", "orders")}
    assert {payload: (item["attempts"], item.get("reason", "")) for payload, item in found.items()} == {
        "2": (1, "timeout"), "4": (2, "no route"), "5": (0, ""), "6": (0, ""),
    }  # fmt: skip
    orders_cli.run("queue", "update", "orders", "--max-attempts", "3")
    with orders_cli.open() as broker:
        queue = broker.queue("orders")
        leases = {lease.item.payload.decode(): lease for lease in queue.lease(4)}
        assert {value: lease.attempts for value, lease in leases.items()} == {"2": 2, "4": 3, "5": 1, "6": 1}
        queue.retry([*leases.values()], reason="again")
        (dead,) = broker.queue("orders.dead").lease(2, wait=10).items
        assert dead.origin is not None and (dead.payload, dead.origin.attempts) == (b"4", 3), "it was its third attempt"
    again = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")
    assert (again["imported"], again["imported_before"], again["consumed"]) == (0, 4, 2)
    assert orders_cli.json("import", "ledgerq", str(left), "--queue", "orders", "--all")["imported"] == 2


def test_dedup_ids_are_brought_along(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(*(entry(id, str(id).encode()) for id in (1, 2, 3)))
    left.read_up_to(2)
    (left.directory / ".dedup_state.json").write_bytes(dedup_state((1, "delivered", soon()), (2, "order-2", soon()), (3, "old", NOW)))
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")
    assert (found["imported"], found["deduplicated"]) == (2, 1)
    assert any("1 dedup id of delivered messages not brought along" in note for note in found["notes"])
    for name, known in (("order-2", True), ("old", False), ("delivered", False)):
        dedup = hashlib.sha256(name.encode()).hexdigest()
        assert orders_cli.json("produce", "orders", "x", "--dedup", dedup)["duplicate"] is known


def test_dead_letters_go_to_the_dead_queue(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(7, b"live"))
    dead = LedgerQDirectory(left.directory / "dlq", created=NOW + 5)
    told = {
        b"dlq.original_msg_id": b"3", b"dlq.retry_count": b"4", b"dlq.failure_reason": b"no such customer",
        b"dlq.last_failure": b"2023-11-14T22:13:20.000Z", b"trace": b"t",
    }  # fmt: skip
    dead.add(entry(1, b"done"), entry(2, b"dead", headers=told))
    dead.read_up_to(2)
    alone = orders_cli.run("import", "ledgerq", str(left), "--queue", "orders", "--dry-run")
    assert f"{dead} is another LedgerQ queue; if it has the dead letters, give it as --dead-letters" in alone.err
    orders_cli.run("queue", "create", "plain")
    said = orders_cli.refused("import", "ledgerq", str(left), "--queue", "plain", "--dead-letters", str(dead))
    assert "queue 'plain' has no dead queue for the dead letters; create one" in said and payloads(orders_cli, "plain") == []
    command = ("import", "ledgerq", str(left), "--queue", "orders", "--dead-letters", str(dead))
    ran = orders_cli.run(*command)
    assert ran.out.splitlines() == [
        "1 item imported", "1 dead letter imported into 'orders.dead'", "1 skipped: already delivered by LedgerQ",
    ]  # fmt: skip
    assert orders_cli.json(*command)["dead_letters"]["imported_before"] == 1
    (letter,) = orders_cli.json("dead", "list", "orders")
    assert (letter["payload"], letter["reference"], letter["headers"]["trace"]) == ("dead", "ledgerq:3", "t")
    assert not any(name.startswith("dlq.") for name in letter["headers"])
    with orders_cli.open() as broker:
        (item,) = broker.queue("orders.dead").items()
        origin = item.origin
        assert origin is not None and (origin.queue, origin.attempts, origin.reason) == ("orders", 4, "no such customer")
        assert origin.last_failed_at == origin.buried_at == datetime.fromtimestamp(NOW // 1_000_000_000, UTC)
        assert item.attempts == 0


def test_side_files_that_cannot_be_used(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"one"))
    left.read_up_to(1)
    (left.directory / ".retry_state.json").write_bytes(retry_state((1, 1, "x"), version=2))
    (left.directory / ".dedup_state.json").write_bytes(b"{")
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")
    assert (found["imported"], found["retried"], found["deduplicated"]) == (1, 0, 0)
    assert "its version is 2, and 1 is known): retries are not imported" in found["notes"][0]
    assert ".dedup_state.json cannot be used" in found["notes"][1]


def test_metadata_that_cannot_be_used(orders_cli: CommandLine, left: LedgerQDirectory) -> None:
    left.add(entry(1, b"one"))
    (left.directory / "metadata.dat").write_bytes(b"short")
    found = orders_cli.json("import", "ledgerq", str(left), "--queue", "orders")
    assert found["imported"] == 1 and "it has 5 bytes instead of 24" in found["notes"][0]


def test_directories_that_cannot_be_imported(orders_cli: CommandLine, left: LedgerQDirectory, tmp_path: Path) -> None:
    assert "cannot be read" in orders_cli.refused("import", "ledgerq", str(tmp_path / "nowhere"), "--queue", "orders", code=5)
    assert "holds no segment" in orders_cli.refused("import", "ledgerq", str(left), "--queue", "orders", code=5)
    left.add(entry(1, b"one"))
    assert "there is no queue" in orders_cli.refused("import", "ledgerq", str(left), "--queue", "nope", code=5)
    assert "missing option '--queue'" in orders_cli.refused("import", "ledgerq", str(left))
