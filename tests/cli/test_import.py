"""`penstock import ledgerq`: whole messages are imported, damage is listed, and the directory is not changed."""

import os
from pathlib import Path

import pytest

from penstock.cli import ledgerq_import
from penstock.words.clock import SystemClock
from tests.cli.conftest import CommandLine
from tests.cli.ledgerq_files import NOW, LedgerQDirectory, entry, zipped


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
    one, two, three = orders_cli.json("items", "orders")
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
    monkeypatch.setattr(ledgerq_import, "BATCH", 7)
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


def test_an_interrupted_import_prints_how_to_continue(
    orders_cli: CommandLine, left: LedgerQDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgerq_import, "BATCH", 3)
    left.add(*(entry(id, b"x") for id in range(1, 11)))
    left.read_up_to(1)
    orders_cli.run("queue", "create", "small", "--max-items", "6")
    with orders_cli.open() as broker:
        broker.queue("small").pause(lease=False)
    said = orders_cli.refused("import", "ledgerq", str(left), "--queue", "small", code=9)
    assert "0 items imported before; continue with --after 0" in said


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
