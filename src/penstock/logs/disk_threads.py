"""Threads that wait for disks, so that a turn need not.

Owns: `Syncs`. Every storage root has a few threads of its own: a disk that hangs holds up its own, never those of another. Syncs, for
which callers wait, have other threads than jobs (opening, closing, retention), of which there may be hundreds at once.
Threads are begun when they are first needed.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial

from penstock.logs.log import Log, OnSyncDone, OnSyncStart
from penstock.words.errors import StorageFailed
from penstock.words.threads import InterruptSafePool

SYNCS, JOBS = 8, 4
"""Syncs, and jobs, that run at the same time in one root."""


class DiskThreads:
    """What runs beside the turns of a broker's queues."""

    def __init__(self, root_of: Callable[[int, int], Hashable]) -> None:
        """`root_of` tells where the log of an incarnation and partition lies."""
        self._root_of = root_of
        self._pools: dict[tuple[Hashable, int], InterruptSafePool] = {}

    def commit(self, logs: Sequence[Log], began: OnSyncStart, landed: OnSyncDone, here: Log | None = None) -> None:
        """Sync these logs side by side. `landed` is called once for each; the one that is `here` is synced by this very thread."""
        for log in logs:
            if log is not here:
                self._pool(log.incarnation, log.partition, SYNCS).submit(partial(_begin, log, began, landed))
        if here is not None:
            _begin(here, began, landed)

    def run_job(self, incarnation: int, partition: int, job: Callable[[], None]) -> None:
        """Do something that may take long with one log, in a thread of its root."""
        self._pool(incarnation, partition, JOBS).submit(job)

    def _pool(self, incarnation: int, partition: int, threads: int) -> InterruptSafePool:
        name = self._root_of(incarnation, partition), threads
        return self._pools.get(name) or self._pools.setdefault(name, InterruptSafePool(threads))

    def close(self) -> None:
        """End the threads, once what they do is done; whoever comes later begins others."""
        while self._pools:
            self._pools.popitem()[1].close()


def _begin(log: Log, began: OnSyncStart, landed: OnSyncDone) -> None:
    if began(log):
        sync(log, landed)


def sync(log: Log, landed: OnSyncDone) -> None:
    """Sync one log, and say what became of it."""
    failure = None
    try:
        log.sync()
    except StorageFailed as error:
        failure = error
    landed(log, failure)
