"""Cursors: durable reading positions in a queue.

Owns: `AsyncCursor`.
"""

from collections.abc import Collection
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.api.arguments import Start, cursor_start, page_limit
from penstock.api.cursor_lags import cursor_lags
from penstock.api.homes import AsyncHome
from penstock.api.items import Item, ItemSource, items_of
from penstock.loop.item_cache import Items
from penstock.operations import AwaitItems, FindOffsets, FindQueue, ListCursors, MoveCursor, ReadItems, ReleaseCursor
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, StorageFailed

if TYPE_CHECKING:
    import pyarrow as pa

PAGE = 1_000
SLICE = 1 * SECOND
"""A following cursor waits this long at a time, then checks whether it was closed."""


class AsyncCursor:
    """A named, durable reading position in a queue. `queue.cursor(name)` returns it.

        async for item in await queue.cursor("audit"):
            print(item.id, item.value)

    A cursor reads all items that retention has kept, in every state, oldest first in each partition. It leases nothing
    and changes no item. Retention keeps items that a cursor has not read; call `release` when a cursor is no longer
    needed.

    The position is kept in the queue under the cursor's name, and survives restarts. Iteration commits it after each
    page of 1,000 items, so after a crash the last page may be read again; no item is skipped.
    """

    def __init__(self, home: AsyncHome, queue: str, incarnation: int, name: str, follow: bool) -> None:
        self.name = name
        self.follow = follow
        """Whether reading waits for new items at the end of the queue."""
        self._home = home
        self._source = ItemSource(queue)
        self._incarnation = incarnation
        self._position: dict[int, int] = {}
        """The next offset to return, by partition."""
        self._committed: dict[int, int] = {}
        self._page: list[Item] = []
        """Items read but not yet returned by iteration, in reverse order."""
        self._after_page: dict[int, int] = {}
        """The position after the last item of the page."""
        self._closed = False

    @property
    def position(self) -> dict[int, int]:
        """The offset of the next item to return, by partition. `commit` makes it durable."""
        return dict(self._position)

    # -- reading -------------------------------------------------------------------------------------

    async def read(self, limit: int = PAGE) -> list[Item]:
        """Return the next items, at most `limit`, and move the position after them. Does not commit it.

        At the end of the queue the list is empty. A cursor with `follow` waits there for new items instead.
        """
        found = await self._read_next(page_limit(limit))
        return self._items(found)

    async def read_arrow(self, limit: int = PAGE) -> "pa.RecordBatch":
        """Like `read`, but returns an Arrow record batch. Needs penstock[arrow]."""
        from penstock.api.arrow import items_to_arrow

        found = await self._read_next(page_limit(limit))
        return items_to_arrow([(partition, items.offsets, *items[1:], {}) for partition, items in found], 0)

    def __aiter__(self) -> "AsyncCursor":
        return self

    async def __anext__(self) -> Item:
        if not self._page:
            await self._next_page()
        item = self._page.pop()
        self._position[item.partition] = item.offset + 1
        if not self._page:
            self._position.update(self._after_page)
        return item

    async def _next_page(self) -> None:
        if self._closed:
            raise StopAsyncIteration
        await self.commit()
        found, after = await self._fetch(PAGE)
        if not found:
            raise StopAsyncIteration
        self._after_page = after
        self._page = self._items(found)[::-1]

    def _items(self, found: list[tuple[int, Items]]) -> list[Item]:
        return [item for partition, part in found for item in items_of(self._source, partition, part.offsets, *part[1:], {}, 0)]

    async def _read_next(self, limit: int) -> list[tuple[int, Items]]:
        self._check_open()
        self._page.clear()  # the position is before these items, so they are read again
        found, self._position = await self._fetch(limit)
        return found

    async def _fetch(self, limit: int) -> tuple[list[tuple[int, Items]], dict[int, int]]:
        """Return items from the position on, and the position after them. With `follow`, wait until there are some."""
        woken = False
        while True:
            page = await self._home.call(ReadItems(queue=self._incarnation, start=self._position, limit=limit))
            found, after = page.items, page.next_offsets
            if found:
                return found, after
            moved = after != self._position
            self._position = after
            if not moved and not self.follow:
                return found, after
            if not moved:
                if woken:  # there are items, but they cannot be read now: wait for newer ones
                    after = await self._home.call(FindOffsets(queue=self._incarnation, at="newest"))
                began = self._home.clock.read().elapsed
                woken = await self._home.call(AwaitItems(queue=self._incarnation, start=after, wait=SLICE))
                if not woken and self._home.clock.read().elapsed == began:  # a test without threads: time stands still
                    return [], self._position
            if self._closed:
                return [], self._position

    # -- the position --------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Make the position durable. A cursor of this name, opened later, continues after the items returned so far."""
        self._check_open()
        moved = {partition: offset for partition, offset in self._position.items() if self._committed.get(partition) != offset}
        if moved:
            await self._home.call(MoveCursor(queue=self._incarnation, name=self.name, to=moved))
            self._committed.update(moved)

    async def seek(self, to: Start) -> None:
        """Move the position forward or back, and commit it. Items that it skips are not read; they do not change.

        to: "oldest"; "newest" (the end: only items produced from now on are read); a time (the first items produced
            then or later, in every partition); the id of an item; or offsets, {partition: offset}, as `position` gives
            them. An id or offsets move the position in these partitions only, and at most to their ends.
        """
        self._check_open()
        found = await self._find(to, "to")
        self._page.clear()
        self._position |= found
        await self.commit()

    async def lag(self) -> int:
        """Return how many items the cursor has not returned yet, of those that retention has kept, in any state."""
        self._check_open()
        oldest = await self._home.call(FindOffsets(queue=self._incarnation, at="oldest"))
        ends = await self._home.call(FindOffsets(queue=self._incarnation, at="newest"))
        return sum(one.lag for one in cursor_lags(self._position, oldest, ends))

    async def _find(self, start: Start, name: str) -> dict[int, int]:
        at = cursor_start(start, name)
        if isinstance(at, dict):
            ends = await self._home.call(FindOffsets(queue=self._incarnation, at="newest"))
            await self._check_found(at, ends)
            return {number: min(offset, ends[number]) for number, offset in at.items()}
        found = await self._home.call(FindOffsets(queue=self._incarnation, at=at))
        await self._check_found(self._position, found)
        return found

    async def _check_found(self, wanted: Collection[int], found: Collection[int]) -> None:
        """Raise if the offsets of a partition were not found: it does not exist, or cannot be read now."""
        for number in wanted:
            if number not in found:
                queue = await self._home.call(FindQueue(queue=self._incarnation))
                if number in (*queue.active, *queue.retired):
                    raise StorageFailed(f"partition {number} is failing, so the cursor {self.name!r} was not moved; try again in a moment")
                raise InvalidRequest(f"queue {queue.name!r} has no partition {number}; give one of {[*queue.active, *queue.retired]}")

    async def _open(self, start: Start) -> "AsyncCursor":
        """Continue at the committed position of this name, or create the cursor at `start`."""
        at = cursor_start(start)  # a wrong start is refused also where it is not needed
        self._committed = (await self._home.call(ListCursors(queue=self._incarnation))).get(self.name, {})
        self._position = dict(self._committed)
        if not self._position:
            if isinstance(at, dict):  # in the other partitions it begins with the oldest items, and retention keeps them
                self._position = await self._find("oldest", "start")
            await self.seek(start)
        return self

    # -- closing -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop reading. A `read` that waits in another thread or task ends within a second.

        The cursor still exists in the queue, at its committed position; see `release`.
        """
        self._closed = True

    async def release(self) -> None:
        """Delete the cursor from the queue. Retention no longer keeps items for it."""
        await self._home.call(ReleaseCursor(queue=self._incarnation, name=self.name))
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest(f"the cursor {self.name!r} is closed; ask the queue for it again")

    async def __aenter__(self) -> "AsyncCursor":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "following" if self.follow else "open"
        return f"{type(self).__name__}({self.name!r}, {state}, position={self._position})"
