"""An item followed through the queues it was in: it answers to every id it ever had.

Owns: `explain` and `history`, the two verbs that may lead from one queue to another, for any broker that can be looked at (`Source`).
A transferred item carries where it came from, and the queue that it left knows where it went; both are followed as far as retention
and the queues themselves let them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from penstock.logs.api import Readable
from penstock.loop.history import item_history
from penstock.reports import Explained, ItemEvent, Traced
from penstock.rules.events import Event
from penstock.words.errors import InvalidRequest, QueueNotFound
from penstock.words.ids import format_id

HOPS = 100
"""So often an item is followed; who moved it more often has moved it in a circle."""


class Place(NamedTuple):
    """An item in one queue."""

    incarnation: int
    partition: int
    offset: int


class Source(Protocol):
    """Whoever has queues."""

    def look(self, incarnation: int, verb: str, **args: Any) -> Any:
        """Ask one queue, which answers only for itself; QueueNotFound when it is no more."""
        ...

    def name_of(self, incarnation: int) -> str | None:
        """The name of a queue, or None when it is no more."""
        ...

    def told_of(self, incarnation: int, partition: int, offset: int) -> Sequence[Event]:
        """What the log of one partition tells of an item."""
        ...


def explain(source: Source, incarnation: int, partition: int, offset: int) -> Explained:
    """Why is this item not running? Of one that was moved, that is asked where it is now."""
    answer = source.look(incarnation, "explain", partition=partition, offset=offset)
    for _ in range(HOPS):
        if isinstance(answer, Explained):
            return answer
        there, number, place = answer
        try:
            answer = source.look(there, "explain", partition=number, offset=place)
        except QueueNotFound:
            break
    return Explained(format_id(partition, offset), "", "moved", "moved to a queue that is no more")


def history(source: Source, incarnation: int, partition: int, offset: int) -> list[ItemEvent]:
    """Everything that is known to have happened to an item, in the queues it was in, one after the other."""
    asked = Place(incarnation, partition, offset)
    path = _Path(source, {asked: source.look(incarnation, "trace", partition=partition, offset=offset)})
    found: list[ItemEvent] = []
    for place in path.through(asked):
        found += [_in_queue(source, place, event) for event in source.told_of(*place)]
    return found


def read(log: Readable, offset: int, stop_sequence: int | None = None) -> list[Event]:
    """What a log tells of an item; the log is closed then."""
    with closing(log):
        return item_history(log, offset, stop_sequence)


class _Path:
    """Where an item was, one place after the other."""

    def __init__(self, source: Source, known: dict[Place, Traced | None]) -> None:
        self._source = source
        self._known = known

    def through(self, asked: Place) -> list[Place]:
        """From its first place to its last. Where one does not say where it went, the next is known by where it came from."""
        back = [asked]
        while len(back) < HOPS and (before := self._before(back[-1])) is not None and before not in back:
            back.append(before)
        path: list[Place] = []
        for place in reversed(back):
            then: Place | None = place
            while then is not None and then not in path and len(path) < HOPS:
                path.append(then)
                then = self._after(then)
        return path

    def _before(self, place: Place) -> Place | None:
        traced = self._trace(place)
        return self._there(traced.came_from) if traced is not None else None

    def _after(self, place: Place) -> Place | None:
        traced = self._trace(place)
        return self._there(traced.went_to) if traced is not None else None

    def _there(self, place: tuple[int, int, int] | None) -> Place | None:
        """The place, if it can be looked at."""
        found = Place(*place) if place is not None else None
        return found if found is not None and self._trace(found) is not None else None

    def _trace(self, place: Place) -> Traced | None:
        if place not in self._known:
            try:
                self._known[place] = self._source.look(place.incarnation, "trace", partition=place.partition, offset=place.offset)
            except (QueueNotFound, InvalidRequest):  # the queue, or its past, is no more
                self._known[place] = None
        return self._known[place]


def _in_queue(source: Source, place: Place, event: Event) -> ItemEvent:
    return ItemEvent(
        event.event,
        source.name_of(place.incarnation) or "",
        format_id(place.partition, place.offset),
        event.at,
        event.attempt,
        event.reason,
        event.consumer,
        event.lease,
        _named(source, event.destination),
        _named(source, event.source),
    )


def _named(source: Source, text: str) -> str:
    """A place with the name of its queue instead of its incarnation, as long as there is one."""
    incarnation, slash, rest = text.partition("/")
    name = source.name_of(int(incarnation, 16)) if slash else None
    return f"{name}/{rest}" if name is not None else text


def ask(source: Source, incarnation: int, verb: str, args: Mapping[str, Any]) -> Any:
    """Ask one queue, or as many as the answer needs."""
    found = VERBS.get(verb)
    return found(source, incarnation, **args) if found is not None else source.look(incarnation, verb, **args)


VERBS: dict[str, Callable[..., Any]] = {"explain": explain, "history": history}
"""The verbs that are not one queue's to answer."""
