"""Transfers between the queues of one broker.

Owns: `TransferRouter`. It passes a queue's transfers on to the destination queue, and makes the deletion of a queue
wait until no transfer to or from that queue is under way.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from penstock.loop.loop import Loop
from penstock.loop.requests import FunctionRequest, Request
from penstock.loop.turn import QueueEngine
from penstock.rules.catalog import CatalogState, QueueEntry, dead_queue_users
from penstock.rules.slots import SlotMap
from penstock.words.clock import Clock
from penstock.words.errors import PenstockError, QueueBusy, QueueNotFound

RETRY_SECONDS = 0.01
"""How often a deletion asks again whether transfers are under way."""


class TransferRouter:
    """Finds the queue of an incarnation for the queues that send items to it."""

    def __init__(self, loops: Mapping[int, Loop], entry: Callable[[int], QueueEntry], catalog: Callable[[], CatalogState]) -> None:
        self._loops = loops
        self._entry = entry
        self._catalog = catalog
        self._being_deleted: set[int] = set()
        self._lock = threading.Lock()

    def send_request(self, incarnation: int, request: Request) -> None:
        """Add a request to the pending requests of a queue; QueueNotFound when the queue is deleted."""
        loop = self._loops.get(incarnation)
        if loop is None:
            raise QueueNotFound(f"there is no queue {incarnation:016x}; it was deleted")
        loop.post(request)

    def is_dead_queue(self, name: str) -> bool:
        """Whether the queue of this name is the dead queue of another."""
        return bool(dead_queue_users(self._catalog(), name))

    def slot_map_of(self, incarnation: int) -> tuple[SlotMap, Sequence[int]]:
        """The slot map of a queue and its active partitions; QueueNotFound when it is deleted or being deleted."""
        if incarnation in self._being_deleted:
            raise QueueNotFound("the queue is being deleted; nothing is sent to it")
        entry = self._entry(incarnation)
        return entry.map, entry.active

    @contextmanager
    def without_transfers(self, incarnation: int, name: str, clock: Clock, timeout: int) -> Iterator[None]:
        """Inside this context no transfer to or from the queue is under way, and none begins.

        QueueBusy when transfers are still under way after the timeout, or when another caller deletes the queue.
        QueueNotFound when another caller has deleted it.
        """
        with self._lock:
            if incarnation in self._being_deleted:
                raise QueueBusy(f"queue {name!r} is being deleted by another caller; wait for that")
            own = self._loops.get(incarnation)
            if own is None:
                raise QueueNotFound(f"queue {name!r} was deleted by another caller")
            self._being_deleted.add(incarnation)
        try:
            deadline = clock.read().elapsed + timeout
            for number, loop in list(self._loops.items()):
                while self._has_transfers(number, loop, incarnation):
                    if clock.read().elapsed >= deadline:
                        raise QueueBusy(f"items are on their way to or from queue {name!r}, or a partition is failing; delete it later")
                    threading.Event().wait(RETRY_SECONDS)
            yield
        finally:
            self._being_deleted.discard(incarnation)
            own.engine.transfer_step.ending = False

    def _has_transfers(self, number: int, loop: Loop, incarnation: int) -> bool:
        """Whether the queue `number` has transfers to `incarnation`, or, being that queue, has any."""
        try:
            found: bool = loop.call(FunctionRequest(partial(_is_held_up, incarnation), needs_all_open=False))
            return found
        except PenstockError:
            if number != incarnation and self._loops.get(number) is not loop:  # deleted meanwhile: it has none any more
                return False
            raise


def _is_held_up(incarnation: int, engine: QueueEngine) -> bool:
    """Inside a turn: whether transfers of `engine` prevent the deletion of the queue with this incarnation.

    When `engine` is that queue and has no transfers, it also stops sending new ones.
    """
    transfers = engine.transfer_step
    return (
        not transfers.stop_sending()
        if engine.incarnation == incarnation
        else transfers.outbox_unreadable or bool(transfers.addressed_to(incarnation))
    )
