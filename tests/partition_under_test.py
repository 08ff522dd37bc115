"""A partition under test: on a log of any backend, with a manual clock and short methods for all commands.

Owns: `PartitionBackend` (stores the log of a partition), `PARTITION_BACKENDS` (the backends that tests run on) and
`PartitionUnderTest`. A new backend is a subclass of `PartitionBackend` and a line in `PARTITION_BACKENDS`.
Every method that runs a command commits it before it returns. Times are seconds here, microseconds everywhere else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.log import Durability, Frame, Log
from penstock.logs.memory import MemoryLog
from penstock.loop.partition import Partition
from penstock.loop.recovery import replay
from penstock.rules import base, routing
from penstock.rules.calls import CallName
from penstock.rules.commands import (
    AcquireLease,
    AddFences,
    BuryLeased,
    CancelWaiting,
    Clear,
    CompleteLeased,
    CompleteUnleased,
    Configure,
    ConfirmTransfer,
    Drop,
    ExtendLease,
    FollowUpBatch,
    ForgetCursor,
    ItemCount,
    ItemOutcome,
    ItemOutcomes,
    LeaseAnswer,
    LiftFence,
    NarrowFence,
    Pause,
    Produce,
    PutCursor,
    Redrive,
    ReleaseParkedKey,
    RescheduleWaiting,
    Restore,
    RetryLeased,
    Seek,
    Send,
    SetProgress,
    Settled,
    SkipWaiting,
    Stored,
    StraysFound,
)
from penstock.rules.fences import MovedSlots, pack_slots
from penstock.rules.item_states import ItemState
from penstock.rules.lanes import Rank
from penstock.rules.outbox import pack_destination
from penstock.rules.records import FenceSpec
from penstock.rules.restore import LEAST_FIRST_LEASE
from penstock.rules.runs import offsets, pairs
from penstock.rules.state import Counts
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch, validate
from penstock.words.clock import SECOND
from simulation.partition.checks import check_replay

INCARNATION, PARTITION = 0x0123_4567_89AB_CDEF, 7
ELSEWHERE = pack_destination(0xDEAD, 3)
"""The partition to which items are sent by default."""
MOST_TURNS = 1_000
"""More turns than any test needs; more count as an endless loop."""


class PartitionBackend(ABC):
    """Stores the log of one partition, beyond the life of a log object."""

    @abstractmethod
    def open(self) -> Log:
        """Open the log, created if missing; the caller recovers it."""

    @abstractmethod
    def kill(self, log: Log) -> None:
        """End the log's owner as by a kill: nothing more is written."""


class MemoryPartitionBackend(PartitionBackend):
    """A list of frames that all log objects share."""

    def __init__(self) -> None:
        self._kept: list[Frame] = []

    def open(self) -> Log:
        return MemoryLog(INCARNATION, PARTITION, self._kept)

    def kill(self, log: Log) -> None:
        log.close()


class FilePartitionBackend(PartitionBackend):
    """A directory on the real disk. Durability "os" is enough: these tests kill processes but cut no power."""

    def __init__(self, path: Path, durability: Durability = "os") -> None:
        self._path = path / "log"
        self._path.mkdir(exist_ok=True)
        self._durability = durability

    def open(self) -> Log:
        return FileLog(SystemFiles(), str(self._path), INCARNATION, PARTITION, durability=self._durability)

    def kill(self, log: Log) -> None:
        cast(FileLog, log).close_without_sync()


PARTITION_BACKENDS: dict[str, Callable[[Path], PartitionBackend]] = {
    "memory": lambda path: MemoryPartitionBackend(),
    "files": FilePartitionBackend,
}


def items(
    payloads: Iterable[str | bytes],
    *,
    key: str | None = None,
    keys: Sequence[str | None] | None = None,
    priority: int | None = None,
    priorities: Sequence[int] | None = None,
    at: int = 0,
    ttl: float = 0,
    dedups: Sequence[str | None] | None = None,
) -> Batch:
    """A batch of these payloads. `key`, `priority`, `at` (wall microseconds) and `ttl` apply to every item."""
    bodies = [payload.encode() if isinstance(payload, str) else payload for payload in payloads]
    count = len(bodies)
    named = [key] * count if key is not None else keys
    raw = None if named is None else [None if name is None else name.encode() for name in named]
    urgency = [priority] * count if priority is not None else priorities
    batch = Batch(
        bodies,
        raw,
        None if raw is None else routing.key_ids(raw),
        priorities=None if urgency is None else bytes(urgency),
        ats=[at] * count if at else None,
        ttls=[int(ttl * SECOND)] * count if ttl else None,
        dedups=None if dedups is None else [None if name is None else routing.digest(name.encode()) for name in dedups],
    )
    return validate(batch)


