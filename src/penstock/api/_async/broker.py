"""Opening a broker, and its public class.

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
from penstock.api.homes import AsyncHome, Home, open_async_home
from penstock.api.items import ItemSource
from penstock.api.options import QueueInfo, QueueOptions, queue_info, to_catalog
from penstock.api.redrive import MAX_SAMPLE, PAGE, REDRIVABLE, Redriven, RedriveSample, Where, by_partition, item_filter, sample_of
from penstock.broker.targets import MIN_FREE_BYTES, TargetPath
from penstock.logs.backends import Files, Root
from penstock.logs.log import SEGMENT_BYTES, Durability
from penstock.operations import (
    CreateQueue,
    DeleteQueue,
    EnsureQueue,
    FindOffsets,
    FindQueue,
    ListItems,
    ListQueues,
    ReadMetrics,
    RedriveItems,
)
from penstock.words.clock import MILLISECOND, Clock
from penstock.words.ids import FIRST_FOREIGN_NUMBER
from penstock.words.limits import MAX_PARTITIONS, check_range


async def aopen(
    target: TargetPath,
    *,
    durability: Durability = "fsync",
    roots: Sequence[TargetPath | Root] | None = None,
    wait: Seconds = 10,
    own: bool = True,
    exclusive: bool = False,
    read_only: bool = False,
    min_free_bytes: int = MIN_FREE_BYTES,
    segment_bytes: int = SEGMENT_BYTES,
    compression: bool = True,
    api_key: str | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    cert_file: str | os.PathLike[str] | None = None,
    key_file: str | os.PathLike[str] | None = None,
    connect_timeout: Seconds = 5,
    clock: Clock | None = None,
    entropy: Callable[[int], bytes] = os.urandom,
    files: Files | None = None,
    threaded: bool = True,
) -> "AsyncBroker":
    """Open the broker of a directory or of a server, or a broker in memory, and return it.

        async with await penstock.aopen("data/") as broker:
            queue = await broker.create_queue("orders", exist_ok=True)

    Any number of processes can open a directory at the same time. The first one owns it: it holds the lock and writes
    the files. The others do everything through it, with the same methods and the same errors. When it ends, or is
    killed, one of the others becomes the owner, and calls that were under way are completed there. Give the same
    options in every process: those of the owner count.

    The broker of a server (`penstock serve`) has the same methods and the same errors. Calls whose connection is lost
    are sent again until their own deadline, and nothing is done twice. Spark and log files need the server's directory.

    target: the path of a directory, which is created if it does not exist; the address of a server, "http://host:port"
        or "https://host:port", with a path if a proxy needs one; or "memory://". A broker in memory loses everything
        when it is closed.
    durability: when a write counts as stored. "fsync": it is on disk and survives a power cut. "interval": the
        operating system has it, and it is synced to disk shortly after. "os": the operating system has it; it
        survives the end of this process, but not a power cut.
    roots: further directories, usually on other disks. Partitions are spread over all of them.
    wait: how long to wait for a process that owns the directory and does not answer yet, for example because it has
        just taken over. `BrokerLocked` after that; the message names the process. For a server: how long to wait until
        it answers; `BrokerClosed` after that.
    own: False: this process never becomes the owner. `BrokerClosed` if no other process is it (see `penstock own`).
    exclusive: True: be the owner and share the directory with no other process; `BrokerLocked` if another process has
        it open.
    read_only: True: only read what the owner has published. Takes no lock, writes nothing and needs no owner.
    min_free_bytes: `produce` raises `QueueFull` while the disk has less free space than this. Leasing, settling and
        retention still work, so that space can be freed. Default: 32 MiB.
    segment_bytes: the size at which a log file is closed and the next one begun. Default: 64 MiB.
    compression: whether items are compressed where that saves space.
    api_key: for a server: the API key. Default: the environment variable PENSTOCK_API_KEY. It is sent with every
        request, so use https:// beyond this machine. A pickled broker contains it.
    ca_file: for https://: a PEM file of the certificates to trust, instead of the system's. The server's certificate
        is always checked.
    cert_file, key_file: for https://: the certificate of this client and its private key, if the server asks for one.
    connect_timeout: for a server: how long to wait for a connection, each time one is made.
    clock, entropy, files: replacements for the clock, the random source and the file system, for tests. See
        `penstock.testing`.
    threaded: False is for tests of the sync API. No background thread runs: timers, retention and transfers only run
        during calls.
    """
    home = await open_async_home(
        target,
        roots=roots,
        wait=arguments.wait_timeout(wait, "wait"),
        own=arguments.check_flag("own", own),
        exclusive=arguments.check_flag("exclusive", exclusive),
        read_only=arguments.check_flag("read_only", read_only),
        durability=durability,
        min_free_bytes=check_range("min_free_bytes", min_free_bytes, 0, 1 << 60),
        segment_bytes=segment_bytes,
        compression=arguments.check_flag("compression", compression),
        api_key=arguments.optional_text("api_key", api_key),
        ca_file=arguments.optional_path("ca_file", ca_file),
        cert_file=arguments.optional_path("cert_file", cert_file),
        key_file=arguments.optional_path("key_file", key_file),
        connect_timeout=arguments.bounded_duration(connect_timeout, "connect_timeout", MILLISECOND, arguments.MAX_WAIT),
        clock=clock,
        entropy=entropy,
        files=files,
        threaded=threaded,
    )
    return AsyncBroker(home, os.fspath(target))


class AsyncBroker:
    """The queues of one directory, of a server, or of memory. `penstock.aopen` returns it.

    Close it when it is no longer needed, or use it in a `with` block. Closing ends every waiting call with
    `BrokerClosed`. Later calls of the broker, its queues and its leases raise `BrokerClosed` too.
    """

    def __init__(self, home: AsyncHome, target: str) -> None:
        self._home = home
        self._target = target
        self._closed = False

    @property
    def home(self) -> Home:
        """The object that answers the broker's operations (`penstock.operations`), for servers and tools."""
        return self._home.home

    # -- queues --------------------------------------------------------------------------------------

    async def create_queue(
        self,
        name: str,
        *,
        partitions: int | None = None,
        exist_ok: bool = False,
        **options: Unpack[QueueOptions],
    ) -> AsyncQueue:
        """Create a queue and return it. `QueueExists` if there is one of that name.

        partitions: the number of partitions, 1 to 1,024. Default: 1. `queue.resize` changes it later.
        exist_ok: if the queue exists, return it, with the partitions that it has. Every option given here must then
            equal that of the existing queue, else `QueueExists` is raised; options left out are not compared.
            `ensure_queue` changes them instead.
        options: see `QueueOptions`. An option left out has its default.
        """
        chosen = to_catalog(options)
        count = 1 if partitions is None else check_range("partitions", partitions, 1, MAX_PARTITIONS)
        ok = arguments.check_flag("exist_ok", exist_ok)
        found = await self._home.call(CreateQueue(name=name, options=chosen, partitions=count, exist_ok=ok, given=chosen))
        return AsyncQueue(self._home, found.name, found.incarnation)

    async def ensure_queue(
        self,
        name: str,
        *,
        partitions: int | None = None,
        resize: bool = False,
        **options: Unpack[QueueOptions],
    ) -> AsyncQueue:
        """Create a queue, or give an existing one the options that are named here, and return it.

        For the start of a program: it can be called again and again, also by several processes at the same time. What
        it changes is logged by the process that owns the broker.

        partitions: the number of partitions of a new queue. Default: 1. An existing queue keeps the partitions that it
            has, unless `resize` is True.
        resize: True: an existing queue with another number of partitions is resized to `partitions`.
        options: see `QueueOptions`. One that is left out has its default in a new queue, and does not change in an
            existing one. `durability` cannot be changed: a different one raises `InvalidRequest`, and nothing changes.
        """
        chosen = to_catalog(options)
        if partitions is not None:
            check_range("partitions", partitions, 1, MAX_PARTITIONS)
        operation = EnsureQueue(name=name, options=chosen, partitions=partitions, resize=arguments.check_flag("resize", resize))
        found = await self._home.call(operation)
        return AsyncQueue(self._home, found.name, found.incarnation)

    async def queue(self, name: str) -> AsyncQueue:
        """Return the queue of that name; `QueueNotFound` if there is none."""
        found = await self._find(name)
        return AsyncQueue(self._home, found.name, found.incarnation)

    async def queues(self, prefix: str = "", after: str = "", limit: int = 100) -> list[QueueInfo]:
        """Return the queues whose names begin with `prefix`, sorted by name, at most `limit` of them.

        after: return only names that sort after this one. For the next page, give the last name of this page.
        """
        prefix, after, limit = arguments.check_text("prefix", prefix), arguments.check_text("after", after), arguments.page_limit(limit)
        return [queue_info(found) for found in await self._home.call(ListQueues(prefix=prefix, after=after, limit=limit))]

    async def delete_queue(self, name: str, timeout: Seconds = 30) -> None:
        """Delete a queue, its items and its files.

        Waits up to `timeout` until no item is in transfer to or from the queue. Refused while the queue is the dead
        queue of another queue.
        """
        wait = arguments.wait_timeout(timeout)
        await self._home.call(DeleteQueue(queue=(await self._find(name)).incarnation, wait=wait))

    async def _find(self, name: str | NamedQueue) -> reports.QueueDescription:
        return await self._home.call(FindQueue(name=arguments.queue_name(name)))

    # -- redrive -------------------------------------------------------------------------------------

    async def redrive(
        self, source: str | NamedQueue, *, to: str | NamedQueue, where: Where | None = None, limit: int | None = None, preview: bool = False
    ) -> Redriven:
        """Move waiting and buried items to another queue, each exactly once. Dead letters return to their queue so.

        Ready, scheduled and buried items are moved; leased ones stay. An item that waits for its next attempt is ready
        there at once. One that was produced with `at` still waits for that time.

        source: the queue whose items are moved, by name or as a Queue. Items produced to it during the call stay.
        to: the queue that gets the items. If it is the source itself, its buried items become ready again in place.
        where: which items to move; None is all. A dict from "kind", "key", "reference", "encoding", "reason",
            "state", "origin_queue" or "headers.<name>" to the value that the item must have, or a function that takes
            an `Item` and returns whether to move it.
        limit: move at most this many items.
        preview: move nothing; return how many items would be moved, and describe the first 100 of them.
        """
        matches = item_filter(where)
        left = check_range("limit", limit, 1, 1 << 60) if limit is not None else 1 << 60
        arguments.check_flag("preview", preview)
        found_source, found_target = await self._find(source), await self._find(to)
        origin, target, shared = found_source.incarnation, found_target.incarnation, ItemSource(found_source.name)
        ends = await self._home.call(FindOffsets(queue=origin, at="newest"))
        ids: list[str] = []
        sample: list[RedriveSample] = []
        moved = 0
        after: tuple[int, int] | None = None
        while left > 0:
            query = ListItems(queue=origin, states=REDRIVABLE, after=after, limit=PAGE)
            page = [ListedItem(shared, found) for found in await self._home.call(query)]
            if not page:
                break
            after = _next_page(page[-1], ends)
            old = [item for item in page if item.offset < ends.get(item.partition, 0) and (origin != target or item.state == "buried")]
            chosen = [item for item in old if matches(item)][:left]
            left -= len(chosen)
            if preview:
                sample += [sample_of(item) for item in chosen[: MAX_SAMPLE - len(sample)]]
                moved += len(chosen)
            elif chosen:
                ids += [item.id for item in chosen]
                moved += await self._home.call(RedriveItems(queue=origin, items=by_partition(chosen), to=target))
        return Redriven(moved, [item.id for item in sample] if preview else ids, sample)

    # -- the broker itself ---------------------------------------------------------------------------

    async def metrics(self) -> reports.BrokerMetrics:
        """Return counters and latencies of every queue since the broker was opened."""
        return await self._home.call(ReadMetrics())

    async def close(self) -> None:
        """End waiting calls with `BrokerClosed`, sync everything to disk, and release the directory.

        Closing a closed broker does nothing.
        """
        self._closed = True
        await self._home.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def __aenter__(self) -> "AsyncBroker":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target!r}, {'closed' if self._closed else 'open'})"


def _next_page(item: ListedItem, ends: dict[int, int]) -> tuple[int, int]:
    """The position after `item`, the last of a page; or, if it is newer than `ends`, after its whole partition."""
    return item.partition, item.offset if item.offset < ends.get(item.partition, 0) else FIRST_FOREIGN_NUMBER
