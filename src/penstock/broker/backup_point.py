"""The instant of a backup.

Owns: `cut_logs`. A record in one log depends only on records in others that are synced (ADR 17). So the ends of all
synced logs at one instant fit together: whatever a record before these ends depends on is before them, too. To read
them at one instant, no turn of any queue runs meanwhile, and the catalog does not change. That takes milliseconds.
Syncs that are under way go on: what they make durable was appended before.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from penstock.logs.store import CATALOG, Store
from penstock.loop.catalog import Catalog
from penstock.loop.loop import Loop
from penstock.reports import BackupPoint
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest

TURN_SECONDS = 5.0


def cut_logs(store: Store, catalog: Catalog, catalog_lock: threading.Lock, loops: Sequence[Loop], clock: Clock) -> BackupPoint:
    """The ends of all logs now. QueueBusy while a partition is being opened, or if a turn takes long."""
    roots = store.directories()
    if not roots:
        raise InvalidRequest("a broker in memory has no files; only one in a directory can be backed up")
    with ExitStack() as held:
        for loop in sorted(loops, key=lambda loop: loop.engine.incarnation):
            held.enter_context(loop.without_turns(TURN_SECONDS))
        held.enter_context(catalog_lock)
        logs = store.positions({CATALOG, *catalog.state.entries})
        writes = [entry.label for entry in store.inbox.waiting()]
        return BackupPoint(clock.read().wall, roots, logs, writes)
