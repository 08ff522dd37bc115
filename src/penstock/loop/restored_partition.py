"""Partitions of a queue that was restored from a backup.

Owns: `keep_apart`, which every opening of a partition calls. It changes a partition once for each restore: the first
time it is opened after it, be that in the restore itself, after a repair, or because a resize has added it since.
"""

from penstock.loop.partition import Partition
from penstock.rules.catalog import QueueEntry
from penstock.rules.commands import Restore


def keep_apart(partition: Partition, entry: QueueEntry) -> Partition:
    """Make a partition of a restored queue differ from every other copy of it, unless it does (rules/restore.py)."""
    if entry.restores and partition.state.first_lease != entry.restores[-1].first_lease:
        partition.run(Restore(entry.restores[-1].at, entry.restores[-1].first_lease))
        partition.commit()
    return partition
