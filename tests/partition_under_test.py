"""One partition under test: a log of any backend, a clock under control, and short verbs.

Owns: `Home` (a place that outlives a log; one subclass a backend), `HOMES` (every backend the rules are tested on) and `PartitionUnderTest`.
A backend joins by a subclass of `Home` and a line in `HOMES`.
Every verb is a turn of its own: it is committed before it returns. Times are seconds here, and microseconds everywhere else.
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
from penstock.rules.commands import (
    AcquireLease,
    AddFences,
    BuryLeased,
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
    LeaseAnswer,
    LiftFence,
    NarrowFence,
    Pause,
    Produce,
    PutCursor,
    Redrive,
    ReleaseParkedKey,
    RetryLeased,
    Seek,
    Send,
    SetProgress,
    Settled,
    Stored,
    StraysFound,
)
from penstock.rules.fences import MovedSlots, pack_slots
from penstock.rules.item_states import ItemState
from penstock.rules.lanes import Rank
from penstock.rules.outbox import pack_destination
from penstock.rules.records import FenceSpec
from penstock.rules.runs import offsets
from penstock.rules.state import Counts
from penstock.testing import ManualClock
from penstock.words.batch import Batch, validate
from penstock.words.clock import SECOND
from simulation.partition.checks import check_replay

INCARNATION, PARTITION = 0x0123_4567_89AB_CDEF, 7
ELSEWHERE = pack_destination(0xDEAD, 3)
"""Another partition, where items are sent unless a test says otherwise."""
MOST_TURNS = 1_000
"""More than any test here needs: whoever goes on has met a bug."""


class PartitionBackend(ABC):
    """Where a backend keeps the log of one partition."""

    @abstractmethod
    def open(self) -> Log:
        """Open the log, made when missing; the caller recovers."""

    @abstractmethod
    def kill(self, log: Log) -> None:
        """End the log's owner without a word: nothing more is written."""


class MemoryPartitionBackend(PartitionBackend):
    """A list, handed from one owner to the next."""

    def __init__(self) -> None:
        self._kept: list[Frame] = []

    def open(self) -> Log:
        return MemoryLog(INCARNATION, PARTITION, self._kept)

    def kill(self, log: Log) -> None:
        log.close()


