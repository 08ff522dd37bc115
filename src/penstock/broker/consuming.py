"""A consumer outside of the owner's process, which reads what it is granted by itself: a Spark stream (ADR 15).

Owns: `Consuming`: the owner's side. The stream has the queue's consumer right for as long as it says so. It asks for grants, one after
the other; a grant is a set of leases under its name, noted beside the answers, where it is read by its number. Whoever asks for the
next one has committed all before it: those are completed first.
    take      complete what is committed, then grant more
    renew     the stream lives: its right and its leases go on
    settle    items of its grants failed: they are retried or buried when the others are completed
    let_go    it is done; the right is everybody's again
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec

from penstock.logs.files.drops import Drops
from penstock.loop.requests import Lease, Part, Request, Settle
from penstock.rules.catalog import Entry
from penstock.rules.commands import Settled
from penstock.rules.removal import parks
from penstock.rules.routing import digest
from penstock.rules.runs import RunSet, from_offsets, offsets, pairs
from penstock.rules.settle import cut_reason
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_DELAY, lease_timeout_within, within

MAX_GRANT = 10_000_000
HOLDER = "spark:"


Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
"""Of a stream."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Items: TypeAlias = Mapping[Count, Sequence[Count]]
"""partition → offsets"""
RUNS = 16
"""Of a stream so many runs are known apart."""


class Failed(msgspec.Struct):
    """What is to become of some items of a grant."""

    action: Literal["retry", "bury"]
    delay: int
    reason: str
    items: dict[int, list[int]]
    """partition → runs"""


class Grant(msgspec.Struct):
    """What a stream was given at one time."""

    leases: list[tuple[int, int, list[int]]]
    """(partition, lease, runs)"""
    failed: list[Failed] = []
    completed: bool = False
    """Those that did not fail are."""

    @property
    def items(self) -> int:
        return sum(RunSet(runs).total for _, _, runs in self.leases)


class Taken(msgspec.Struct):
    """The newest grant, which may be the one before when there is nothing, and how many items are in it."""

    grant: int
    items: int
    ready: int
    """Items that are ready and not granted."""


class Host(Protocol):
    """What a broker is to those who consume from outside."""

    clock: Clock

    def entry(self, incarnation: int) -> Entry: ...
    def hold(self, incarnation: int, holder: str, timeout: int) -> None: ...
    def call(self, incarnation: int, request: Request) -> object: ...
    def ask(self, incarnation: int, verb: str, **args: object) -> object: ...


