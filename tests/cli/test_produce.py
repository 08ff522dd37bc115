"""`penstock produce`: from an argument, stdin, lines, JSON lines and CSV."""

from pathlib import Path

import pytest

from penstock.cli import produce
from tests.cli.conftest import CommandLine


def test_a_value(orders_cli: CommandLine) -> None:
    assert orders_cli.out("produce", "orders", "hello", "--key", "a").count("-") == 1
    assert set(orders_cli.json("produce", "orders", "world", "--key", "a")) == {"id", "duplicate"}
    assert [(one["payload"], one["encoding"], one["key"]) for one in orders_cli.json("items", "orders")] == [
        ("hello", "text", "a"),
        ("world", "text", "a"),
    ]


def test_every_option_of_an_item(orders_cli: CommandLine) -> None:
    orders_cli.run(
        "produce", "orders", '{"a": [1]}', "--as", "json", "--key", "k", "--kind", "invoice", "--reference", "r-1", "--priority", "2",
        "--at", "2999-01-01T00:00:00Z", "--ttl", "2h", "--header", "a=1", "--header", "b=x=y", "--dedup", "d",
    )  # fmt: skip
    (one,) = orders_cli.json("items", "orders")
    expected = {
        "payload": '{"a": [1]}', "value": {"a": [1]}, "encoding": "json", "key": "k", "kind": "invoice", "reference": "r-1", "priority": 2,
        "at": "2999-01-01T00:00:00Z", "ttl": 7200, "headers": {"a": "1", "b": "x=y"}, "state": "scheduled",
    }  # fmt: skip
    assert {name: one[name] for name in expected} == expected
    again = orders_cli.json("produce", "orders", "other", "--key", "k", "--dedup", "d")
    assert again == {"id": one["id"], "duplicate": True}


def test_a_dedup_window(orders_cli: CommandLine) -> None:
    orders_cli.run("queue", "update", "orders", "--dedup-window", "1ms")
    first = orders_cli.json("produce", "orders", "x", "--dedup", "d", "--dedup-window", "1h")
    assert orders_cli.json("produce", "orders", "x", "--dedup", "d") == {"id": first["id"], "duplicate": True}
    assert "--dedup-window is given without a dedup id" in orders_cli.refused("produce", "orders", "x", "--dedup-window", "1h")


def test_a_delay(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "x", "--delay", "1h", "--encoding", "mine")
    (one,) = orders_cli.json("items", "orders", "--state", "scheduled")
    assert one["encoding"] == "mine"
    assert 3500 < orders_cli.json("explain", "orders", one["id"])["ready_in_seconds"] <= 3600


