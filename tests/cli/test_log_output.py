"""The log of long-running commands: --log-format and --log-level."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.cli import programs
from tests.cli.conftest import CommandLine

SECRET = "4711-0815"

HANDLERS = """
import logging
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

trace.set_tracer_provider(TracerProvider())

def fail(item):
    logging.getLogger("shop").warning("charging", extra={"card": item.value})
    raise ValueError("no card")

def drop(item):
    pass
"""


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory of commands, with a traced module of handlers."""
    (tmp_path / "traced_shop.py").write_text(HANDLERS)
    monkeypatch.chdir(tmp_path)


def work(broker: CommandLine, *options: str, code: int = 0) -> tuple[str, list[str]]:
    """Run a worker until no item is left: its answer, and the lines on stderr."""
    command = ["-b", str(broker.target), "work", "-q", "orders", "--until-empty", "--retry-delay", "1ms", *options]
    with programs.penstock(*command) as process:
        found, out, err = process.end()
    assert found == code, err
    return out, err.splitlines()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("more", [["-c", "1"], ["--processes", "1"]], ids=["threads", "processes"])
def test_every_line_is_json_and_none_has_a_payload(orders_cli: CommandLine, more: list[str]) -> None:
    orders_cli.run("produce", "orders", SECRET)
    out, err = work(orders_cli, "traced_shop:fail", "--name", "till-1", "--log-format", "json", *more)
    assert "retried" in out
    lines: list[dict[str, Any]] = [json.loads(line) for line in err]
    assert SECRET not in str(lines)
    assert sorted(line["logger"] for line in lines) == ["penstock"] + ["penstock.worker"] * 2 + ["shop"] * 2
    assert [line["message"].split(":")[0] for line in lines if line["logger"] == "penstock"] == ["item 0-0 of queue 'orders' was buried"]
    failures = [line for line in lines if line["logger"] == "penstock.worker"]
    for line in failures:
        assert line["level"] == "warning" and line["message"].startswith(f"item {line['item_id']} of queue 'orders' failed at attempt ")
        assert (line["queue"], line["partition"], line["worker"]) == ("orders", int(line["item_id"].split("-")[0]), "till-1")
    spans = {(line["trace_id"], line["span_id"]) for line in lines if line["logger"] != "penstock"}
    assert len(spans) == 2  # each attempt's: the handler logs in it, and its failure is logged in it
    if "-c" in more:
        assert failures[0]["exception"]["type"] == "ValueError"
        assert failures[0]["exception"]["message"] == "no card"


