"""What an operator does with a queue.

Owns: `AsyncOperations`, the half of `AsyncQueue` that looks at a queue and changes how it works.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias, Unpack

from penstock.api import arguments as calls
from penstock.api.arguments import ListedItem, Seconds
from penstock.api.options import QueueInfo, QueueOptions, info_of, to_catalog
from penstock.api.ports import AsyncPort
from penstock.loop.retention import Freed
from penstock.reports import Explained, HeldKey, ItemEvent, QueueStats
from penstock.words.errors import QueueNotFound
from penstock.words.ids import LAST_PARTITION, parse_id
from penstock.words.limits import MAX_PARTITIONS, within

Clearable: TypeAlias = Literal["ready", "scheduled", "leased", "buried", "all"]


class AsyncOperations:
    """Looking at a queue and changing how it works."""

    def __init__(self, port: AsyncPort, name: str, incarnation: int) -> None:
        self._port = port
        self._name = name
        self._incarnation = incarnation

    @property
    def name(self) -> str:
        return self._name

    async def _ask(self, verb: str, **args: Any) -> Any:
        return await self._port.ask(self._incarnation, verb, **args)

    # -- looking -------------------------------------------------------------------------------------

    async def info(self) -> QueueInfo:
        """The queue's partitions and options."""
        found = await self._port.run(self._port.broker.find, self._name)
        if found.incarnation != self._incarnation:
            raise QueueNotFound(f"queue {self._name!r} was deleted and created anew; ask the broker for it by name")
        return info_of(found)

    async def stats(self) -> QueueStats:
        """How many items are in which state, in all and by partition; who consumes; what needs attention."""
        found: QueueStats = await self._ask("stats")
        return found

    async def explain(self, id: str) -> Explained:
        """Why is this item not running? Answers in one sentence (`.why`), and with the facts behind it. Finds items that were moved."""
        partition, offset = parse_id(id)
        found: Explained = await self._ask("explain", partition=partition, offset=offset)
        return found

    async def history(self, id: str) -> list[ItemEvent]:
        """Everything that happened to an item, in every queue it was in, as far back as retention keeps it. Takes any id it ever had.

        The log of its partition is read for this, beside the queue's work: the longer the log since the item came, the longer it takes.
        """
        partition, offset = parse_id(id)
        found: list[ItemEvent] = await self._ask("history", partition=partition, offset=offset)
        return found

    async def items(self, state: str | Sequence[str] | None = None, after: str | None = None, limit: int = 100) -> list[ListedItem]:
        """Items in these states (None: any), by partition, oldest first. The next page comes with `after` the last id of this one."""
        states, place, limit = calls.states_of(state), calls.after_id(after), calls.page(limit)
        return [ListedItem(found) for found in await self._ask("listed", states=states, after=place, limit=limit)]

    async def held_keys(self, limit: int = 100) -> list[HeldKey]:
        """Keys that are not free: what holds them, and how many items wait behind."""
        found: list[HeldKey] = await self._ask("keys", limit=calls.page(limit))
        return found

    async def cursors(self) -> dict[str, dict[int, int]]:
        """The cursors of the queue, and the offset at which each stands, by partition."""
        found: dict[str, dict[int, int]] = await self._ask("cursors")
        return found

    # -- items ---------------------------------------------------------------------------------------

    async def clear(self, state: Clearable = "ready", *, partition: int | None = None) -> int:
        """Resolve all items in a state, as if they had been completed; gives how many they were."""
        found: int = await self._ask("clear", **calls.cleared(state), partition=calls.partition_number(partition))
        return found

    async def seek(self, id: str | None = None, *, at: datetime | float | None = None) -> int:
        """Completed items become ready again; gives how many.

        id: those of its partition, from this item on.
        at: those of all partitions that were produced at that time or later, as far as retention has kept them.
        """
        found: int = await self._ask("seek", **calls.sought(id, at))
        return found

    async def release(self, key: str | bytes) -> int:
        """A parked key goes on without the items it was parked for; gives how many are free to go on."""
        found: int = await self._ask("release", key_id=calls.key_number(key))
        return found

    # -- how it works --------------------------------------------------------------------------------

    async def pause(self, lease: bool = True, produce: bool = True, *, partition: int | None = None) -> None:
        """Nothing is leased, nothing is produced, or both, until `resume`. What is leased can be settled all the same."""
        await self._ask("pause", **calls.sides(lease, produce, True), partition=calls.partition_number(partition))

    async def resume(self, lease: bool = True, produce: bool = True, *, partition: int | None = None) -> None:
        """What was paused goes on."""
        await self._ask("pause", **calls.sides(lease, produce, False), partition=calls.partition_number(partition))

    async def update(self, **options: Unpack[QueueOptions]) -> QueueInfo:
        """Change options; those not given stay as they are. New times count for new leases and items, everything else at once."""
        return info_of(await self._port.run(self._port.broker.update, self._incarnation, to_catalog(options)))

    async def resize(self, partitions: int) -> QueueInfo:
        """Give the queue another number of partitions, while it works. The order within a key is kept."""
        within("partitions", partitions, 1, MAX_PARTITIONS)
        return info_of(await self._port.run(self._port.broker.resize, self._incarnation, partitions))

    async def set_read_only(self, partition: int, read_only: bool = True) -> QueueInfo:
        """Drain a partition: it gives items but takes none; the others take its keys. False lets it take items again."""
        within("partition", partition, 0, LAST_PARTITION)
        calls.flag("read_only", read_only)
        return info_of(await self._port.run(self._port.broker.set_read_only, self._incarnation, partition, read_only))

    async def compact(self, *, partition: int | None = None) -> list[Freed]:
        """Let go now of what retention allows; tells what was freed, by partition."""
        found: list[Freed] = await self._ask("compact", partition=calls.partition_number(partition))
        return found

    async def delete(self, timeout: Seconds = 30) -> None:
        """Remove the queue with all its items, once nothing is on its way to or from it."""
        patience = calls.patience(timeout)
        await self._port.run(self._port.broker.delete, self._name, patience, self._incarnation)
