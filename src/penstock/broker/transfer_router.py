"""The delivery of transfers between the queues of a broker.

Owns: `TransferRouter`: how a queue's transfers reach another, and how a queue that is to be deleted waits until none is on its way to or from it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from penstock.loop.loop import Loop
from penstock.loop.requests import FunctionRequest, Request
from penstock.loop.turn import QueueEngine
from penstock.rules.catalog import QueueEntry
from penstock.rules.slots import SlotMap
from penstock.words.clock import Clock
from penstock.words.errors import QueueBusy, QueueNotFound

LOOK_AGAIN_SECONDS = 0.01


class TransferRouter:
    """Queues by incarnation, as senders see them."""

    def __init__(self, loops: Mapping[int, Loop], entry: Callable[[int], QueueEntry]) -> None:
        self._loops = loops
        self._entry = entry
        self._ending: set[int] = set()
        self._marking = threading.Lock()

    def send_request(self, incarnation: int, request: Request) -> None:
        """Put a request into the inbox of a queue."""
        loop = self._loops.get(incarnation)
        if loop is None:
            raise QueueNotFound(f"there is no queue {incarnation:016x} (any more)")
        loop.post(request)

    def slot_map_of(self, incarnation: int) -> tuple[SlotMap, Sequence[int]]:
        """Where the items of a queue go."""
        if incarnation in self._ending:
            raise QueueNotFound("the queue is being deleted; nothing is sent to it")
        entry = self._entry(incarnation)
        return entry.map, entry.active

    @contextmanager
    def without_transfers(self, incarnation: int, name: str, clock: Clock, timeout: int) -> Iterator[None]:
        """Inside, nothing is on its way to or from a queue, and nothing sets out."""
        with self._marking:
            if incarnation in self._ending:
                raise QueueBusy(f"queue {name!r} is being deleted by someone else; wait for that")
            self._ending.add(incarnation)
        own = self._loops[incarnation]
        try:
            deadline = clock.read().elapsed + timeout
            for loop in list(self._loops.values()):
                while loop.call(FunctionRequest(partial(_is_held_up, incarnation), needs_all_open=False)):
                    if clock.read().elapsed >= deadline:
                        raise QueueBusy(f"items are on their way to or from queue {name!r}, or a partition is failing; delete it later")
                    threading.Event().wait(LOOK_AGAIN_SECONDS)
            yield
        finally:
            self._ending.discard(incarnation)
            own.engine.transfer_step.ending = False


def _is_held_up(incarnation: int, turns: QueueEngine) -> bool:
    """Whether transfers keep a queue from being deleted; of its own, none sets out once there are none."""
    carrying = turns.transfer_step
    return (
        not carrying.stop_sending()
        if turns.incarnation == incarnation
        else carrying.outbox_unreadable or bool(carrying.addressed_to(incarnation))
    )
