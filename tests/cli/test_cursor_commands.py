"""`penstock cursor …` and `penstock queue read-only`: the effect and the answer of each command."""

from typing import Any

import pytest

from tests.cli.conftest import CommandLine


@pytest.fixture
def lines_cli(cli: CommandLine) -> CommandLine:
    """A queue of one partition with five items."""
    cli.run("queue", "create", "lines")
    cli.run("produce", "lines", "--lines", input="a\nb\nc\nd\ne\n")
    return cli


def test_a_cursor_is_created_shown_moved_and_deleted(lines_cli: CommandLine) -> None:
    cli = lines_cli
    assert cli.out("cursor", "list", "lines") == "queue lines has no cursors"
    start = {"partition": 0, "position": 0, "end": 5, "lag": 5}
    assert cli.json("cursor", "create", "lines", "audit") == {"name": "audit", "lag": 5, "partitions": [start]}
    assert cli.out("cursor", "seek", "lines", "audit", "0-3").splitlines()[1].split() == ["0", "3", "5", "2"]
    assert [line.split() for line in cli.out("cursor", "list", "lines").splitlines()] == [
        ["NAME", "LAG", "NEXT", "ITEMS"],
        ["audit", "2", "0-3"],
    ]
    with cli.open() as broker:
        assert [item.payload for item in broker.queue("lines").cursor("audit").read(10)] == [b"d", b"e"]
    assert cli.json("cursor", "seek", "lines", "audit", "newest")["lag"] == 0
    assert cli.json("cursor", "seek", "lines", "audit", "2020-01-01T00:00:00Z")["lag"] == 5
    assert cli.json("cursor", "show", "lines", "audit")["partitions"] == [start]
    assert "which has not read 5 items" in cli.refused("cursor", "delete", "lines", "audit")
    assert cli.json("cursor", "delete", "lines", "audit", "--yes") == {"queue": "lines", "deleted": "audit", "lag": 5}
    assert cli.json("cursor", "list", "lines") == []


def test_a_cursor_may_begin_at_the_end(lines_cli: CommandLine) -> None:
    assert lines_cli.json("cursor", "create", "lines", "tail", "--start", "newest")["lag"] == 0
    lines_cli.run("produce", "lines", "f")
    assert lines_cli.json("cursor", "show", "lines", "tail")["lag"] == 1


def test_a_position_beyond_the_end_is_refused(lines_cli: CommandLine) -> None:
    lines_cli.run("cursor", "create", "lines", "audit", "--start", "0-2")
    before = lines_cli.json("cursor", "list", "lines")
    beyond = [["cursor", "create", "lines", "new", "--start"], ["cursor", "seek", "lines", "audit"], ["queue", "seek", "lines"]]
    for words in beyond:
        said = lines_cli.refused(*words, "0-6")
        assert said == "there is no item 0-6, partition 0 ends before 0-5; give that at most"
        assert "has no partition 7" in lines_cli.refused(*words, "7-0")
    assert lines_cli.json("cursor", "list", "lines") == before
    assert lines_cli.json("cursor", "seek", "lines", "audit", "0-5")["lag"] == 0, "the next item is the end"


def test_a_cursor_that_is_not_there_is_not_made_by_mistake(lines_cli: CommandLine) -> None:
    lines_cli.run("cursor", "create", "lines", "audit")
    for args in (["show", "lines", "adit"], ["seek", "lines", "adit", "newest"], ["delete", "lines", "adit", "-y"]):
        assert lines_cli.refused("cursor", *args, code=5) == "there is no cursor 'adit' in queue 'lines'; there are: audit"
    assert "a cursor 'audit' already" in lines_cli.refused("cursor", "create", "lines", "audit")
    assert "the position is 'noon'" in lines_cli.refused("cursor", "seek", "lines", "audit", "noon")
    assert "--start is ''" in lines_cli.refused("cursor", "create", "lines", "new", "--start", "")
    assert [one["name"] for one in lines_cli.json("cursor", "list", "lines")] == ["audit"]


def _states(found: dict[str, Any]) -> tuple[list[int], list[int]]:
    return found["active"], found["read_only"]


def test_a_read_only_partition_is_drained(orders_cli: CommandLine) -> None:
    cli = orders_cli
    cli.run("produce", "orders", "--lines", input="a\n")
    [item] = cli.json("items", "orders")
    partition = int(item["id"].split("-")[0])
    other = 1 - partition
    assert (
        cli.out("queue", "read-only", "orders", str(partition))
        == f"partition {partition} of queue orders is read-only; 1 item in it is not resolved yet"
    )
    assert f"read-only        {partition}\n" in cli.out("queue", "info", "orders")
    for number in range(4):
        cli.run("produce", "orders", "--key", f"k{number}", "x")
    assert {one["id"].split("-")[0] for one in cli.json("items", "orders")} - {item["id"].split("-")[0]} == {str(other)}
    assert len(cli.json("items", "orders")) == 5
    assert len(cli.json("lease", "orders", "9")) == 5
    assert _states(cli.json("queue", "read-only", "orders", str(partition), "--off")) == ([0, 1], [])
    assert "has no partition 7; those that take items are [0, 1]" in cli.refused("queue", "read-only", "orders", "7")


def test_the_only_partition_gets_a_successor(lines_cli: CommandLine) -> None:
    found = lines_cli.json("queue", "read-only", "lines", "0")
    assert (_states(found), found["unresolved"]) == (([1], [0]), 5)
    lines_cli.run("produce", "lines", "f")
    assert lines_cli.json("items", "lines")[-1]["id"] == "1-0"