class PartitionUnderTest:
    """A partition and short methods for all commands."""

    def __init__(self, backend: PartitionBackend) -> None:
        self.backend = backend
        self.clock = MicrosecondClock()
        self.wrapped = Partition(backend.open(), self.clock)

    # -- producers and consumers -----------------------------------------------------------------------

    def produce(self, *payloads: str | bytes, **options: Any) -> list[int]:
        """Produce items with the options of `items`; returns their offsets."""
        return list(self.store(items(payloads, **options)).offsets)

    def session_produce(self, *payloads: str, session: bytes = bytes(16), number: int = 1) -> Stored:
        """Produce in a call of a client's session."""
        return cast(Stored, self._turn(Produce(items(payloads), (CallName(session, number),))))

    def store(self, batch: Batch, request: str | None = None, source: bytes | None = None, sequence: int = 0) -> Stored:
        return cast(Stored, self._turn(Produce(batch, _named(request), source, sequence)))

    def lease(
        self,
        want: int = 100,
        consumer: str = "",
        *,
        timeout: float = 0,
        per_key: int = 1,
        request: str | None = None,
        departed: Mapping[int, int] | None = None,
        awaited: Sequence[str] = (),
        until: Rank | None = None,
    ) -> LeaseAnswer:
        answer = self._turn(
            AcquireLease(want, consumer, int(timeout * SECOND), per_key, _named(request), slots_departed(departed, awaited), until)
        )
        assert isinstance(answer, LeaseAnswer), f"{answer} is no lease"
        return answer

    def lease_strays(self, departed: Mapping[int, int], want: int = 100) -> list[int]:
        """Ask for a lease of which strays are expected; returns the offsets of the strays."""
        answer = self._turn(AcquireLease(want, moved_slots=slots_departed(departed)))
        return answer.offsets if isinstance(answer, StraysFound) else []

    def complete(
        self, lease: int, which: Sequence[int] | None = None, request: str | None = None, *, then: Sequence[FollowUpBatch] = ()
    ) -> Settled:
        return cast(Settled, self._turn(CompleteLeased(lease, which, _named(request), then)))

    def retry(
        self,
        lease: int,
        which: Sequence[int] | None = None,
        *,
        delay: float = 0,
        reason: str = "",
        counted: bool = True,
        request: str | None = None,
    ) -> Settled:
        return cast(Settled, self._turn(RetryLeased(lease, which, int(delay * SECOND), reason, counted, _named(request))))

    def bury(
        self, lease: int, which: Sequence[int] | None = None, reason: str = "", request: str | None = None, alone: bool = False
    ) -> Settled:
        return cast(Settled, self._turn(BuryLeased(lease, which, reason, _named(request), alone)))

    def extend(self, lease: int, timeout: float = 0, request: str | None = None) -> Settled:
        return cast(Settled, self._turn(ExtendLease(lease, int(timeout * SECOND), _named(request))))

    def note(self, lease: int, offset: int, text: str) -> None:
        self._turn(SetProgress(lease, offset, text))

    def consume(self, *which: int, consumer: str = "stream", lapsed: bool = False) -> int:
        return cast(ItemCount, self._turn(CompleteUnleased(which, consumer, lapsed))).items

    def lease_texts(self, want: int = 100, **options: Any) -> list[str]:
        """Lease items; returns their payloads."""
        return self.texts(self.lease(want, **options))

    def drain(self, want: int = 1) -> list[str]:
        """Lease `want` items at a time and complete them until none is left; returns the payloads in that order."""
        served: list[str] = []
        for _ in range(MOST_TURNS):
            granted = self.lease(want)
            if not granted.lease:
                return served
            served += self.texts(granted)
            self.complete(granted.lease)
        raise AssertionError(f"{MOST_TURNS} leases, and items are still left")

    # -- administrative commands -----------------------------------------------------------------------

    def configure(self, **options: Any) -> int:
        """Change options of the policy (durations in microseconds); returns how many items that buried."""
        return self._count(Configure(msgspec.structs.replace(self.wrapped.state.policy, **options)))

    def pause(self, *, lease: bool | None = None, produce: bool | None = None) -> None:
        self._turn(Pause(lease, produce))

    def clear(self, **states: bool) -> int:
        return self._count(Clear(**states))

    def seek(self, offset: int) -> int:
        return self._count(Seek(offset))

    def skip(self, offset: int) -> int:
        return self._count(SkipWaiting(offset))

    def redrive(self, *which: int) -> int:
        return self._count(Redrive(which or None))

    def cancel(self, *which: int) -> list[ItemOutcome]:
        return self._outcomes(CancelWaiting(which))

    def reschedule(self, *which: int, at: int = 0, delay: float = 0) -> list[ItemOutcome]:
        return self._outcomes(RescheduleWaiting(which, at, int(delay * SECOND)))

    def restore(self, first_lease: int = LEAST_FIRST_LEASE + 7) -> int:
        """Act as if the partition had been restored from a backup now; returns how many items were leased."""
        return self._count(Restore(self.clock.read().wall, first_lease))

    def drop(self, start: int, stop: int) -> int:
        return self._count(Drop([start, stop]))

    def move_cursor(self, name: str, offset: int) -> None:
        self._turn(PutCursor(name, offset))

    def release_cursor(self, name: str) -> None:
        self._turn(ForgetCursor(name))

    # -- transfers and fences --------------------------------------------------------------------------

    def send(self, *which: int, to: bytes = ELSEWHERE) -> int:
        return self._count(Send(which, to))

    def confirm(self, sequence: int, base: int = -1, *, to: bytes = ELSEWHERE) -> int:
        return self._count(ConfirmTransfer(to, sequence, base))

    def deliver(self, base: int = -1, *, to: bytes = ELSEWHERE) -> int:
        """Confirm that the first transfer to a destination has arrived."""
        return self.confirm(self.wrapped.state.outbox[to][0].sequence, base, to=to)

    def fence(self, *keys: str, source: int = 3, mark: int = 100, version: int = 0) -> int:
        """Add a fence for the slots of these keys, moved here from `source`; returns its number."""
        spec = FenceSpec(0, source, mark, 0, pack_slots({routing.slot(key.encode()) for key in keys}))
        self._turn(AddFences(version or self.wrapped.state.fence_version + 1, [spec]))
        return self.wrapped.state.fences_given

    def narrow(self, fence: int, *keys: str) -> int:
        return self._count(NarrowFence(fence, [key_id(key) for key in keys]))

    def lift(self, fence: int, *keys: str) -> int:
        return self._count(LiftFence(fence, [key_id(key) for key in keys]))

    def release(self, key: str) -> int:
        return self._count(ReleaseParkedKey(key_id(key)))

    # -- time ------------------------------------------------------------------------------------------

    @property
    def wall(self) -> int:
        return self.clock.read().wall

    def after(self, seconds: float) -> int:
        """The wall time `seconds` from now."""
        return self.wall + int(seconds * SECOND)

    def advance(self, seconds: float) -> None:
        """Advance the clock and process everything that is due."""
        self.clock.advance(int(seconds * SECOND))
        self.run_due()

    def run_due(self, limit: int = 2_000) -> int:
        """Process everything that is due, `limit` items at a time; returns the number of calls."""
        for calls in range(MOST_TURNS):
            if not self.wrapped.due(limit):
                return calls
            self.wrapped.commit()
        raise AssertionError(f"{MOST_TURNS} calls, and items are still due")

    # -- closing and opening ---------------------------------------------------------------------------

    def open(self) -> None:
        """Open the partition again after a close or kill."""
        self.wrapped = Partition(self.backend.open(), self.clock)

    def restart(self) -> None:
        """Close and open again."""
        self.wrapped.close()
        self.open()

    def kill(self) -> None:
        """End the owner as by a kill, and open again."""
        self.backend.kill(self.wrapped.log)
        self.open()

    def check(self) -> None:
        """Check the invariants and end the owner: counts are right, replaying the log and reading a Base give exactly
        this state, and every record changed items as the table of transitions allows."""
        assert list(self.counts) == self.recount()
        dumped = base.dump(self.wrapped.state)
        assert base.dump(base.load(dumped)) == dumped
        if not self.wrapped.gaps:
            check_replay(self.wrapped)
        self.backend.kill(self.wrapped.log)
        log = self.backend.open()
        assert base.dump(replay(log)[0]) == dumped
        self.backend.kill(log)

    # -- queries ---------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        return self.wrapped.state.counts

    def recount(self) -> list[int]:
        """The counts, from the state of every item."""
        state = self.wrapped.state
        given = [offset for start, stop in pairs(state.holes.missing(0, state.next_offset)) for offset in range(start, stop)]
        states = [self.state_of(offset) for offset in given]
        return [states.count(ItemState(name)) for name in Counts._fields]

    def state_of(self, offset: int) -> ItemState | None:
        return self.wrapped.state.state_of(offset)

    def texts(self, granted: LeaseAnswer) -> list[str]:
        return [payload.decode() for payload in self.wrapped.payloads(granted.runs)]

    def why(self, offset: int) -> str:
        return self.wrapped.explain(offset).why

    def _turn(self, command: Any) -> Any:
        answer = self.wrapped.run(command)
        self.wrapped.commit()
        return answer

    def _outcomes(self, command: CancelWaiting | RescheduleWaiting) -> list[ItemOutcome]:
        answer = self._turn(command)
        assert isinstance(answer, ItemOutcomes)
        return answer.outcomes

    def _count(self, command: Any) -> int:
        return cast(ItemCount, self._turn(command)).items


def _named(request: str | None) -> tuple[CallName, ...]:
    return () if request is None else (CallName(routing.digest(request.encode()), 1, b"content"),)


def key_id(key: str) -> int:
    return routing.key_id(key.encode())


def slot(key: str) -> int:
    return routing.slot(key.encode())


def granted_offsets(granted: LeaseAnswer) -> list[int]:
    """Every offset of a lease, as granted."""
    return offsets(granted.runs)


def slots_departed(marks: Mapping[int, int] | None, awaited: Sequence[str] = ()) -> MovedSlots | None:
    """Slots that moved to another partition, each from its mark on. Keys in `awaited` wait there for their lines
    here."""
    if not marks:
        return None
    owners = bytearray(routing.SLOTS)
    for slot in marks:
        owners[slot] = 1
    return MovedSlots(owners, 0, marks, (), {key_id(key) for key in awaited})