@pytest.mark.usefixtures("handlers")
def test_the_level_chooses_the_lines(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_LEVEL", "info")
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    _, lines = work(orders_cli, "traced_shop:drop")
    assert {json.loads(line)["level"] for line in lines} == {"info"}
    told = [json.loads(line)["message"] for line in lines if json.loads(line)["logger"] == "penstock.worker"]
    assert [text.split(":")[0].removeprefix("the worker of queue 'orders' ") for text in told] == [
        *("starts, with 1 handlers at once", "drains", "has drained"),
    ]
    _, texts = work(orders_cli, "traced_shop:drop", "--log-format", "text")
    assert any(text.startswith("penstock: the worker of queue 'orders' drains") for text in texts)
    assert work(orders_cli, "traced_shop:drop", "--log-level", "warning")[1] == []


@pytest.mark.usefixtures("handlers")
def test_an_error_that_ends_the_command_is_a_line_too(orders_cli: CommandLine) -> None:
    _, (line,) = work(orders_cli, "traced_shop:drop", "-q", "nothing", "--log-format", "json", code=5)
    found = json.loads(line)
    assert (found["level"], found["logger"]) == ("error", "penstock.cli")
    assert "there is no queue 'nothing'" in found["message"]


def test_the_notes_of_an_owner_are_lines(orders_cli: CommandLine) -> None:
    with (
        programs.python(programs.OPEN, orders_cli.target) as first,
        programs.penstock("own", str(orders_cli.target), "--log-format", "json", "--log-level", "info") as second,
    ):
        connected, note = json.loads(second.note()), json.loads(second.note())
        assert connected["message"].startswith(f"this process ({second.pid}) uses {orders_cli.target} through its owner (process {first.pid} ")
        assert (note["level"], note["pid"]) == ("info", second.pid)
        assert note["message"].startswith(f"waiting for the owner of {orders_cli.target} (process {first.pid} on ")
        first.write_line()
        assert second.line() == f"process {second.pid} owns {orders_cli.target}"
        second.signal(signal.SIGTERM)
        _, _, err = second.end()
        assert [json.loads(line)["message"] for line in err.splitlines()] == [
            f"{orders_cli.target} is open, with 2 queues; this process ({second.pid}) owns it",
            f"this process ({second.pid}) now owns {orders_cli.target}: the former owner has ended",
            f"{orders_cli.target} is closed",
        ]


@pytest.mark.parametrize("kind", ["own", "serve"])
def test_what_clients_do_is_in_the_log_of_the_owner(orders_cli: CommandLine, kind: str) -> None:
    """The owner of a directory, and a server: their clients are other processes."""
    more = ["--bind", "127.0.0.1:0", "--json"] if kind == "serve" else []
    with programs.penstock(kind, str(orders_cli.target), "--log-format", "json", "--log-level", "info", *more) as owner:
        said = owner.line()
        target = json.loads(said)["urls"][0] if kind == "serve" else str(orders_cli.target)
        with penstock.open(target, **({} if kind == "serve" else {"own": False})) as broker:
            queue = broker.create_queue("mail", partitions=2, max_attempts=1)
            queue.pause()
            queue.resume()
            queue.produce("x")
            queue.lease(wait=10).retry(reason="no card")
            broker.redrive(queue, to=queue)
            queue.resize(3)
            broker.delete_queue("mail", timeout=10)
        owner.signal(signal.SIGTERM)
        _, _, err = owner.end()
    found = [json.loads(line) for line in err.splitlines()]
    told = [line["message"] for line in found if "queue" in line and "resize" not in line["message"]]
    assert told == [
        "queue 'mail' was created, with 2 partitions",
        "leasing from queue 'mail' is paused and producing to queue 'mail' is paused",
        "leasing from queue 'mail' is resumed and producing to queue 'mail' is resumed",
        "item 0-0 of queue 'mail' was buried: attempts spent: no card",
        "1 items were redriven from queue 'mail' to queue 'mail'",
        "queue 'mail' has 3 partitions now (before: 2)",
        "queue 'mail' was deleted",
    ]
    assert {line["queue"] for line in found if "queue" in line} == {"mail"}


def test_the_log_of_a_server(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVE_LOG_FORMAT", "json")
    with programs.penstock("serve", str(orders_cli.target), "--json", "--bind", "127.0.0.1:0") as server:
        (url,) = json.loads(server.line())["urls"]
        with programs.penstock("serve", str(orders_cli.target), "--bind", url.removeprefix("http://")) as refused:
            _, _, err = refused.end()
            assert [(json.loads(line)["level"], "in use" in line) for line in err.splitlines()] == [("error", True)], err
        server.signal(signal.SIGTERM)
        _, _, err = server.end()
    lines = [json.loads(line) for line in err.splitlines()]
    assert [(line["level"], line["message"].split(":")[0]) for line in lines if str(orders_cli.target) not in line["message"]] == [
        ("info", "draining"),
        ("info", "closed"),
    ]
    assert len(lines) == 4, "the directory was opened and closed"


@pytest.mark.parametrize(("option", "wanted"), [("--log-format", "text or json"), ("--log-level", "debug, info, warning, error")])
def test_other_values_are_refused(orders_cli: CommandLine, option: str, wanted: str) -> None:
    said = orders_cli.refused("own", option, "loud")
    assert said == f"{option} is 'loud'; give {wanted}"
