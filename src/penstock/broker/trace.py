"""Queries that follow one item through several queues: an item can be found by every id that it ever had.

Owns: `explain` and `history`, for any home. A transferred item has the id it came from, and the queue that it left has
the id it went to. Both links are followed until retention has deleted one of them, or a queue was deleted.
"""

from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from penstock.loop.item_events import item_history
from penstock.operations import ExplainItem, Home, ReadHistory, TraceItem
from penstock.reports import ItemEvent, ItemExplanation, ItemTrace
from penstock.rules.events import Event
from penstock.words.errors import InvalidRequest, QueueNotFound
from penstock.words.ids import format_id

HOPS = 100
"""How many moves of an item are followed at most; more moves than that are taken for a cycle."""
NameOf = Callable[[int], str | None]
"""Gives the name of the queue with an incarnation, or None when it was deleted."""


class ItemLocation(NamedTuple):
    """The position of an item: its queue (incarnation), partition and offset."""

    queue: int
    partition: int
    offset: int


StopOf = Callable[[ItemLocation], int | None]
"""Gives the sequence of the partition's log before which to stop reading, or None for the end of the log."""


def explain(home: Home, operation: ExplainItem) -> ItemExplanation:
    """Why an item is not running. If the item was moved, the answer is about its present position."""
    location = ItemLocation(operation.queue, operation.partition, operation.offset)
    for step in range(HOPS):
        try:
            found = home.call(ExplainItem(queue=location.queue, partition=location.partition, offset=location.offset, follow=False))
        except QueueNotFound:
            if not step:
                raise
            break
        if found.moved_to is None:
            return found
        location = ItemLocation(*found.moved_to)
    return ItemExplanation(format_id(operation.partition, operation.offset), "", "moved", "moved to a queue that was deleted")


def history(home: Home, operation: ReadHistory, name_of: NameOf, stop_of: StopOf = lambda location: None) -> list[ItemEvent]:
    """Every known event of an item, in the order of the queues that it passed through."""
    first = ItemLocation(operation.queue, operation.partition, operation.offset)
    path = _Path(home, {first: home.call(TraceItem(queue=first.queue, partition=first.partition, offset=first.offset))})
    found: list[ItemEvent] = []
    for location in path.through(first):
        with closing(home.log(location.queue, location.partition)) as log:
            found += [_in_queue(location, event, name_of) for event in item_history(log, location.offset, stop_of(location))]
    return found


class _Path:
    """Finds the locations that an item had."""

    def __init__(self, home: Home, known: dict[ItemLocation, ItemTrace | None]) -> None:
        self._home = home
        self._known = known

    def through(self, operation: ItemLocation) -> list[ItemLocation]:
        """The locations from the first to the last.

        Where a location does not know where the item went, the next location knows where it came from.
        """
        back = [operation]
        while len(back) < HOPS and (before := self._before(back[-1])) is not None and before not in back:
            back.append(before)
        path: list[ItemLocation] = []
        for location in reversed(back):
            then: ItemLocation | None = location
            while then is not None and then not in path and len(path) < HOPS:
                path.append(then)
                then = self._after(then)
        return path

    def _before(self, location: ItemLocation) -> ItemLocation | None:
        traced = self._trace(location)
        return self._there(traced.came_from) if traced is not None else None

    def _after(self, location: ItemLocation) -> ItemLocation | None:
        traced = self._trace(location)
        return self._there(traced.went_to) if traced is not None else None

    def _there(self, location: tuple[int, int, int] | None) -> ItemLocation | None:
        """The location, if it can still be queried."""
        found = ItemLocation(*location) if location is not None else None
        return found if found is not None and self._trace(found) is not None else None

    def _trace(self, location: ItemLocation) -> ItemTrace | None:
        if location not in self._known:
            try:
                self._known[location] = self._home.call(
                    TraceItem(queue=location.queue, partition=location.partition, offset=location.offset)
                )
            except (QueueNotFound, InvalidRequest):  # the queue was deleted, or retention deleted the item
                self._known[location] = None
        return self._known[location]


def _in_queue(location: ItemLocation, event: Event, name_of: NameOf) -> ItemEvent:
    return ItemEvent(
        event.event,
        name_of(location.queue) or "",
        format_id(location.partition, location.offset),
        event.at,
        event.attempt,
        event.reason,
        event.consumer,
        event.lease,
        _named(event.destination, name_of),
        _named(event.source, name_of),
    )


def _named(text: str, name_of: NameOf) -> str:
    """A location as text, with the name of its queue in place of the incarnation if the queue still exists."""
    incarnation, slash, rest = text.partition("/")
    name = name_of(int(incarnation, 16)) if slash else None
    return f"{name}/{rest}" if name is not None else text
