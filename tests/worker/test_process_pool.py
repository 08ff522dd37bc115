"""Handlers in child processes: outcomes, and what happens to items when a process dies."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import Broker, Queue
from penstock.errors import InvalidRequest
from penstock.worker.outcomes import Bury, RetryPolicy
from penstock.worker.process_pool import ChildError
from penstock.worker.settings import Hooks
from penstock.worker.worker import Worker
from tests.worker import child_handlers
from tests.worker.harness import WAIT, HandlerEvents, WorkerThread, running_worker, wait_completed, wait_until


@pytest.fixture(autouse=True)
def bare_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep child processes from importing the main module of pytest."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lines"


@pytest.fixture
def produce(queue: Queue, file: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Produces items with instructions for `run_instruction`."""

    def produce(*what: str, **more: Any) -> list[str]:
        return queue.produce_many([{"do": do, "file": str(file), "go": str(tmp_path / "go"), **more} for do in what])

    return produce


def started(file: Path, count: int) -> list[list[Any]]:
    """Wait until the file has this many lines, and give them."""
    return wait_until(lambda: child_handlers.lines(file), lambda found: len(found) >= count)


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_children_handle_and_the_parent_settles(queue: Queue, file: Path, produce: Callable[..., list[str]]) -> None:
    ids = produce("retry", "bury", "snooze", "fail", "leave", *["done"] * 50)
    told: list[tuple[str, type[BaseException], str]] = []
    hooks = Hooks(failed=lambda item, error: told.append((item.id, type(error), str(error))))
    one = Worker(queue, child_handlers.run_instruction, processes=2, retry=RetryPolicy(base=100, by_type={ValueError: Bury}), hooks=hooks)
    with running_worker(one):
        wait_completed(queue, 50)
        wait_until(lambda: queue.stats(), lambda stats: stats.ready + stats.leased == 0)
    rows = child_handlers.lines(file)
    assert len(rows) == 55 and 1 <= len({pid for _, _, pid, *_ in rows} - {os.getpid()}) <= 2
    assert queue.explain(ids[0]).reason == "full"
    assert queue.explain(ids[1]).reason == "poison"
    assert queue.explain(ids[2]).attempts == 0
    assert queue.explain(ids[3]).reason == "ValueError: no such thing"
    assert queue.explain(ids[4]).reason == "SystemExit: 2"
    errors = {name: (kind, text) for name, kind, text in told}
    assert errors[ids[1]] == (Bury, "poison")
    assert errors[ids[3]][0] is ChildError and "child_handlers.py" in errors[ids[3]][1]
    assert not any(is_alive(pid) for _, _, pid, *_ in rows)


def test_outcomes_of_a_child_are_settled_by_its_parent(
    broker: Broker, queue: Queue, file: Path, tmp_path: Path, produce: Callable[..., list[str]]
) -> None:
    mail = broker.create_queue("mail")
    ids = produce("progress", "follow up", "follow up", queue="mail")
    nowhere = produce("follow up", queue="nowhere")
    with running_worker(Worker(queue, child_handlers.run_instruction, processes=1)):
        wait_until(lambda: queue.explain(ids[0]).why, lambda why: "(25% a quarter)" in why)
        (tmp_path / "go").touch()
        wait_completed(queue, 3)
        letters = mail.lease(2, wait=WAIT)
        wait_until(lambda: queue.stats().scheduled)
    offsets = {letter.item.value["token"].split(".")[-1] for letter in [*letters, *mail.lease(2)]}
    assert offsets == {"1", "2"}
    assert queue.explain(nowhere[0]).reason.startswith("its follow-ups could not be made: QueueNotFound")


def test_the_last_failure_in_a_child_is_reported_as_a_burial(queue: Queue, produce: Callable[..., list[str]]) -> None:
    queue.update(max_attempts=1)
    produce("fail")
    outcomes: list[str] = []
    one = Worker(queue, child_handlers.run_instruction, processes=1, hooks=Hooks(finished=lambda item, _, name: outcomes.append(name)))
    with running_worker(one):
        wait_until(lambda: one.stats().buried)
    assert (outcomes, one.stats().retried) == (["buried"], 0)


def test_batches_and_coroutines_run_in_children(broker: Broker, file: Path) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([{"do": "some fail", "file": str(file)}] * 20)
    with running_worker(Worker(queue, child_handlers.several, processes=1, batch=10, retry=RetryPolicy(base=0))):
        wait_completed(queue, 20)
    assert {attempts for _, attempts, _, _ in child_handlers.lines(file)} == {1, 2}
    assert Counter(offset for offset, *_ in child_handlers.lines(file)) == {offset: 1 + offset % 2 for offset in range(20)}
    queue.produce({"file": str(file)})
    with running_worker(Worker(queue, child_handlers.awaits, processes=1)):
        wait_completed(queue, 21)
    assert child_handlers.lines(file)[-1][3] == "async"