class FilePartitionBackend(PartitionBackend):
    """A directory on the real disk. Power cuts are the simulation's; here processes are killed at most: nothing need wait for the disk."""

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
    """A batch from plain words. `key`, `priority`, `at` (wall microseconds) and `ttl` hold for every item."""
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
    """A partition and the means to work it."""

    def __init__(self, home: PartitionBackend) -> None:
        self.home = home
        self.clock = ManualClock()
        self.wrapped = Partition(home.open(), self.clock)

    # -- a consumer's and a producer's verbs -----------------------------------------------------------

    def produce(self, *payloads: str | bytes, **options: Any) -> list[int]:
        """Store items with the options of `items`; their offsets."""
        return list(self.store(items(payloads, **options)).offsets)

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
        """Lease, and give what is answered to be astray instead."""
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
        """Lease, and give the payloads."""
        return self.texts(self.lease(want, **options))

    def drain(self, want: int = 1) -> list[str]:
        """Lease `want` at a time and complete, until there is nothing: the order in which items are served."""
        served: list[str] = []
        for _ in range(MOST_TURNS):
            granted = self.lease(want)
            if not granted.lease:
                return served
            served += self.texts(granted)
            self.complete(granted.lease)
        raise AssertionError(f"{MOST_TURNS} leases and there is still something to serve")

    # -- an operator's verbs ---------------------------------------------------------------------------

    def configure(self, **options: Any) -> int:
        """Change options of the policy (durations in microseconds, as there); how many items that buried."""
        return self._count(Configure(msgspec.structs.replace(self.wrapped.state.policy, **options)))

    def pause(self, *, lease: bool | None = None, produce: bool | None = None) -> None:
        self._turn(Pause(lease, produce))

    def clear(self, **states: bool) -> int:
        return self._count(Clear(**states))

    def seek(self, offset: int) -> int:
        return self._count(Seek(offset))

    def redrive(self, *which: int) -> int:
        return self._count(Redrive(which or None))

    def drop(self, start: int, stop: int) -> int:
        return self._count(Drop([start, stop]))

    def move_cursor(self, name: str, offset: int) -> None:
        self._turn(PutCursor(name, offset))

    def release_cursor(self, name: str) -> None:
        self._turn(ForgetCursor(name))

    # -- a queue's verbs: transfers and fences -----------------------------------------------------------

    def send(self, *which: int, to: bytes = ELSEWHERE) -> int:
        return self._count(Send(which, to))

    def confirm(self, sequence: int, base: int = -1, *, to: bytes = ELSEWHERE) -> int:
        return self._count(ConfirmTransfer(to, sequence, base))

    def deliver(self, base: int = -1, *, to: bytes = ELSEWHERE) -> int:
        """Say that the first transfer for a destination arrived there."""
        return self.confirm(self.wrapped.state.outbox[to][0].sequence, base, to=to)

    def fence(self, *keys: str, source: int = 3, mark: int = 100, version: int = 0) -> int:
        """The slots of these keys came here from `source`; gives the number of their fence."""
        barrier = FenceSpec(0, source, mark, 0, pack_slots({routing.slot(key.encode()) for key in keys}))
        self._turn(AddFences(version or self.wrapped.state.fence_version + 1, [barrier]))
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
        """The wall time so many seconds from now."""
        return self.wall + int(seconds * SECOND)

    def advance(self, seconds: float) -> None:
        """Let time pass and do what came due."""
        self.clock.advance(int(seconds * SECOND))
        self.run_due()

    def run_due(self, limit: int = 2_000) -> int:
        """Do everything that is due; in how many goes of `limit` items."""
        for goes in range(MOST_TURNS):
            if not self.wrapped.due(limit):
                return goes
            self.wrapped.commit()
        raise AssertionError(f"{MOST_TURNS} goes and there is still something due")

    # -- the end, and after ----------------------------------------------------------------------------

    def open(self) -> None:
        """Open again what was closed or killed."""
        self.wrapped = Partition(self.home.open(), self.clock)

    def restart(self) -> None:
        """Close, and open again."""
        self.wrapped.close()
        self.open()

    def kill(self) -> None:
        """End the owner without a word, and open again."""
        self.home.kill(self.wrapped.log)
        self.open()

    def check(self) -> None:
        """What must hold whatever happened: counts are true, log and Base both tell the state, to the byte, and every record moved items
        along the table of their life."""
        assert list(self.counts) == self.recount()
        dumped = base.dump(self.wrapped.state)
        assert base.dump(base.load(dumped)) == dumped
        if not self.wrapped.gaps:
            check_replay(self.wrapped)
        self.home.kill(self.wrapped.log)
        log = self.home.open()
        assert base.dump(replay(log)[0]) == dumped
        self.home.kill(log)

    # -- looking ---------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        return self.wrapped.state.counts

    def recount(self) -> list[int]:
        """The counts, item by item."""
        lives = [self.state_of(offset) for offset in range(self.wrapped.state.next_offset)]
        return [
            lives.count(life)
            for life in (ItemState.READY, ItemState.SCHEDULED, ItemState.LEASED, ItemState.COMPLETED, ItemState.BURIED, ItemState.MOVING)
        ]

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

    def _count(self, command: Any) -> int:
        return cast(ItemCount, self._turn(command)).items


def _named(request: str | None) -> bytes | None:
    return None if request is None else routing.digest(request.encode())


def key_id(key: str) -> int:
    return routing.key_id(key.encode())


def slot(key: str) -> int:
    return routing.slot(key.encode())


def granted_offsets(granted: LeaseAnswer) -> list[int]:
    """Every offset of a lease, in order."""
    return offsets(granted.runs)


def slots_departed(marks: Mapping[int, int] | None, awaited: Sequence[str] = ()) -> MovedSlots | None:
    """These slots live elsewhere, each from its mark on; all others here. Elsewhere, what is `awaited` waits for its keys' lines here."""
    if not marks:
        return None
    owners = bytearray(routing.SLOTS)
    for slot in marks:
        owners[slot] = 1
    return MovedSlots(owners, 0, marks, (), {key_id(key) for key in awaited})
