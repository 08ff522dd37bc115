"""Whoever looks at a simulated broker and at what it says of itself.

Owns: `Inspector`: what `explain`, `listed`, `read` and cursors answer must be what the census found.
"""

from penstock.reports import Explained
from penstock.rules.life import Life
from penstock.words import ids
from simulation.broker.census import Spot
from simulation.broker.chance import Chance
from simulation.broker.items import Place, Tag
from simulation.broker.operator import Operator
from simulation.broker.world import World

MOVED = "moved"


class Inspector:
    """One who asks and compares."""

    def __init__(self, world: World, chance: Chance, operator: Operator) -> None:
        self._world = world
        self._chance = chance
        self._operator = operator

    def look(self) -> None:
        """Ask one thing or another."""
        queue = self._chance.pick(sorted(self._world.model.queues))
        for other in sorted(self._world.model.queues):  # so that nothing else happens between what is said and what is found
            self._operator.first_run(other)
        self._chance.pick([self._explain, self._list, self._read, self._cursor])(queue)

    def _explain(self, queue: int) -> None:
        """An item answers to every id it ever had."""
        model = self._world.model
        known = [(tag, place) for tag in model.tags.values() for place in tag.places if place.incarnation == queue and not tag.void]
        if not known:
            return
        tag, place = self._chance.pick(known)
        said = self._operator.ask(queue, "explain", partition=place.partition, offset=place.offset)
        if isinstance(said, Explained) and model.census.whole and said.state != MOVED:
            self._compare(tag, place, said)

    def _compare(self, tag: Tag, place: Place, said: Explained) -> None:
        """What is said is true of the copy it is said of; and where there is a living copy, it is said of that."""
        model = self._world.model
        name = model.queues.get(place.incarnation)
        where = Place(next((q for q, info in model.queues.items() if info.name == said.queue), 0), *ids.parse_id(said.id))
        assert model.census.at(where) is tag, f"{tag} was explained as {said}, where {model.census.at(where)} is ({name})"
        spots: dict[Place, Spot] = {spot.place: spot for spot in model.census.of(tag).spots()}
        assert spots[where].life.value == said.state, f"{tag} is {model.census.of(tag)} and was explained as {said}"

    def _list(self, queue: int) -> None:
        """Every item in a state is listed once."""
        model = self._world.model
        states = [life for life in Life if self._chance.happens(0.5)] or [Life.READY]
        dropped = self._dropped(queue)
        listed = self._operator.ask(queue, "listed", states=[life.value for life in states], limit=1_000)
        if not isinstance(listed, list) or not model.census.whole:
            return
        taken = self._dropped(queue) - dropped  # by retention when the turn was committed, perhaps after they were listed
        found = sorted(place for place in ((item.partition, item.offset) for item in listed) if place not in taken)
        left = {place[1:] for place in model.census.left(queue)}  # they are listed where they are now
        expected = [
            (partition, offset) for (incarnation, partition), room in model.census.rooms.items() if incarnation == queue
            for offset, life in enumerate(room.lives) if life in states and offset not in room.dropped and (partition, offset) not in left
        ]  # fmt: skip
        assert found == sorted(expected), f"listed were {found}, and there are {sorted(expected)}"

    def _dropped(self, queue: int) -> set[tuple[int, int]]:
        """What retention has taken, as far as was seen."""
        rooms = self._world.model.census.rooms.items()
        return {(number, offset) for (incarnation, number), room in rooms if incarnation == queue for offset in room.dropped}

    def _read(self, queue: int) -> None:
        """History has every item that was ever here and is kept; one that was only moved within the queue, once."""
        model = self._world.model
        answer = self._operator.ask(queue, "read", offsets={}, limit=10_000)
        if not isinstance(answer, tuple) or not model.census.whole:
            return
        read = [model.tags[payload] for _, items in answer[0] for payload in items.batch.payloads]
        for tag in model.tags.values():
            here = [place for place in tag.places if place.incarnation == queue and model.census.at(place) is tag]
            kept = [place for place in here if place.offset not in model.census.rooms[place[:2]].dropped]
            assert bool(kept) == (tag in read) or len(here) > len(kept), f"{tag} was {'not ' * (tag not in read)}read, and is at {kept}"
            assert read.count(tag) <= max(1, len(kept)), f"{tag} was read {read.count(tag)} times"

    def _cursor(self, queue: int) -> None:
        """A cursor is where it was put."""
        ends = self._operator.ask(queue, "ends")
        if not isinstance(ends, dict):
            return
        if self._chance.happens(0.3):
            self._operator.ask(queue, "release_cursor", name="audit")
            return
        offsets = {number: self._chance.rng.randint(0, end) for number, end in ends.items()}
        moved = self._operator.ask(queue, "move_cursor", name="audit", offsets=offsets)
        found = self._operator.ask(queue, "cursor", name="audit")
        if moved is None and isinstance(found, dict) and self._world.model.census.whole:
            assert found == offsets, f"the cursor was moved to {offsets} and is at {found}"
