"""A consumer outside of the owner's process, which reads what it is granted by itself: a Spark stream (ADR 15).

Owns: `Consuming`: the owner's side. The stream has the queue's consumer right for as long as it says so. It asks for grants, one after
the other; a grant is a set of leases under its name, noted beside the answers, where it is read by its number. Whoever asks for the
next one has committed all before it: those are completed first.
    take      complete what is committed, then grant more
    renew     the stream lives: its right and its leases go on
    settle    items of its grants failed: retry or bury them
    let_go    it is done; the right is everybody's again
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from penstock.logs.drops import Drops
from penstock.loop.requests import Lease, Part, Request, Settle, Verb
from penstock.rules.catalog import Entry
from penstock.rules.routing import digest
from penstock.rules.runs import RunSet, from_offsets, offsets
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_LEASE_TIMEOUT, MIN_LEASE_TIMEOUT, within

MAX_GRANT = 10_000_000
HOLDER = "spark:"


class Grant(msgspec.Struct):
    """What a stream was given at one time."""

    leases: list[tuple[int, int, list[int]]]
    """(partition, lease, runs)"""
    settled: dict[int, list[int]] = {}
    """partition → runs of items that are not to be completed with the rest."""

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

    def take(self, incarnation: int, stream: str, done: int, want: int, per_key: int, timeout: int) -> Taken:
        """Grants up to `done` are committed; give another of up to `want` items (0: none)."""
        within("want", want, 0, MAX_GRANT)
        within("per_key", per_key, 1, MAX_BATCH_ITEMS)
        self._host.hold(incarnation, HOLDER + stream, within("timeout", timeout, MIN_LEASE_TIMEOUT, MAX_LEASE_TIMEOUT))
        newest = done
        for number in self._numbers(incarnation, stream):
            if number <= done:
                self._complete(incarnation, stream, self._grant(incarnation, stream, number))
                self._drops.forget(incarnation, grant_name(stream, number))
            newest = max(newest, number)
        if newest == done and want:
            grant = self._lease(incarnation, stream, done + 1, want, per_key, timeout)
            if grant.leases:
                self._host.ask(incarnation, "publish")  # who reads beside the queue must find them
                self._save(incarnation, stream, done + 1, grant)
                newest = done + 1
        items = self._grant(incarnation, stream, newest).items if newest > done else 0
        return Taken(newest, items, getattr(self._host.ask(incarnation, "stats"), "ready", 0))

    def renew(self, incarnation: int, stream: str, timeout: int) -> None:
        """The stream is at work."""
        self._host.hold(incarnation, HOLDER + stream, timeout)
        parts = [part for _, grant in self._grants(incarnation, stream) for part in _parts(grant)]
        if parts:
            self._host.call(incarnation, Settle("extend", parts, timeout=timeout))

    def let_go(self, incarnation: int, stream: str) -> None:
        """The stream is done; what it had not committed comes back when its leases end."""
        if self._host.entry(incarnation).holder == HOLDER + stream:
            self._host.hold(incarnation, "", 0)

    def settle(
        self, incarnation: int, action: Literal["retry", "bury"], items: Mapping[int, Sequence[int]], delay: int = 0, reason: str = ""
    ) -> tuple[int, int]:
        """Retry or bury items that were granted and are not completed yet; says how many that did, and how many it did not find."""
        if action not in ("retry", "bury"):
            raise InvalidRequest(f"there is no way {action!r} to settle; use 'retry' or 'bury'")
        wanted = {partition: RunSet(from_offsets(sorted(chosen))) for partition, chosen in items.items()}
        total = sum(runs.total for runs in wanted.values())
        done = 0
        for stream in self._streams(incarnation):
            for number, grant in self._grants(incarnation, stream):
                parts = [*_within(grant, wanted)]
                if parts:
                    for part in parts:
                        settled = RunSet(grant.settled.get(part.partition, []))
                        settled.add_all(from_offsets(part.offsets or ()))
                        grant.settled[part.partition] = settled.runs
                    self._save(incarnation, stream, number, grant)  # first: what fails is not completed with the rest
                    done += self._settle(incarnation, action, parts, delay, reason)
        return done, total - done

    # -- steps ---------------------------------------------------------------------------------------

    def _lease(self, incarnation: int, stream: str, number: int, want: int, per_key: int, timeout: int) -> Grant:
        """Leases, until there is enough or nothing more. Each has a request id: cut off and asked again, the same are given."""
        grant = Grant([])
        left, round_ = want, 0
        while left:
            round_ += 1
            name = digest(b"grant", stream.encode(), number.to_bytes(8, "big"), round_.to_bytes(8, "big"))
            asked = Lease(min(left, MAX_BATCH_ITEMS), HOLDER + stream, timeout, min(per_key, MAX_BATCH_ITEMS), name, self._now(), bare=True)
            handed = self._host.call(incarnation, asked)
            assert isinstance(handed, list)
            if not handed:
                return grant
            for one in handed:
                grant.leases.append((one.partition, one.granted.lease, one.granted.runs))
                left = max(0, left - one.granted.count)
        return grant

    def _complete(self, incarnation: int, stream: str, grant: Grant) -> None:
        """What was committed is done: by its lease, or, where that has ended meanwhile, by right, if nobody has taken it since."""
        parts = _parts(grant)
        answers = self._host.call(incarnation, Settle("complete", parts)) if parts else []
        assert isinstance(answers, list)
        lapsed: dict[int, list[int]] = {}
        for (partition, _, runs), answer in zip(grant.leases, answers, strict=True):
            if isinstance(answer, LeaseLost):
                left = RunSet(runs)
                left.remove_all(grant.settled.get(partition, []))
                lapsed.setdefault(partition, []).extend(offsets(left.runs))
            elif isinstance(answer, PenstockError):
                raise answer
        if lapsed:
            self._host.ask(incarnation, "consume", partition_offsets=lapsed, consumer=HOLDER + stream)

    def _settle(self, incarnation: int, action: Verb, parts: Sequence[Part], delay: int, reason: str) -> int:
        answers = self._host.call(incarnation, Settle(action, parts, delay=delay, reason=reason))
        assert isinstance(answers, list)
        for answer in answers:
            if isinstance(answer, PenstockError) and not isinstance(answer, LeaseLost):
                raise answer
        return sum(answer.done for answer in answers if not isinstance(answer, PenstockError))

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


def _parts(grant: Grant) -> list[Part]:
    return [Part(partition, lease) for partition, lease, _ in grant.leases]


def _within(grant: Grant, wanted: Mapping[int, RunSet]) -> Iterator[Part]:
    """The items wanted, by the lease that a grant holds them under."""
    for partition, lease, runs in grant.leases:
        if partition in wanted:
            found = [offset for offset in offsets(runs) if offset in wanted[partition]]
            if found:
                yield Part(partition, lease, found)