class Consuming:
    """Streams that consume queues of this broker."""

    def __init__(self, drops: Drops, host: Host) -> None:
        self._drops = drops
        self._host = host
        self._runs: dict[tuple[int, str], list[str]] = {}
        """Of each stream the runs that were heard of, the newest last: an old process may end after its successor has begun."""

    def take(self, incarnation: int, stream: Name, done: Count, want: int, per_key: int, timeout: int, run: str = "") -> Taken:
        """Grants up to `done` are committed; give another of up to `want` items (0: none)."""
        self._hear(incarnation, stream, run)
        within("want", want, 0, MAX_GRANT)
        within("per_key", per_key, 1, MAX_BATCH_ITEMS)
        self._host.hold(incarnation, HOLDER + stream, lease_timeout_within(timeout, "timeout"))
        grant: Grant | None = None
        newest = done + 1
        for number in self._numbers(incarnation, stream):
            if number <= done:
                self._finish(incarnation, stream, number)
            else:
                newest, grant = number, self._unread(incarnation, stream, number, timeout)
        if grant is None and want:
            grant = self._lease(incarnation, stream, done + 1, want, per_key, timeout)
            newest = done + 1
            if grant.leases:
                self._host.ask(incarnation, "publish")  # who reads beside the queue must find them
                self._save(incarnation, stream, newest, grant)
        items = grant.items if grant is not None else 0
        return Taken(newest if items else done, items, getattr(self._host.ask(incarnation, "stats"), "ready", 0))

    def renew(self, incarnation: int, stream: Name, timeout: int, run: str = "", again: Count | None = None) -> None:
        """The stream is at work. With `again` what comes after this grant is handled anew: what was said of it before counts no more."""
        self._hear(incarnation, stream, run)
        self._host.hold(incarnation, HOLDER + stream, lease_timeout_within(timeout, "timeout"))
        leases = [lease for _, grant in self._grants(incarnation, stream) for lease in grant.leases]
        self._settle(incarnation, Settle("extend", [Part(partition, lease) for partition, lease, _ in leases], timeout=timeout))
        if again is not None:
            for number, grant in self._grants(incarnation, stream):
                if number > again and grant.failed and not grant.completed:
                    grant.failed = []
                    self._save(incarnation, stream, number, grant)

    def let_go(self, incarnation: int, stream: Name, run: str = "") -> None:
        """The stream is done, unless another run of it has begun; what it had not committed comes back when its leases end."""
        newest = self._runs.get((incarnation, stream), [run])[-1]
        if self._host.entry(incarnation).holder == HOLDER + stream and run == newest:
            self._host.hold(incarnation, "", 0)
            self._runs.pop((incarnation, stream), None)

    def settle(
        self,
        incarnation: int,
        action: Literal["retry", "bury"],
        items: Items,
        delay: int = 0,
        reason: str = "",
        others: Sequence[tuple[str, Items]] = (),
    ) -> tuple[int, int]:
        """Items that were granted and are not completed yet failed; says how many, and how many of these items it did not find.

        `others` are more of them, each lot with a reason of its own; of an item the last word counts.
        """
        within("delay", delay, 0, MAX_DELAY)
        lots: list[tuple[str, dict[int, RunSet]]] = []
        wanted: dict[int, RunSet] = {}
        for why, chosen in reversed([(reason, items), *others]):
            lot = {partition: RunSet(from_offsets(sorted(set(each)))) for partition, each in chosen.items()}
            for partition, mine in lot.items():
                known = wanted.setdefault(partition, RunSet())
                mine.remove_all(known.runs)
                known.add_all(mine.runs)
            lots.append((cut_reason(why), lot))
        found = {partition: RunSet() for partition in wanted}
        for stream in self._streams(incarnation):
            for number, grant in self._grants(incarnation, stream):
                common = _common(grant, wanted)
                if not common:
                    continue
                for partition, runs in common.items():
                    found[partition].add_all(runs)
                for former in grant.failed:
                    left = {partition: RunSet(runs).without(common.get(partition, ())) for partition, runs in former.items.items()}
                    former.items = {partition: runs for partition, runs in left.items() if runs}
                grant.failed += [Failed(action, delay, why, _common(grant, lot)) for why, lot in reversed(lots)]
                grant.failed = [failed for failed in grant.failed if failed.items]
                self._save(incarnation, stream, number, grant)
        done = sum(each.total for each in found.values())
        return done, sum(each.total for each in wanted.values()) - done

    # -- steps ---------------------------------------------------------------------------------------

    def _lease(self, incarnation: int, stream: str, number: int, want: int, per_key: int, timeout: int) -> Grant:
        """Leases, until there is enough or nothing more. Each has a request id: cut off and asked again, the same are given."""
        grant = Grant([])
        left, round_, ended = want, 1, 0
        while left:
            name = digest(b"grant", stream.encode(), *(part.to_bytes(8, "big") for part in (number, round_, ended)))
            asked = Lease(min(left, MAX_BATCH_ITEMS), HOLDER + stream, timeout, min(per_key, MAX_BATCH_ITEMS), name, self._now(), bare=True)
            try:
                handed = self._host.call(incarnation, asked)
            except LeaseLost:  # cut off before, and away for so long that the items are everybody's again
                ended += 1
                continue
            assert isinstance(handed, list)
            if not handed:
                return grant
            for one in handed:
                grant.leases.append((one.partition, one.granted.lease, one.granted.runs))
                left = max(0, left - one.granted.count)
            round_ += 1
        return grant

    def _unread(self, incarnation: int, stream: str, number: int, timeout: int) -> Grant | None:
        """A grant whose answer did not reach the stream: it is given again, but for items whose leases have ended, which may be others'."""
        grant = self._grant(incarnation, stream, number)
        parts = [Part(partition, lease) for partition, lease, _ in grant.leases]
        answers = self._settle(incarnation, Settle("extend", parts, timeout=timeout))
        live = [lease for lease, answer in zip(grant.leases, answers, strict=True) if answer is not None]
        if not live:
            self._drops.forget(incarnation, grant_name(stream, number))
            return None
        if len(live) < len(grant.leases):
            grant.leases = live
            self._save(incarnation, stream, number, grant)
        return grant

    def _finish(self, incarnation: int, stream: str, number: int) -> None:
        """A grant is committed: what failed goes back or is buried, all else is done.

        In a key's line whatever stands behind a retried one comes back with it; behind one that is buried only if that parks its key.
        """
        grant = self._grant(incarnation, stream, number)
        park = parks(self._host.entry(incarnation).options.policy)
        later = [failed for failed in grant.failed if park or failed.action == "retry"]
        for failed in [] if park else grant.failed:
            if failed.action == "bury":
                self._fail(incarnation, grant, failed)
        if not grant.completed:
            self._complete(incarnation, stream, grant)
        if later:
            grant.completed = True  # noted first: what comes back with a failed one must not be taken for what a lease ended on
            self._save(incarnation, stream, number, grant)
        for failed in later:
            self._fail(incarnation, grant, failed)
        self._drops.forget(incarnation, grant_name(stream, number))

    def _fail(self, incarnation: int, grant: Grant, failed: Failed) -> None:
        parts = [*_parts(grant, failed.items)]
        self._settle(incarnation, Settle(failed.action, parts, delay=failed.delay, reason=failed.reason, alone=True))

    def _complete(self, incarnation: int, stream: str, grant: Grant) -> None:
        """What did not fail is done: by its lease, or, where that has ended meanwhile, by right, if nobody has taken it since."""
        parts = [part for part in _whole(grant) if part.offsets != []]
        lapsed: dict[int, list[int]] = {}
        for part, answer in zip(parts, self._settle(incarnation, Settle("complete", parts)), strict=True):
            if answer is None:
                runs = next(runs for partition, lease, runs in grant.leases if (partition, lease) == part[:2])
                lapsed.setdefault(part.partition, []).extend(offsets(runs) if part.offsets is None else part.offsets)
            elif answer.refused:
                lapsed.setdefault(part.partition, []).extend(answer.refused)
        if lapsed:
            self._host.ask(incarnation, "consume", partition_offsets=lapsed, consumer=HOLDER + stream, lapsed=True)

    def _hear(self, incarnation: int, stream: str, run: str) -> None:
        known = self._runs.setdefault((incarnation, stream), [])
        if run not in known:
            known.append(run)
            del known[:-RUNS]

    def _settle(self, incarnation: int, request: Settle) -> list[Settled | None]:
        """The answer for each part, None where the lease has ended; anything else is raised."""
        answers = self._host.call(incarnation, request) if request.parts else []
        assert isinstance(answers, list)
        for answer in answers:
            if isinstance(answer, PenstockError) and not isinstance(answer, LeaseLost):
                raise answer
        return [None if isinstance(answer, LeaseLost) else answer for answer in answers]

    def _now(self) -> int:
        return self._host.clock.read().elapsed

    # -- grants --------------------------------------------------------------------------------------

    def _streams(self, incarnation: int) -> list[str]:
        names = self._drops.said(incarnation, "grant.")
        return sorted({name.removeprefix("grant.").rpartition(".")[0] for name in names})

    def _numbers(self, incarnation: int, stream: str) -> list[int]:
        prefix = grant_name(stream, 0).rpartition(".")[0] + "."
        return sorted(int(name.removeprefix(prefix)) for name in self._drops.said(incarnation, prefix))

    def _grants(self, incarnation: int, stream: str) -> Iterator[tuple[int, Grant]]:
        return ((number, self._grant(incarnation, stream, number)) for number in self._numbers(incarnation, stream))

    def _grant(self, incarnation: int, stream: str, number: int) -> Grant:
        return read_grant(self._drops, incarnation, stream, number)

    def _save(self, incarnation: int, stream: str, number: int, grant: Grant) -> None:
        self._drops.say(incarnation, grant_name(stream, number), msgspec.msgpack.encode(grant))


