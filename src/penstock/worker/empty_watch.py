"""When a worker ends that runs until its queues are empty.

Owns: `EmptyWatch`, a thread that looks at the queues whenever the worker has nothing in hand.
Queues are empty when no unresolved item is left in them and no batch is on its way from them to another queue. They are
read one after the other, and an item may pass from one that is not read yet to one that was: so the worker ends when
they were found empty twice in a row.
"""

import threading
from collections.abc import Callable, Sequence

from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import PenstockError
from penstock.worker.buffer import SourceQueue
from penstock.worker.stats import WorkerCounters

FIRST_PAUSE, LAST_PAUSE = 20 * MILLISECOND, 500 * MILLISECOND
"""How long to wait before looking again; doubled each time while items are left that cannot be leased."""


class EmptyWatch:
    """Calls `on_empty` when the queues are empty.

    idle_timeout: also when no item was leased for so long; None: only when they are empty.
    is_idle: whether the worker has nothing in hand, and got nothing when it last asked.
    """

    def __init__(
        self,
        sources: Sequence[SourceQueue],
        counters: WorkerCounters,
        idle_timeout: int | None,
        is_idle: Callable[[], bool],
        on_empty: Callable[[], None],
    ) -> None:
        self._sources = sources
        self._counters = counters
        self._idle_timeout = idle_timeout
        self._is_idle = is_idle
        self._on_empty = on_empty
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock until empty", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look no more. Does not wait for the thread, which may wait for a queue's answer."""
        self._ended.set()

    def _run(self) -> None:
        now = self._sources[0].now
        pause, leased, idle_since, were_empty = FIRST_PAUSE, -1, 0, False
        while not self._ended.wait(pause / SECOND):
            before, leased = leased, self._counters.leased
            if not self._is_idle() or before != leased:
                pause, idle_since, were_empty = FIRST_PAUSE, now(), False
                continue
            empty = self._are_empty()
            idle_left = None if self._idle_timeout is None else self._idle_timeout - (now() - idle_since)
            if (empty and were_empty) or (idle_left is not None and idle_left <= 0):
                self._on_empty()
                return
            were_empty = empty
            pause = FIRST_PAUSE if empty else min(2 * pause, LAST_PAUSE, *() if idle_left is None else (idle_left,))

    def _are_empty(self) -> bool:
        try:
            return all(_is_empty(source) for source in self._sources)
        except PenstockError:  # the worker meets the same error, and ends or tries again
            return False


def _is_empty(source: SourceQueue) -> bool:
    found = source.stats()
    return not (found.depth or found.transfers or any(partition.error for partition in found.partitions))
