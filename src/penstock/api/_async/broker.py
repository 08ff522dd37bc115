"""A broker, and the way to one.

Owns: `aopen` and `AsyncBroker`.
"""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Unpack

from penstock import reports
from penstock.api import arguments
from penstock.api._async.queue import AsyncQueue
from penstock.api.arguments import ListedItem, NamedQueue, Seconds
from penstock.api.homes import AsyncHome, open_async_home
from penstock.api.options import QueueInfo, QueueOptions, queue_info, to_catalog
from penstock.api.redrive import PAGE, REDRIVABLE, Redriven, Where, by_partition, item_filter
from penstock.broker.targets import TargetPath
from penstock.logs.backends import Files, Root
from penstock.logs.log import SEGMENT_BYTES, Durability
from penstock.operations import CreateQueue, DeleteQueue, FindOffsets, FindQueue, ListItems, ListQueues, ReadMetrics, RedriveItems
from penstock.words.clock import Clock
from penstock.words.ids import FIRST_FOREIGN_NUMBER
from penstock.words.limits import MAX_PARTITIONS, MIB, check_range

MIN_FREE_BYTES = 32 * MIB
"""Kept free, so that a full disk can be worked off: completing needs a little space too."""


async def aopen(
    target: TargetPath,
    *,
    durability: Durability = "fsync",
    roots: Sequence[TargetPath | Root] | None = None,
    min_free_bytes: int = MIN_FREE_BYTES,
    segment_bytes: int = SEGMENT_BYTES,
    compression: bool = True,
    clock: Clock | None = None,
    entropy: Callable[[int], bytes] = os.urandom,
    files: Files | None = None,
    threaded: bool = True,
) -> "AsyncBroker":
    """Open a broker: the queues in a directory, which is made when it is new, or "memory://".

        async with await penstock.aopen("data/") as broker:
            queue = await broker.create_queue("orders", exist_ok=True)

    durability: when something counts as stored. "fsync": it is on disk, and survives a power cut; "interval": it will be within a
    moment; "os": it survives the end of this process, not that of the machine.
    roots: more directories, on other disks, over which partitions are spread.
    min_free_bytes: with less space than this left (32 MiB unless given), `produce` is refused while everything else goes on.
    segment_bytes: the size of a log file before the next one is begun.
    compression: whether items are compressed when that saves space.
    clock, entropy, files, threaded: stand-ins for the world in tests, from penstock.testing; threaded=False runs nothing by itself.
    """
    home = await open_async_home(
        target,
        roots=roots,
        durability=durability,
        min_free_bytes=check_range("min_free_bytes", min_free_bytes, 0, 1 << 60),
        segment_bytes=segment_bytes,
        compression=arguments.check_flag("compression", compression),
        clock=clock,
        entropy=entropy,
        files=files,
        threaded=threaded,
    )
    return AsyncBroker(home, os.fspath(target))