def test_a_child_that_dies_costs_its_item_one_attempt(queue: Queue, file: Path, produce: Callable[..., list[str]]) -> None:
    ids = produce("crash", "exit", "done")
    log = HandlerEvents()
    hooks = Hooks(failed=lambda item, error: log.add((item.offset, str(error))))
    with running_worker(Worker(queue, child_handlers.run_instruction, processes=1, retry=RetryPolicy(base=0.001), hooks=hooks)):
        assert log.take(2) == [(0, "the worker process died (signal 9)"), (1, "the worker process died (exit code 3)")]
        wait_completed(queue, 2)
    assert [queue.explain(name).state for name in (ids[0], ids[2])] == ["completed", "completed"]
    assert ("crash" in {row[3] for row in child_handlers.lines(file) if row[:2] == [0, 1]}) and [0, 2] in [
        row[:2] for row in child_handlers.lines(file)
    ]


def test_a_child_that_dies_among_quick_items_costs_the_others_nothing(queue: Queue, file: Path) -> None:
    queue.produce_many([{"file": str(file), "crash": n in (700, 1_100)} for n in range(1_500)])
    with running_worker(Worker(queue, child_handlers.quick, processes=1, retry=RetryPolicy(base=0))):
        wait_completed(queue, 1_500)
    assert Counter(row[0] for row in child_handlers.lines(file)) == {n: 2 if n in (700, 1_100) else 1 for n in range(1_500)}


def test_a_child_that_is_killed_is_replaced(queue: Queue, file: Path, tmp_path: Path, produce: Callable[..., list[str]]) -> None:
    produce("wait once")
    with running_worker(Worker(queue, child_handlers.run_instruction, processes=1, retry=RetryPolicy(base=0))):
        ((_, _, pid, _),) = started(file, 1)
        os.kill(pid, signal.SIGKILL)
        wait_completed(queue, 1)
    again = child_handlers.lines(file)[-1]
    assert again[1] == 2 and again[2] != pid


@pytest.mark.parametrize("stopped", [False, True], ids=["busy", "stopped by the system"])
def test_a_child_that_exceeds_the_timeout_is_killed(
    queue: Queue, file: Path, tmp_path: Path, produce: Callable[..., list[str]], stopped: bool
) -> None:
    produce("wait once")
    log = HandlerEvents()
    one = Worker(
        queue,
        child_handlers.run_instruction,
        processes=1,
        handler_timeout=0.3,
        retry=RetryPolicy(base=0),
        hooks=Hooks(failed=lambda _, error: log.add(str(error))),
    )
    with running_worker(one):
        ((_, _, pid, _),) = started(file, 1)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        assert log.next() == "the handler ran longer than 0.3 s"
        assert not is_alive(pid)
        wait_completed(queue, 1)
        produce("more time")
        started(file, 3)
        (tmp_path / "go").touch()
        wait_completed(queue, 2)
    assert [row[3] for row in child_handlers.lines(file)] == ["wait once", "wait once", "more time"]
    assert one.stats().late == 0


def test_draining_waits_for_children(queue: Queue, file: Path, tmp_path: Path, produce: Callable[..., list[str]]) -> None:
    produce("wait", "wait", "wait")
    one = Worker(queue, child_handlers.run_instruction, processes=2)
    running = WorkerThread(one)
    started(file, 2)
    one.stop()
    wait_until(lambda: queue.stats().waiting_consumers == 0)
    (tmp_path / "go").touch()
    assert running.ended() == []
    assert (queue.stats().completed, queue.stats().ready, queue.stats().leased) == (2, 1, 0)


def test_stopping_at_once_kills_children_and_returns_their_items(queue: Queue, file: Path, produce: Callable[..., list[str]]) -> None:
    produce("wait", "wait", "wait")
    one = Worker(queue, child_handlers.run_instruction, processes=2)
    running = WorkerThread(one)
    rows = started(file, 2)
    one.stop(at_once=True)
    assert running.ended() == []
    assert [lease.attempts for lease in queue.lease(10)] == [1, 1, 1]
    assert not any(is_alive(pid) for _, _, pid, *_ in rows)


def test_a_worker_whose_children_cannot_begin_says_so(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.produce({})
    monkeypatch.setenv("PENSTOCK_TEST_BROKEN_MODULE", "1")
    (error,) = WorkerThread(Worker(queue, child_handlers.quick, processes=1)).ended()
    assert isinstance(error, InvalidRequest) and "processes exit before they are ready (exit code 1)" in str(error)
    assert (queue.stats().ready, queue.stats().leased) == (1, 0)


def test_a_handler_that_cannot_be_found_in_a_module_is_refused_before_it_runs(queue: Queue) -> None:
    one = Worker(queue, processes=1)
    one.on("a")(lambda item: None)
    with pytest.raises(InvalidRequest, match=r"cannot be sent to another process .*; define it at the top level of a module"):
        one.run(signals=False)