def grant_name(stream: str, number: int) -> str:
    """Where a grant is noted, among the answers."""
    return f"grant.{stream}.{number:012d}"


def read_grant(drops: Drops, incarnation: int, stream: str, number: int) -> Grant:
    """A grant by its number, for the owner and for who was granted it."""
    raw = drops.answer(incarnation, grant_name(stream, number))
    if raw is None:
        raise InvalidRequest(f"grant {number} of the stream {stream} is not there (any more); start the stream with a new checkpoint")
    return msgspec.msgpack.decode(raw, type=Grant)


def _whole(grant: Grant) -> list[Part]:
    """Every lease of a grant, without the items of it that failed."""
    failed: dict[int, RunSet] = {}
    for one in grant.failed:
        for partition, runs in one.items.items():
            failed.setdefault(partition, RunSet()).add_all(runs)
    parts = []
    for partition, lease, runs in grant.leases:
        left = RunSet(runs)
        total = left.total
        left.remove_all(failed[partition].runs if partition in failed else ())
        parts.append(Part(partition, lease, None if left.total == total else offsets(left.runs)))
    return parts


def _parts(grant: Grant, items: Mapping[int, list[int]]) -> Iterator[Part]:
    """These items by the leases that a grant holds them under."""
    for partition, lease, runs in grant.leases:
        found = _both(runs, RunSet(items.get(partition, ())))
        if found:
            yield Part(partition, lease, offsets(found))


def _common(grant: Grant, wanted: Mapping[int, RunSet]) -> dict[int, list[int]]:
    """Which of the items wanted are in a grant."""
    found: dict[int, list[int]] = {}
    for partition, _, runs in grant.leases:
        if partition in wanted and (common := _both(runs, wanted[partition])):
            found[partition] = RunSet([*found.get(partition, ()), *common]).runs
    return found


def _both(runs: list[int], others: RunSet) -> list[int]:
    return [edge for start, stop in pairs(runs) for edge in others.within(start, stop)]
