"""`penstock verify` and `penstock repair`: damage is found, listed and repaired."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine


@pytest.fixture
def damaged(orders_cli: CommandLine) -> CommandLine:
    """A broker with a log that is damaged in the middle."""
    with orders_cli.open() as broker:
        for number in range(20):
            broker.queue("orders.dead").produce(f"item {number}")
    path = log_of(orders_cli, "orders.dead")
    data = bytearray(path.read_bytes())
    at = data.index(b"item 7")
    data[at] ^= 1
    path.write_bytes(data)
    return orders_cli


def log_of(terminal: CommandLine, queue: str) -> Path:
    incarnation = terminal.json("queue", "info", queue)["incarnation"]
    found: Path = next((terminal.target / "logs" / incarnation / "00000").glob("*.log"))
    return found


def test_sound_logs(orders_cli: CommandLine) -> None:
    lines = orders_cli.out("verify").splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["QUEUE", "PARTITION", "STATE"],
        ["(catalog)", "0", "sound"],
        *sorted(
            [["orders", "0", "sound"], ["orders", "1", "sound"], ["orders.dead", "0", "sound"]],
            key=lambda row: order_of(orders_cli, row[0]),
        ),
    ]
    found = orders_cli.json("verify", "orders")
    assert found["sound"] and [log["partition"] for log in found["logs"]] == [0, 1]
    assert [log["incarnation"] for log in found["logs"]] == [order_of(orders_cli, "orders")] * 2
    assert len(orders_cli.json("verify", "orders", "--partition", "1")["logs"]) == 1
    assert orders_cli.out("repair") == "nothing needs repair"
    assert orders_cli.json("repair")["repaired"] == 0


def order_of(terminal: CommandLine, queue: str) -> str:
    return str(terminal.json("queue", "info", queue)["incarnation"])


def test_damage_is_found_and_repaired(damaged: CommandLine) -> None:
    text = damaged.out("verify", code=1)
    assert "! orders.dead 0: " in text and "items 0-7 to 0-7 lost" in text
    found = damaged.json("verify", code=1)
    assert not found["sound"]
    (bad,) = [log for log in found["logs"] if not log["sound"]]
    assert bad["queue"] == "orders.dead" and [(gap["start"], gap["stop"]) for gap in bad["gaps"]] == [(7, 8)]

    before = log_of(damaged, "orders.dead").read_bytes()
    lines = damaged.out("repair").splitlines()
    assert any("items 0-7 to 0-7 lost" in line for line in lines)
    (kept,) = [line.rpartition(" ")[2] for line in lines if "is kept as" in line]
    assert Path(kept).read_bytes() == before
    assert Path(lines[-1].rpartition(" ")[2]).exists()

    assert "1 gap repaired before" in damaged.out("verify")
    assert damaged.out("repair") == "nothing needs repair"
    payloads = [one["payload"] for one in damaged.json("items", "orders.dead")]
    assert payloads == [f"item {number}" for number in range(20) if number != 7]


def test_repair_of_one_queue_as_json(damaged: CommandLine) -> None:
    assert damaged.json("repair", "orders")["repaired"] == 0
    found = damaged.json("repair", "orders.dead", "--partition", "0", "--discard", "--yes")
    assert found["repaired"] == 1 and found["failed"] == 0
    assert found["logs"][0]["changed"] and found["logs"][0]["copies"] == []


def test_discard_needs_yes_without_a_terminal(damaged: CommandLine) -> None:
    assert "add --yes" in damaged.refused("repair", "--discard")


def test_a_log_that_cannot_be_repaired(damaged: CommandLine) -> None:
    damaged.run("produce", "orders", "an item, so that there is a log")
    path = log_of(damaged, "orders.dead")
    data = bytearray(path.read_bytes())
    path.write_bytes(data)
    other = log_of(damaged, "orders")
    path.write_bytes(other.read_bytes())  # another partition's frames
    ran = damaged.run("repair", code=1)
    assert "! orders.dead 0 cannot be repaired" in ran.out
    assert damaged.json("repair", code=1)["failed"] == 1
    assert "does not open" in damaged.out("verify", code=1)


def test_verify_works_with_a_damaged_catalog(orders_cli: CommandLine) -> None:
    path = next((orders_cli.target / "logs" / f"{0:016x}" / "00000").glob("*.log"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ran = orders_cli.run("verify", code=1)
    assert "(catalog)" in ran.out


def test_a_torn_end_is_no_damage(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders.dead", "x")
    path = log_of(orders_cli, "orders.dead")
    with path.open("ab") as file:
        file.write(b"\x01\x02\x03")
    assert "3 bytes of an incomplete write at the end" in orders_cli.out("verify")


def test_verify_and_repair_while_another_owns_it(damaged: CommandLine) -> None:
    with damaged.open():
        assert damaged.json("verify", "orders")["sound"]
        said = damaged.refused("repair", code=4)
        assert f"repair needs the directory alone, and process {os.getpid()} on " in said and "end it, repair" in said


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_unknown_queues_and_partitions(orders_cli: CommandLine, command: str) -> None:
    assert "there is no queue 'nope' with a log" in orders_cli.refused(command, "nope", code=5)
    assert "there is no log of partition 9" in orders_cli.refused(command, "orders", "--partition", "9", code=5)
    assert "'x' is no whole number" in orders_cli.refused(command, "--partition", "x")
