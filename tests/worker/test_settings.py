"""Wrong settings of a worker and their messages."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock import Hooks, Queue
from penstock.errors import InvalidRequest
from penstock.worker.outcomes import RetryPolicy
from penstock.worker.worker import Worker
from tests.worker.harness import HandlerEvents, running_worker

AT_ONCE = RetryPolicy(base=0)
Handle = Callable[..., Any]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"concurrency": 0}, "concurrency is 0; give a whole number from 1"),
        ({"concurrency": 2.0}, "concurrency is float"),
        ({"per_partition": 0}, "per_partition is 0"),
        ({"processes": -1}, "processes is -1"),
        ({"processes": 2, "concurrency": 3}, "concurrency is 3 and processes is 2; leave concurrency out"),
        ({"batch": 10_001}, "batch is 10001"),
        ({"retry": 3}, "retry is int; give RetryPolicy(…)"),
        ({"hooks": {}}, "hooks is dict; give Hooks(…)"),
        ({"handler_timeout": 0}, "handler_timeout is 0; give 0.001"),
        ({"lease_timeout": 0.5}, "lease_timeout is 0.5; give 1 to"),
        ({"rate": 0}, "the rate is 0; give items per second"),
        ({"rate": {"mail": 3}}, "there is a rate for 'mail', which is not a queue of this worker"),
        ({"name": 7}, "a worker's name is int; give a text"),
        ({"handler": 3}, "the handler is int; give a function of an item"),
        ({"handler": lambda: None}, "the handler takes no item"),
        ({"handler": lambda item, context, more: None}, "the handler needs 3 arguments; give a function of an item"),
        ({"handler": lambda item: None, "processes": 1}, "a handler cannot be sent to another process"),
        ({"queues": []}, "the worker has no queue"),
        ({"queues": "orders"}, "the worker's queue is str; give a Queue"),
    ],
)
def test_wrong_settings_are_refused(queue: Queue, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Worker(**{"queues": queue, **options})
    assert sentence in str(caught.value)


def test_wrong_weights_kinds_and_runs_are_refused(queue: Queue, log: HandlerEvents) -> None:
    with pytest.raises(InvalidRequest, match="a weight is 0; give a whole number from 1"):
        Worker({queue: 0})
    one = Worker(queue)
    with pytest.raises(InvalidRequest, match="the worker has no handler; give it one"):
        one.run()
    with pytest.raises(InvalidRequest, match="there is no kind to handle"):
        one.on()(print)
    with pytest.raises(InvalidRequest, match="a kind is int; give a text"):
        one.on(3)(print)  # type: ignore[arg-type]
    one.on("a")(lambda item: log.add(item.payload))
    with pytest.raises(InvalidRequest, match="kind 'a' has a handler already"):
        one.on("b", "a")(print)
    with pytest.raises(InvalidRequest, match="no handler for every kind"):
        one(None)
    with running_worker(one):
        queue.produce(b"x", kind="a")
        assert log.next() == b"x"
        with pytest.raises(InvalidRequest, match="the worker is running already"):
            one.run()
    one.stop()
    with running_worker(one):  # a worker can run again
        queue.produce(b"y", kind="a")
        assert log.next() == b"y"


def test_a_hook_is_a_function() -> None:
    with pytest.raises(InvalidRequest, match="the hook started is int; give a function"):
        Hooks(started=5)  # type: ignore[arg-type]
