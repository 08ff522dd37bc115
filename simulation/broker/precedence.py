"""Which item of a whole queue goes first? Ages and priorities across partitions, judged on what was seen.

Owns: `Precedence`: since when each item waits, and the check that no lease took an item while one that is clearly better lay ready in
another partition. Only items without a key are judged: what holds or frees a key is broker_order.py's matter. Only partitions that were
in order and not paused before and after the turn count. Times are the world's.
A partition knows how long an item waits to a second (items that became ready within one are kept together), and a lease may stay in a
partition for what is up to a second younger than the oldest elsewhere.
"""

from typing import NamedTuple

from penstock.rules.life import Life
from penstock.words.clock import SECOND
from simulation.broker.census import Census
from simulation.broker.items import ENDLESS, Held, Place, Tag

UNSURE = 2 * SECOND
"""An item may be taken for older than one that waits longer, as long as that is less than this."""


class Wait(NamedTuple):
    """An item that is ready: where, and since when at the earliest and at the latest."""

    place: Place
    earliest: int
    latest: int


class Precedence:
    """The order of the whole queue."""

    def __init__(self, census: Census) -> None:
        self._census = census
        self._waiting: dict[Tag, Wait] = {}
        self._before: dict[Tag, Wait] = {}
        """As it was at the look before the last."""
        self._giving: dict[tuple[int, int], object] = {}
        """Partitions that are in order and not paused, each with what tells whether it was opened anew since."""
        self._gave: dict[tuple[int, int], object] = {}
        self._sought: set[int] = set()
        """Queues of which items were sought: those stand before older ones, and at another priority."""
        self._rebooted = False
        self.judging = True
        """False while answers of a process that is gone are judged: what was ready then is not known."""

    def rebooted(self) -> None:
        """The date says how long the machine was off, and it may be wrong: what waits is younger or older than it seems."""
        self._rebooted = True

    def look(self, now: int, seeking: set[int]) -> None:
        """See what waits after a turn."""
        self._sought |= seeking
        giving: dict[tuple[int, int], object] = {
            owner: room.state for owner, room in self._census.rooms.items() if room.healthy and not room.paused
        }
        self._gave, self._giving = self._giving, giving
        self._before, self._waiting = self._waiting, {}
        for tag, found in self._census.found.items():
            for spot in found.live:
                if spot.life is Life.READY:
                    self._waiting[tag] = self._wait(self._before.get(tag), spot.place, now)
        self._rebooted = False

    def _wait(self, known: Wait | None, place: Place, now: int) -> Wait:
        if known is not None and known.place == place and not self._rebooted:
            return known
        seen = place[:2] in self._gave and not self._rebooted  # else it may have become ready while nobody could look
        return Wait(place, now if seen else -ENDLESS, now)

    def check(self, held: Held, now: int) -> None:
        """Judge the items of a lease that was just given, as everything is after the turn that gave it."""
        if not self.judging or held.incarnation in self._sought or not self._steady((held.incarnation, held.partition)):
            return
        if held.incarnation in self._census.looking_on:
            return
        aging = self._census.rooms[held.incarnation, held.partition].policy.priority_aging
        passed = [(tag, wait) for tag, wait in self._waiting.items() if self._before.get(tag) == wait and self._elsewhere(held, tag, wait)]
        for offset, tag in held.open.items() if passed else ():
            place = Place(held.incarnation, held.partition, offset)
            taken = self._before.get(tag, Wait(place, now, now))
            if tag.key is not None or taken.place != place:
                continue
            best = _lifted(tag.priority, now + UNSURE - taken.earliest, aging)
            for other, wait in passed:
                its = _lifted(other.priority, now - wait.latest, aging)
                older = taken.earliest - wait.latest
                ahead = its < best or (its == best and older >= UNSURE)
                assert not ahead, (
                    f"{held} was given {tag} of priority {tag.priority}, while {other} of priority {other.priority}, "
                    f"{older / SECOND} s older, waits in partition {wait.place.partition}"
                )

    def _elsewhere(self, held: Held, tag: Tag, wait: Wait) -> bool:
        """Whether an item lay in another partition of the queue all the time, and could have been leased there."""
        owner = wait.place[:2]
        return tag.key is None and owner[0] == held.incarnation and owner[1] != held.partition and self._steady(owner)

    def _steady(self, owner: tuple[int, int]) -> bool:
        """Whether a partition was in order before the turn and is so after it, and nothing happened to it in between."""
        return owner in self._gave and self._gave[owner] is self._giving.get(owner)


def _lifted(priority: int, age: int, aging: int) -> int:
    return max(0, priority - age // aging) if aging else priority
