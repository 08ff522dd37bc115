"""Where a queue lives, as Spark sees it: the small interface between the data source and a broker.

Owns: `Reading` and `Writing`, `Bounds`, `Target`. Today a target is a broker's directory; another home of queues adds a class of each
kind and a line in reaching.py.
Driver and tasks are different processes, perhaps on different machines: a target is plain data that can be sent to them, everything else
is opened where it is used. A directory must be reachable under the same path from every node.
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from penstock.logs.backends import MEMORY
from penstock.reports import QueueInfo
from penstock.words.errors import InvalidRequest

Target: TypeAlias = tuple[str, ...]
"""A broker: the storage roots of its directory, the first being the primary one."""

FILE = "file://"


class Bounds(NamedTuple):
    """What is published and retained of a partition now."""

    start: int
    end: int
    """Item offsets [start, end)."""
    first_sequence: int
    sequence: int
    """Sequences of the log's first and last frame; the last is one before the first where nothing is there."""
    whole: int
    """The first sequence from which on retention has taken nothing: before it there may be items whose events are not told any more."""


class DeadPlace(NamedTuple):
    """A partition in which dead letters of a queue may lie."""

    queue: str
    incarnation: int
    partition: int
    waiting: bool
    """Whether what waits there counts (it is a dead queue), besides what was buried in place."""
    origin: str | None
    """Only letters that came from this queue; None: all."""


class Reading(Protocol):
    """A broker that is read. `find`, `refresh` and those that tell bounds are for the driver; those that give batches are for tasks."""

    def find(self, queue: str) -> QueueInfo: ...
    def refresh(self) -> None:
        """Go on to what is published now."""
        ...

    def bounds(self, queue: QueueInfo) -> dict[int, Bounds]:
        """Of every partition, active or retired."""
        ...

    def offsets_at(self, queue: QueueInfo, wall: int) -> dict[int, int]:
        """The first item offset that each partition gave at or after a time; its end where there is none."""
        ...

    def sequences_at(self, queue: QueueInfo, wall: int) -> dict[int, int]:
        """A sequence in each partition before which nothing happened at or after a time: where reading events from then on may begin."""
        ...

    def missing(self, queue: QueueInfo, partition: int, start: int, stop: int) -> list[int]:
        """Flat runs of the item offsets [start, stop) whose bytes retention or damage took, as far as `refresh` has come."""
        ...

    def cursor(self, queue: QueueInfo, name: str) -> dict[int, int]:
        """Where a cursor stands in each partition that knows it."""
        ...

    def item_cuts(self, queue: QueueInfo, partition: int, start: int, stop: int, pieces: int) -> list[int]:
        """Offsets inside (start, stop), in order, that cut the range into so many pieces, or more where those would be too large for one
        task; at the edges of frames where there are any, so that few are read twice."""
        ...

    def sequence_cuts(self, queue: QueueInfo, partition: int, start: int, stop: int) -> list[int]:
        """Sequences inside (start, stop) at which reading events can begin without reading what is before."""
        ...

    def items(
        self,
        incarnation: int,
        partition: int,
        runs: Sequence[int],
        columns: Sequence[str],
        *,
        fail_on_data_loss: bool = True,
        exact: bool = False,
        forwarded: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The items of flat runs of offsets; what was forwarded from another partition, and what retention took before, is left out.

        fail_on_data_loss: whole segments that are gone since the range was chosen, and what is damaged, are an error and not left out.
        exact: then so is every single item that is gone: the runs name none that was when they were chosen.
        forwarded: items that came from another partition of the queue too, for who consumes them rather than reads the log.
        """
        ...

    def events(
        self,
        incarnation: int,
        partition: int,
        start: int,
        stop: int,
        columns: Sequence[str],
        *,
        since: int | None = None,
        until: int | None = None,
        fail_on_data_loss: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """What the log tells in the sequences [start, stop), of the times [since, until)."""
        ...

    def states(self, incarnation: int, partition: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The items of a partition that are not completed, as they are now."""
        ...

    def dead_places(self, queue: QueueInfo) -> list[DeadPlace]:
        """Where dead letters of a queue may lie."""
        ...

    def dead(self, place: DeadPlace, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The dead letters that lie there now."""
        ...

    def close(self) -> None: ...


class Destination(NamedTuple):
    """A queue that is written to, as it was when the write began."""

    queue: str
    incarnation: int
    owners: bytes
    """Its slot map, packed."""


class Writing(Protocol):
    """A broker that is written to. It is sent to tasks, so it holds nothing open; only `stage` and `leave` are theirs."""

    def find(self, queue: str) -> Destination: ...
    def begin(self) -> str:
        """A name for a write that begins now."""
        ...

    def prepare(self, write: str) -> None:
        """Make the place in which a write is staged; to be repeated without harm."""
        ...

    def stage(
        self, write: str, destination: Destination, order: Any, batches: Iterator[pa.RecordBatch], task: str, *, prepared: bool = True
    ) -> list[Any]:
        """Write the rows of one task attempt aside, durably; gives what `publish` wants to know of them.

        prepared: without its place nothing is written; else the place is made where it is missing, also when it was left meanwhile.
        """
        ...

    def publish(self, write: str, destination: Destination, order: Any, source: str, number: int, runs: Sequence[Any]) -> bool:
        """Let what was staged become items of the queue, all or none, and once for each source and number; False: it waits already."""
        ...

    def abandon(self, write: str) -> None:
        """Remove whatever was staged."""
        ...

    def leave(self, write: str) -> None:
        """Remove the place of a write if nothing is staged in it."""
        ...

    def known(self, destination: Destination, source: str, number: int) -> bool:
        """Whether this source and number, or a later one, became items of the queue before, or waits for it."""
        ...

    def settle(self, destination: Destination, source: str, number: int, seconds: float) -> bool:
        """Wait until the owner has taken up what was published, if there is one, and no longer than that; whether it has."""
        ...

    def close(self) -> None: ...


def target_of(given: str) -> Target:
    """The broker that the option of that name gives: a path, or several storage roots as a JSON list of paths, the first one first."""
    text = given.strip()
    if text.startswith("["):
        try:
            paths = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f'the broker {given!r:.200} is not a JSON list ({error}); give ["first/root", "second/root"]') from None
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise InvalidRequest(f'the broker {given!r:.200} is not a list of paths; give ["first/root", "second/root"]')
    else:
        paths = [text]
    return tuple(_path(path) for path in paths)


def _path(given: str) -> str:
    if not given:
        raise InvalidRequest("the broker is empty; give the path of its directory")
    if given == MEMORY:
        raise InvalidRequest(f"{MEMORY!r} ends with its process, and Spark's tasks are others; give a directory")
    path = given.removeprefix(FILE)
    if "://" in path:
        scheme = path.partition("://")[0]
        raise InvalidRequest(f"{given!r:.200} cannot be read or written by Spark; this version knows directories, not {scheme}://")
    return os.path.abspath(os.path.expanduser(path))