class AsyncBroker:
    """Queues that live together. Close it when done, or use it in a `with` block.

    When it is closed, everyone who waits gets `BrokerClosed`, and so does whoever uses it or its queues after that.
    """

    def __init__(self, home: AsyncHome, target: str) -> None:
        self._home = home
        self._target = target
        self._closed = False

    # -- queues --------------------------------------------------------------------------------------

    async def create_queue(
        self,
        name: str,
        *,
        partitions: int | None = None,
        exist_ok: bool = False,
        **options: Unpack[QueueOptions],
    ) -> AsyncQueue:
        """Make a queue; options left out have their defaults (see `QueueOptions`).

        partitions: how many logs the queue is spread over; 1 unless given. It can be resized later.
        exist_ok: take the queue of that name if there is one. Options that are given must be the same there, else `QueueExists`.
        """
        chosen = to_catalog(options)
        given = dict(chosen)
        if partitions is not None:
            given["partitions"] = check_range("partitions", partitions, 1, MAX_PARTITIONS)
        ok = arguments.check_flag("exist_ok", exist_ok)
        width = 1 if partitions is None else partitions
        found = await self._home.call(CreateQueue(name=name, options=chosen, partitions=width, exist_ok=ok, given=given))
        return AsyncQueue(self._home, found.name, found.incarnation)

    async def queue(self, name: str) -> AsyncQueue:
        """The queue of that name; `QueueNotFound` if there is none."""
        found = await self._find(name)
        return AsyncQueue(self._home, found.name, found.incarnation)

    async def queues(self, prefix: str = "", after: str = "", limit: int = 100) -> list[QueueInfo]:
        """Queues by name. The next page comes with `after` the last name of this one."""
        prefix, after, limit = arguments.check_text("prefix", prefix), arguments.check_text("after", after), arguments.page_limit(limit)
        return [queue_info(found) for found in await self._home.call(ListQueues(prefix=prefix, after=after, limit=limit))]

    async def delete_queue(self, name: str, timeout: Seconds = 30) -> None:
        """Remove a queue with all its items, once nothing is on its way to or from it; that is waited for."""
        wait = arguments.wait_timeout(timeout)
        await self._home.call(DeleteQueue(queue=(await self._find(name)).incarnation, wait=wait))

    async def _find(self, name: str | NamedQueue) -> reports.QueueDescription:
        return await self._home.call(FindQueue(name=arguments.queue_name(name)))

    # -- redrive -------------------------------------------------------------------------------------

    async def redrive(
        self, source: str | NamedQueue, *, to: str | NamedQueue, where: Where | None = None, limit: int | None = None, preview: bool = False
    ) -> Redriven:
        """Send items on to another queue, each exactly once: the way back for dead letters. Ready and buried ones are taken.

        to: the queue they go to. If it is the source itself, what is buried there becomes ready again.
        where: which items: a dict of kind, key, reference, encoding, reason, origin_queue or "headers.<name>" to the value it must
            have, or a function of an `Item`.
        limit: no more than so many.
        preview: move nothing; only tell what would be moved.
        """
        meant = item_filter(where)
        left = check_range("limit", limit, 1, 1 << 60) if limit is not None else 1 << 60
        arguments.check_flag("preview", preview)
        origin, there = (await self._find(source)).incarnation, (await self._find(to)).incarnation
        ends = await self._home.call(FindOffsets(queue=origin, at="newest"))  # what comes while we are at it is left for the next time
        ids: list[str] = []
        moved = 0
        after: tuple[int, int] | None = None
        while left > 0:
            query = ListItems(queue=origin, states=REDRIVABLE, after=after, limit=PAGE)
            page = [ListedItem(one) for one in await self._home.call(query)]
            if not page:
                break
            after = _behind(page[-1], ends)
            old = [item for item in page if item.offset < ends.get(item.partition, 0) and (origin != there or item.state == "buried")]
            chosen = [item for item in old if meant(item)][:left]
            left -= len(chosen)
            ids += [item.id for item in chosen]
            if preview or not chosen:
                moved += len(chosen)
            else:
                moved += await self._home.call(RedriveItems(queue=origin, items=by_partition(chosen), to=there))
        return Redriven(moved, ids)

    # -- the broker itself ---------------------------------------------------------------------------

    async def metrics(self) -> reports.BrokerMetrics:
        """Counters and latencies of every queue since the broker was opened."""
        return await self._home.call(ReadMetrics())

    async def close(self) -> None:
        """Answer everyone who waits, make everything durable, and let go of the directory. Closing twice does no harm."""
        self._closed = True
        await self._home.close()

    @property
    def closed(self) -> bool:
        return self._closed

    async def __aenter__(self) -> "AsyncBroker":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target!r}, {'closed' if self._closed else 'open'})"


def _behind(item: ListedItem, ends: dict[int, int]) -> tuple[int, int]:
    """Where the next page begins: behind the item, or, if that is new, behind its partition."""
    return item.partition, item.offset if item.offset < ends.get(item.partition, 0) else FIRST_FOREIGN_NUMBER
