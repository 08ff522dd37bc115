"""The threads that wait for disks, so that the turns of queues do not.

Owns: `DiskThreads`.
Every storage root has its own threads, so that a disk that hangs does not delay logs on other disks. Syncs, for which
callers wait, have other threads than jobs (closing, retention) and than openings, of which hundreds may be waiting.
Threads start when first needed.
Openings replay one at a time, because a replay needs the interpreter: side by side all would be late, one after the
other the first is ready soon. One that a caller waits for comes first.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import Lock

from penstock.logs.log import Log, OnSyncDone, OnSyncStart
from penstock.words.errors import StorageFailed
from penstock.words.threads import InterruptSafePool

SYNCS, JOBS, OPENINGS = 8, 4, 3
"""How many syncs, jobs and openings run at the same time in one root."""
REPLAY_SECONDS = 2.0
"""How long an opening waits for the replay of another one, which may hang."""


class DiskThreads:
    """The thread pools of one store, two for each storage root: for syncs and for jobs."""

    def __init__(self, root_of: Callable[[int, int], Hashable]) -> None:
        """root_of: gives the storage root of an incarnation and partition."""
        self._root_of = root_of
        self._pools: dict[tuple[Hashable, int], InterruptSafePool] = {}
        self._openings: dict[Hashable, _Openings] = {}

    def commit(self, logs: Sequence[Log], on_start: OnSyncStart, on_done: OnSyncDone, here: Log | None = None) -> None:
        """Sync logs in parallel. The calling thread syncs `here`, and waits for no other log.

        `on_start` is called when the sync of a log is about to begin; False skips that log. `on_done` is called with
        the outcome. Both may be called before this returns.
        """
        for log in logs:
            if log is not here:
                self._pool(log.incarnation, log.partition, SYNCS).submit(partial(_sync, log, on_start, on_done))
        if here is not None:
            _sync(here, on_start, on_done)

    def run_job(self, incarnation: int, partition: int, job: Callable[[], None]) -> None:
        """Run a job that may take long on one log, in a thread of its storage root. A job must not raise."""
        self._pool(incarnation, partition, JOBS).submit(job)

    def run_opening(
        self, incarnation: int, partition: int, job: Callable[[Callable[[], None]], None], is_urgent: Callable[[], bool]
    ) -> None:
        """Run the opening of a log: an urgent one before others, and its replay alone in its root.

        The job is given a function to call when it has replayed the log. A job must not raise.
        """
        root = self._root_of(incarnation, partition)
        openings = self._openings.get(root) or self._openings.setdefault(root, _Openings())
        openings.waiting.append((job, is_urgent))
        self._pool(incarnation, partition, OPENINGS).submit(openings.run_next)

    def _pool(self, incarnation: int, partition: int, threads: int) -> InterruptSafePool:
        name = self._root_of(incarnation, partition), threads
        return self._pools.get(name) or self._pools.setdefault(name, InterruptSafePool(threads))

    def close(self) -> None:
        """Wait until all syncs and jobs are done, and end the threads. A later call starts new threads."""
        while self._pools:
            self._pools.popitem()[1].close()


class _Openings:
    """The openings of one storage root that wait for their turn."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[Callable[[], None]], None], Callable[[], bool]]] = []
        self._replaying = Lock()

    def run_next(self) -> None:
        """Run the most urgent opening. Called once for each."""
        held = [self._replaying.acquire(timeout=REPLAY_SECONDS)]

        def replayed() -> None:
            if held and held.pop():
                self._replaying.release()

        try:
            self._take()(replayed)
        finally:
            replayed()

    def _take(self) -> Callable[[Callable[[], None]], None]:
        while True:
            waiting = [*self.waiting]
            chosen = next((one for one in waiting if one[1]()), waiting[0])
            try:
                self.waiting.remove(chosen)
            except ValueError:  # another thread has taken it
                continue
            return chosen[0]


def _sync(log: Log, on_start: OnSyncStart, on_done: OnSyncDone) -> None:
    if on_start(log):
        sync(log, on_done)


def sync(log: Log, on_done: OnSyncDone) -> None:
    """Sync one log, and call `on_done` with the outcome."""
    failure = None
    try:
        log.sync()
    except StorageFailed as error:
        failure = error
    on_done(log, failure)
