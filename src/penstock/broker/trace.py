"""An item followed through the queues it was in: it answers to every id it ever had.

Owns: `explain` and `history`, the two queries that lead from one queue to another, for any home. A transferred item carries where it came
from, and the queue that it left knows where it went; both are followed as far as retention and the queues themselves let them.
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
"""So often an item is followed; who moved it more often has moved it in a circle."""
NameOf = Callable[[int], str | None]
"""The name of the queue of an incarnation, or None when it is no more."""


class ItemLocation(NamedTuple):
    """An item in one queue."""

    queue: int
    partition: int
    offset: int


StopOf = Callable[[ItemLocation], int | None]


def explain(home: Home, asked: ExplainItem) -> ItemExplanation:
    """Why is this item not running? Of one that was moved, that is asked where it is now."""
    place = ItemLocation(asked.queue, asked.partition, asked.offset)
    for step in range(HOPS):
        try:
            found = home.call(ExplainItem(queue=place.queue, partition=place.partition, offset=place.offset, follow=False))
        except QueueNotFound:
            if not step:
                raise
            break
        if found.moved_to is None:
            return found
        place = ItemLocation(*found.moved_to)
    return ItemExplanation(format_id(asked.partition, asked.offset), "", "moved", "moved to a queue that is no more")


def history(home: Home, asked: ReadHistory, name_of: NameOf, stop_of: StopOf = lambda place: None) -> list[ItemEvent]:
    """Everything that is known to have happened to an item, in the queues it was in, one after the other.

    `stop_of` says before which sequence of a place's log to stop, if not at its end.
    """
    first = ItemLocation(asked.queue, asked.partition, asked.offset)
    path = _Path(home, {first: home.call(TraceItem(queue=first.queue, partition=first.partition, offset=first.offset))})
    found: list[ItemEvent] = []
    for place in path.through(first):
        with closing(home.log(place.queue, place.partition)) as log:
            found += [_in_queue(place, event, name_of) for event in item_history(log, place.offset, stop_of(place))]
    return found


class _Path:
    """Where an item was, one place after the other."""

    def __init__(self, home: Home, known: dict[ItemLocation, ItemTrace | None]) -> None:
        self._home = home
        self._known = known

    def through(self, asked: ItemLocation) -> list[ItemLocation]:
        """From its first place to its last. Where one does not say where it went, the next is known by where it came from."""
        back = [asked]
        while len(back) < HOPS and (before := self._before(back[-1])) is not None and before not in back:
            back.append(before)
        path: list[ItemLocation] = []
        for place in reversed(back):
            then: ItemLocation | None = place
            while then is not None and then not in path and len(path) < HOPS:
                path.append(then)
                then = self._after(then)
        return path

    def _before(self, place: ItemLocation) -> ItemLocation | None:
        traced = self._trace(place)
        return self._there(traced.came_from) if traced is not None else None

    def _after(self, place: ItemLocation) -> ItemLocation | None:
        traced = self._trace(place)
        return self._there(traced.went_to) if traced is not None else None

    def _there(self, place: tuple[int, int, int] | None) -> ItemLocation | None:
        """The place, if it can be looked at."""
        found = ItemLocation(*place) if place is not None else None
        return found if found is not None and self._trace(found) is not None else None

    def _trace(self, place: ItemLocation) -> ItemTrace | None:
        if place not in self._known:
            try:
                self._known[place] = self._home.call(TraceItem(queue=place.queue, partition=place.partition, offset=place.offset))
            except (QueueNotFound, InvalidRequest):  # the queue, or its past, is no more
                self._known[place] = None
        return self._known[place]


def _in_queue(place: ItemLocation, event: Event, name_of: NameOf) -> ItemEvent:
    return ItemEvent(
        event.event,
        name_of(place.queue) or "",
        format_id(place.partition, place.offset),
        event.at,
        event.attempt,
        event.reason,
        event.consumer,
        event.lease,
        _named(event.destination, name_of),
        _named(event.source, name_of),
    )


def _named(text: str, name_of: NameOf) -> str:
    """A place with the name of its queue instead of its incarnation, as long as there is one."""
    incarnation, slash, rest = text.partition("/")
    name = name_of(int(incarnation, 16)) if slash else None
    return f"{name}/{rest}" if name is not None else text