def test_whole_stdin_is_one_item(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", input="two\nlines\n")
    orders_cli.run("produce", "orders", "-", "--as", "bytes", input=b"\xff\x00")
    orders_cli.run("produce", "orders", "", input="")
    found = sorted(orders_cli.json("items", "orders"), key=lambda one: one["produced_at"])
    assert [one.get("payload", one.get("payload_base64")) for one in found] == ["two\nlines\n", "/wA=", ""]
    assert "is not UTF-8" in orders_cli.refused("produce", "orders", input=b"\xff")
    assert "is not JSON" in orders_cli.refused("produce", "orders", "{", "--as", "json")


def test_a_file(orders_cli: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\n\nc")
    assert orders_cli.out("produce", "orders", "--from", str(path), "--lines") == "3 items produced"
    assert orders_cli.json("stats", "orders")["ready"] == 3
    assert "No such file" in orders_cli.refused("produce", "orders", "--from", str(tmp_path / "no"), "--lines", code=5)
    assert "directory" in orders_cli.refused("produce", "orders", "--from", str(tmp_path), code=5)


def test_json_lines_with_keys(orders_cli: CommandLine) -> None:
    text = "".join(f'{{"customer": "c{number % 3}", "n": {number}}}\n' for number in range(9))
    assert orders_cli.json("produce", "orders", "--jsonl", "--key-field", "customer", input=text) == {
        "produced": 9,
        "duplicates": 0,
        "bad": 0,
    }
    found = orders_cli.json("items", "orders")
    assert all(one["key"] == one["value"]["customer"] for one in found)
    for customer in ("c0", "c1", "c2"):
        assert [one["value"]["n"] % 3 for one in found if one["key"] == customer] == [int(customer[1])] * 3


def test_csv_with_keys_and_kinds(orders_cli: CommandLine) -> None:
    text = "id;who;what\n1;ann;buy\n2;bob;sell\n"
    orders_cli.run("produce", "orders", "--csv", "--key-column", "who", "--kind-column", "what", "--delimiter", ";", input=text)
    assert {(one["key"], one["kind"], one["value"]["id"]) for one in orders_cli.json("items", "orders")} == {
        ("ann", "buy", "1"),
        ("bob", "sell", "2"),
    }
    orders_cli.run("produce", "orders", "--csv", "--columns", "a, b", "--delimiter", "tab", input="1\t2\n")
    assert any(one["value"] == {"a": "1", "b": "2"} for one in orders_cli.json("items", "orders"))


def test_a_bad_line_stops_and_everything_before_it_is_stored(orders_cli: CommandLine) -> None:
    said = orders_cli.refused("produce", "orders", "--jsonl", input='{"n":1}\n{"n":2}\n{bad\n{"n":4}\n')
    assert said.startswith("line 3 is not JSON")
    assert said.endswith("; fix it and continue from that line, or skip such lines with --skip-bad; 2 items stored before")
    assert sorted(one["value"]["n"] for one in orders_cli.json("items", "orders")) == [1, 2]


def test_bad_lines_are_skipped_and_counted(orders_cli: CommandLine) -> None:
    text = '{"k":"a"}\n' + "nonsense\n" * 15 + '{"other":1}\n{"k":"b"}\n'
    ran = orders_cli.run("produce", "orders", "--jsonl", "--key-field", "k", "--skip-bad", input=text)
    assert ran.out == "2 items produced, 16 bad lines skipped\n"
    assert ran.err.splitlines()[0].startswith("penstock: line 2 is not JSON")
    assert len(ran.err.splitlines()) == 10
    assert orders_cli.json("produce", "orders", "--jsonl", "--skip-bad", input="x\n") == {"produced": 0, "duplicates": 0, "bad": 1}


def test_an_item_that_the_queue_refuses_is_a_bad_line(orders_cli: CommandLine) -> None:
    long = "k" * 2000
    text = f'{{"k":"a"}}\n{{"k":"{long}"}}\n{{"k":"b"}}\n'
    said = orders_cli.refused("produce", "orders", "--jsonl", "--key-field", "k", input=text)
    assert said.startswith("line 2 is refused (a key has 2000 bytes") and said.endswith("1 item stored before")
    assert [one["key"] for one in orders_cli.json("items", "orders")] == ["a"]
    assert orders_cli.json("produce", "orders", "--jsonl", "--key-field", "k", "--skip-bad", input=text)["produced"] == 2


def test_batches_keep_the_order(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "BATCH_BYTES", 50)
    text = "".join(f"{number}\n" for number in range(100))
    for batch in ("7", "10000"):
        orders_cli.run("produce", "orders", "--lines", "--key", "k", "--batch", batch, input=text)
    assert [one["payload"] for one in orders_cli.json("items", "orders", "--limit", "1000")] == [str(number) for number in range(100)] * 2


def test_a_full_queue_reports_how_many_items_were_stored(orders_cli: CommandLine) -> None:
    orders_cli.run("queue", "create", "small", "--max-items", "10")
    said = orders_cli.refused("produce", "small", "--lines", "--batch", "4", "--timeout", "0s", input="x\n" * 20, code=9)
    assert "full" in said and said.endswith("; 8 items stored before")
    assert orders_cli.json("stats", "small")["ready"] == 8


def test_duplicates_are_told(orders_cli: CommandLine) -> None:
    orders_cli.run("queue", "create", "once", "--dedup-window", "1h", "--partitions", "3")
    lines = "".join(f'{{"id": "{name}"}}\n' for name in "aabc")
    assert orders_cli.out("produce", "once", "--jsonl", "--dedup-field", "id", input=lines) == "3 items produced, 1 duplicate not added"
    found = orders_cli.json("produce", "once", "--jsonl", "--dedup-field", "id", input=lines)
    assert found == {"produced": 0, "duplicates": 4, "bad": 0}
    assert orders_cli.json("stats", "once")["ready"] == 3
    first = orders_cli.run("produce", "once", "x", "--dedup", "d")
    again = orders_cli.run("produce", "once", "x", "--dedup", "d")
    assert (first.err, again.out) == ("", first.out)
    assert again.err == "penstock: an item with this dedup id was produced before: nothing was added\n"
    assert orders_cli.json("produce", "once", "x", "--dedup", "d")["duplicate"] is True


def test_an_empty_dedup_id_is_refused(orders_cli: CommandLine) -> None:
    assert "the dedup id is empty" in orders_cli.refused("produce", "orders", "x", "--dedup", "")
    said = orders_cli.refused("produce", "orders", "--jsonl", "--dedup-field", "id", input='{"id": "a"}\n{"id": ""}\n')
    assert "line 2" in said and "the dedup id is empty" in said and "1 item stored before" in said


def test_progress_does_not_touch_the_answer(orders_cli: CommandLine) -> None:
    ran = orders_cli.run("produce", "orders", "--lines", "--progress", "--json", input="a\nb\n")
    assert ran.out.split() == ["{", '"produced":', "2,", '"duplicates":', "0,", '"bad":', "0", "}"]
    assert "producing" in ran.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--as", "xml"], "--as is 'xml'; use text, json, bytes"),
        (["--lines", "--jsonl"], "--lines and --jsonl were both given"),
        (["x", "--lines"], "--lines reads a file or stdin, and a VALUE was given"),
        (["x", "--from", "f"], "a VALUE and --from were both given"),
        (["x", "--key-field", "k"], "--key-field needs records"),
        (["--jsonl", "--key", "a", "--key-column", "k"], "--key and --key-field were both given"),
        (["x", "--at", "tomorrow"], "--at is 'tomorrow'; give a time"),
        (["x", "--at", "2030-01-01", "--delay", "1s"], "--at and --delay were both given"),
        (["x", "--delay", "soon"], "--delay is 'soon'; give seconds"),
        (["x", "--ttl", "0"], "--ttl is 0; give more, or leave it out for the queue's own"),
        (["x", "--priority", "10"], "--priority is 10; give a whole number"),
        (["x", "--priority", "high"], "--priority is 'high'; give a whole number"),
        (["x", "--header", "a"], "--header is 'a'; give it as NAME=VALUE"),
        (["--lines", "--batch", "0"], "--batch is 0; give a whole number from 1 to 10000"),
        (["x", "--columns", "a"], "--columns is for CSV; add --csv, or leave it out"),
        (["--jsonl", "--delimiter", "tab"], "--delimiter is for CSV; add --csv, or leave it out"),
        (["x", "--skip-bad"], "--skip-bad is for several items; add --lines, --jsonl or --csv, or leave it out"),
        (["--csv", "--delimiter", "ab"], "--delimiter is 'ab'"),
        (["--csv", "--columns", "a,,b"], "--columns is 'a,,b'"),
        (["--csv", "--key-column", "z"], "there is no column 'z'; there are x"),
        (["x", "--key", "k" * 2000], "a key has 2000 bytes"),
        (["x", "y"], "unexpected extra argument"),
        (["x", "--colour"], "no such option: --colour"),
        (["x", "--timeout", "1h"], "--timeout is 3600"),
    ],
)
def test_wrong_input_is_one_line_and_stores_nothing(orders_cli: CommandLine, args: list[str], said: str) -> None:
    before = orders_cli.json("stats", "orders")["produced"]
    assert said in orders_cli.refused("produce", "orders", *args, input="x\ny\n")
    assert orders_cli.json("stats", "orders")["produced"] == before


def test_no_such_queue(orders_cli: CommandLine) -> None:
    assert "there is no queue 'nope'" in orders_cli.refused("produce", "nope", "x", code=5)
