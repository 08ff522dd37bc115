"""A reading position that is kept.

Owns: `AsyncCursor`.
"""

from types import TracebackType
from typing import TYPE_CHECKING

from penstock.api.arguments import Start, cursor_start, page_limit
from penstock.api.homes import AsyncHome
from penstock.api.items import Item, items_of
from penstock.loop.item_cache import Items
from penstock.operations import AwaitItems, FindOffsets, ListCursors, MoveCursor, ReadItems, ReleaseCursor
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa

PAGE = 1_000
SLICE = 1 * SECOND
"""Waiting for new items is done in slices, so that whoever closes the cursor is heard."""


class AsyncCursor:
    """Reads what a queue holds and held, oldest first in each partition, without leasing anything.

    Its position has a name and survives restarts. What it has not read yet, retention leaves alone; so `release` one that is not
    wanted any more. Going through a cursor commits its position whenever the next page is asked for: after a crash the last page may
    be read again, nothing is skipped.

        async for item in await queue.cursor("audit"):
            print(item.id, item.value)
    """

    def __init__(self, home: AsyncHome, incarnation: int, name: str, follow: bool) -> None:
        self.name = name
        self.follow = follow
        """Whether it waits for new items at the end."""
        self._home = home
        self._incarnation = incarnation
        self._position: dict[int, int] = {}
        """The next offset to be handed out, by partition."""
        self._committed: dict[int, int] = {}
        self._page: list[Item] = []
        self._behind_page: dict[int, int] = {}
        self._closed = False

    @property
    def position(self) -> dict[int, int]:
        """The offset in each partition up to which everything was handed out."""
        return dict(self._position)

    # -- reading -------------------------------------------------------------------------------------

    async def read(self, limit: int = PAGE) -> list[Item]:
        """The next items, at most `limit`; none at the end, unless the cursor follows: then it waits. Nothing is committed."""
        found = await self._read_on(page_limit(limit))
        return [item for partition, (start, batch, at) in found for item in items_of(partition, start, batch, at, {}, 0)]

    async def read_arrow(self, limit: int = PAGE) -> "pa.RecordBatch":
        """As `read`, as an Arrow record batch. Needs penstock[arrow]."""
        from penstock.api.arrow import items_to_arrow

        found = await self._read_on(page_limit(limit))
        return items_to_arrow([(partition, *items, {}) for partition, items in found], 0)

    def __aiter__(self) -> "AsyncCursor":
        return self

    async def __anext__(self) -> Item:
        if not self._page:
            await self._turn_page()
        item = self._page.pop()
        self._position[item.partition] = item.offset + 1
        if not self._page:
            self._position.update(self._behind_page)
        return item

    async def _turn_page(self) -> None:
        if self._closed:
            raise StopAsyncIteration
        await self.commit()
        found, behind = await self._fetch(PAGE)
        if not found:
            raise StopAsyncIteration
        self._behind_page = behind
        self._page = [item for partition, (start, batch, at) in found for item in items_of(partition, start, batch, at, {}, 0)][::-1]

    async def _read_on(self, limit: int) -> list[tuple[int, Items]]:
        self._check_open()
        self._page.clear()  # what was not handed out is read again
        found, behind = await self._fetch(limit)
        self._position = behind
        return found

    async def _fetch(self, limit: int) -> tuple[list[tuple[int, Items]], dict[int, int]]:
        """Items from the position on, and the position behind them. One that follows waits for some, until it is closed."""
        woken = False
        while True:
            page = await self._home.call(ReadItems(queue=self._incarnation, start=self._position, limit=limit))
            found, behind = page.items, page.next_offsets
            if found:
                return found, behind
            moved = behind != self._position
            self._position = behind
            if not moved and not self.follow:
                return found, behind
            if not moved:
                if woken:  # for items that cannot be read now: wait for others
                    behind = await self._home.call(FindOffsets(queue=self._incarnation, at="newest"))
                woken = await self._home.call(AwaitItems(queue=self._incarnation, start=behind, wait=SLICE))
            if self._closed:
                return [], self._position

    # -- the position --------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Keep the position durably: what was handed out so far will not be read again."""
        self._check_open()
        moved = {partition: offset for partition, offset in self._position.items() if self._committed.get(partition) != offset}
        if moved:
            await self._home.call(MoveCursor(queue=self._incarnation, name=self.name, to=moved))
            self._committed.update(moved)

    async def seek(self, to: Start) -> None:
        """Go on elsewhere, and keep that durably: at "oldest", "newest", a time, or an item (in its partition only)."""
        self._check_open()
        self._page.clear()
        self._position |= await self._find(to)
        await self.commit()

    async def _find(self, start: Start) -> dict[int, int]:
        place = cursor_start(start)
        if isinstance(place, tuple):
            return dict([place])
        return await self._home.call(FindOffsets(queue=self._incarnation, at=place))

    async def _open(self, start: Start) -> "AsyncCursor":
        """Go on where the cursor of this name was left, or make it."""
        cursor_start(start)  # what is wrong is said whether or not it is needed
        self._committed = (await self._home.call(ListCursors(queue=self._incarnation))).get(self.name, {})
        self._position = dict(self._committed)
        if not self._position:
            await self.seek(start)
        return self

    # -- the end -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop reading, also one that waits in another thread or task. The position stays as it was committed."""
        self._closed = True

    async def release(self) -> None:
        """Forget the cursor: retention need not wait for it any more."""
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
