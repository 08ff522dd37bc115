"""A forked child cannot use its parent's broker, and is told so; the parent goes on.

Each case is a process of its own that forks: nothing of the test run is copied into a child.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedBroker
from penstock.loop.requests import LeaseRequest, ProduceRequest
from penstock.operations import CreateQueue, DeleteQueue, FindQueue, ListQueues, ProduceItems, ReadMetrics, ReadStats, ResizeQueue
from penstock.words.errors import BrokerClosed, PenstockError
from tests.broker.broker_under_test import batch_of


def forked(work: Callable[[], object]) -> object:
    """What a forked child makes of something."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = work()
        except BaseException as error:
            answer = repr(error)
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


def told(verb: Callable[[], object]) -> str:
    try:
        verb()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def verbs(broker: EmbeddedBroker, incarnation: int) -> list[Callable[[], object]]:
    return [
        lambda: broker.run_request(incarnation, ProduceRequest(batch_of("from the child"))),
        lambda: broker.submit(ProduceItems(queue=incarnation, batch=batch_of("from the child"))),
        lambda: broker.run_request(incarnation, LeaseRequest(1, deadline=broker.clock.read().elapsed + 10_000_000)),
        lambda: broker.call(FindQueue(name="q")),
        lambda: broker.call(ListQueues()),
        lambda: broker.call(CreateQueue(name="new", exist_ok=True)),
        lambda: broker.call(ReadStats(queue=incarnation)),
        lambda: broker.call(ResizeQueue(queue=incarnation, partitions=3)),
        lambda: broker.call(DeleteQueue(queue=incarnation)),
        lambda: broker.call(ReadMetrics()),
    ]


def use(target: str) -> None:
    """The process under test: forks with an idle broker, then with one at work in several threads."""
    broker = EmbeddedBroker.open(target)
    incarnation = broker.call(CreateQueue(name="q", partitions=2)).incarnation
    broker.run_request(incarnation, ProduceRequest(batch_of("before")))
    answers = [forked(lambda: [told(verb) for verb in verbs(broker, incarnation)])]
    answers.append(forked(lambda: [told(broker.close), told(broker.close)]))
    answers.append(forked(lambda: told(lambda: EmbeddedBroker.open(target) if target == "memory://" else None)))
    if target != "memory://":
        answers.append(forked(lambda: told(lambda: EmbeddedBroker.open(target))))
    produced = 1
    done = threading.Event()

    def produce() -> None:
        nonlocal produced
        while not done.is_set():
            broker.run_request(incarnation, ProduceRequest(batch_of("while forking")))
            produced += 1

    def wait() -> None:
        with suppress(BrokerClosed):
            broker.run_request(incarnation, LeaseRequest(1, deadline=broker.clock.read().elapsed + 60_000_000, per_key=1))

    thread = threading.Thread(target=produce)
    thread.start()
    busy = [forked(lambda: told(verbs(broker, incarnation)[0])) for _ in range(10)]
    done.set()
    thread.join()
    waiter = threading.Thread(target=wait)
    waiter.start()
    stats = broker.call(ReadStats(queue=incarnation))
    broker.close()
    waiter.join()
    print(json.dumps({"answers": answers, "busy": busy, "stored": stats.produced, "produced": produced}))


@pytest.mark.parametrize("storage", ["memory", "files"])
def test_a_forked_child_is_refused_and_the_parent_keeps_working(tmp_path: Path, storage: str) -> None:
    target = "memory://" if storage == "memory" else str(tmp_path / "data")
    script = f"from tests.broker.test_fork import use; use({target!r})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    sentence = "BrokerClosed: this broker was opened by the parent process; open one in the child"
    first, closing, opening, *locked = report["answers"]
    assert first == [sentence] * 10
    assert closing == ["nothing", "nothing"], "closing it there does no harm"
    assert opening == "nothing"
    assert all(answer.startswith("BrokerLocked: ") for answer in locked)
    assert report["busy"] == [sentence] * 10
    assert report["stored"] == report["produced"], "the parent's work is untouched"
    if storage == "files":
        broker = EmbeddedBroker.open(target)
        assert broker.call(ReadStats(queue=broker.call(FindQueue(name="q")).incarnation)).produced == report["produced"]
        broker.close()
