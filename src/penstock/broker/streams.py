"""Streams that consume queues from outside of the owner's process and read what they are granted by themselves (ADR 15).

Owns: `StreamCoordinator`: the owner's side, and the right to consume a queue alone. A stream has that right for as long as it says so. It asks for
grants, one after the other; a grant is a set of leases under its name, kept as a note in the inbox, where it is found by its number.
Whoever asks for the next one has committed all before it: those are completed first.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from penstock.broker import changes
from penstock.logs.store import Inbox
from penstock.loop.catalog import Catalog
from penstock.loop.requests import FunctionRequest, LeaseRequest, Request, SettlePart, SettleRequest
from penstock.loop.turn import QueueEngine
from penstock.operations import EndStream, FailGranted, Operation, ReadGrant, ReadStats, RenewStream, TakeGrant
from penstock.reports import GrantAnswer, GrantFailure, StreamGrant
from penstock.rules.catalog import QueueEntry
from penstock.rules.commands import Settled
from penstock.rules.removal import parks_key
from penstock.rules.routing import digest
from penstock.rules.runs import RunSet, from_offsets, offsets, pairs
from penstock.rules.settle import truncate_reason
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, Refused
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_DELAY, MAX_GRANT, check_lease_timeout, check_range

P = ParamSpec("P")
R = TypeVar("R")
HOLDER = "spark:"
RUNS = 16
"""Of a stream so many runs are known apart."""


class StreamOwner(Protocol):
    """What streams need of their broker."""

    clock: Clock
    catalog: Catalog

    def call(self, operation: Operation[Any], /) -> Any: ...
    def run_request(self, incarnation: int, request: Request) -> Any: ...
    def entry(self, incarnation: int) -> QueueEntry: ...
    def changing_catalog(self) -> AbstractContextManager[None]: ...


def _one_at_a_time(method: "Callable[Concatenate[StreamCoordinator, P], R]") -> "Callable[Concatenate[StreamCoordinator, P], R]":
    """A method that waits for others of the same object."""

    def run(self: "StreamCoordinator", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._using:
            return method(self, *args, **kwargs)

    return run


class StreamCoordinator:
    """Streams that consume queues of this broker."""

    def __init__(self, inbox: Inbox, broker: StreamOwner) -> None:
        self._inbox = inbox
        self._broker = broker
        self._runs: dict[tuple[int, str], list[str]] = {}
        """Of each stream the runs that were heard of, the newest last: an old process may end after its successor has begun."""
        self._using = threading.RLock()
        """One operation at a time: grants are read, changed and kept."""
        self._held: dict[int, int] = {}
        """Incarnations of queues whose consumer right somebody has, and when it ends (elapsed)."""

    # -- the right to consume ------------------------------------------------------------------------

    def restore_exclusive_consumers(self) -> None:
        """Whoever had a right when the broker was closed is given the time to say so again."""
        now = self._now()
        self._held = {
            entry.incarnation: now + entry.consumer_right_timeout for entry in self._broker.catalog.entries if entry.consumer_right_holder
        }

    @_one_at_a_time
    def set_exclusive_consumer(self, incarnation: int, holder: str, timeout: int) -> None:
        """Give a queue's consumer right to a holder, or ("") to nobody, for so long as it is not renewed; refused while another has it."""
        self._broker.run_request(
            incarnation, FunctionRequest(lambda turns: self._hold(turns, holder, timeout), recorded_elsewhere=True, needs_all_open=False)
        )
        self._held.pop(incarnation, None)
        if holder:
            self._held[incarnation] = self._now() + timeout

    @_one_at_a_time
    def expire_exclusive_consumers(self) -> None:
        """A right whose holder has kept silent for too long is nobody's any more: the next opening must not give it back."""
        now = self._now()
        for incarnation in [incarnation for incarnation, until in self._held.items() if until <= now]:
            with suppress(PenstockError):  # tried again at the next look
                if incarnation in self._broker.catalog.state.entries:
                    self.set_exclusive_consumer(incarnation, "", 0)
                self._held.pop(incarnation, None)

    def _hold(self, turns: QueueEngine, holder: str, timeout: int) -> None:
        if holder:
            turns.lease_step.check_consumer_right(holder)
        with self._broker.changing_catalog():
            self._broker.catalog.set_consumer_right(turns.incarnation, holder, timeout)
        turns.lease_step.set_consumer_right(holder, timeout)

    # -- operations ----------------------------------------------------------------------------------

    @_one_at_a_time
    def take(self, asked: TakeGrant) -> GrantAnswer:
        """Grants up to `done` are committed; give another of up to `want` items (0: none)."""
        incarnation, stream, done, timeout = asked.queue, asked.stream, asked.done, asked.timeout
        self._hear(incarnation, stream, asked.run)
        check_range("want", asked.want, 0, MAX_GRANT)
        check_range("per_key", asked.per_key, 1, MAX_BATCH_ITEMS)
        self.set_exclusive_consumer(incarnation, HOLDER + stream, check_lease_timeout(timeout, "timeout"))
        grant: StreamGrant | None = None
        newest = done + 1
        for number in self._numbers(incarnation, stream):
            if number <= done:
                self._finish(incarnation, stream, number)
            else:
                newest, grant = number, self._unread(incarnation, stream, number, timeout)
        if grant is None and asked.want:
            grant = self._lease(asked, done + 1)
            newest = done + 1
            if grant.leases:
                self._broker.run_request(
                    incarnation, FunctionRequest(changes.publish_partitions, needs_all_open=False)
                )  # who reads beside the queue must find them
                self._save(incarnation, stream, newest, grant)
        items = grant.items if grant is not None else 0
        return GrantAnswer(newest if items else done, items, self._broker.call(ReadStats(queue=incarnation)).ready)

    @_one_at_a_time
    def renew(self, asked: RenewStream) -> None:
        """The stream is at work. With `again` what comes after this grant is handled anew: what was said of it before counts no more."""
        incarnation, stream, timeout = asked.queue, asked.stream, asked.timeout
        self._hear(incarnation, stream, asked.run)
        self.set_exclusive_consumer(incarnation, HOLDER + stream, check_lease_timeout(timeout, "timeout"))
        leases = [lease for _, grant in self._grants(incarnation, stream) for lease in grant.leases]
        self._settle(
            incarnation, SettleRequest("extend", [SettlePart(partition, lease) for partition, lease, _ in leases], timeout=timeout)
        )
        if asked.reset_after is not None:
            for number, grant in self._grants(incarnation, stream):
                if number > asked.reset_after and grant.failed and not grant.completed:
                    grant.failed = []
                    self._save(incarnation, stream, number, grant)

    @_one_at_a_time
    def end(self, asked: EndStream) -> None:
        """The stream is done, unless another run of it has begun; what it had not committed comes back when its leases end."""
        incarnation, stream, run = asked.queue, asked.stream, asked.run
        newest = self._runs.get((incarnation, stream), [run])[-1]
        if self._broker.entry(incarnation).consumer_right_holder == HOLDER + stream and run == newest:
            self.set_exclusive_consumer(incarnation, "", 0)
            self._runs.pop((incarnation, stream), None)

    def grant(self, asked: ReadGrant) -> StreamGrant:
        return read_grant(self._inbox, asked)

    @_one_at_a_time
    def fail(self, asked: FailGranted) -> tuple[int, list[tuple[int, int]]]:
        """Items that were granted and are not completed yet failed; says how many, and which of these items it did not find."""
        incarnation, action, delay = asked.queue, asked.action, check_range("delay", asked.delay, 0, MAX_DELAY)
        lots: list[tuple[str, dict[int, RunSet]]] = []
        wanted: dict[int, RunSet] = {}
        for why, chosen in reversed(asked.groups):
            lot = {partition: RunSet(from_offsets(sorted(set(each)))) for partition, each in chosen.items()}
            for partition, mine in lot.items():
                known = wanted.setdefault(partition, RunSet())
                mine.remove_all(known.runs)
                known.add_all(mine.runs)
            lots.append((truncate_reason(why), lot))
        found = {partition: RunSet() for partition in wanted}
        for stream in self._streams(incarnation):
            for number, grant in self._grants(incarnation, stream):
                common = _common(grant, wanted)
                if not common:
                    continue
                for partition, runs in common.items():
                    found[partition].add_all(runs)
                for former in grant.failed:
                    left = {partition: RunSet(runs).subtract(common.get(partition, ())) for partition, runs in former.items.items()}
                    former.items = {partition: runs for partition, runs in left.items() if runs}
                grant.failed += [GrantFailure(action, delay, why, _common(grant, lot)) for why, lot in reversed(lots)]
                grant.failed = [failed for failed in grant.failed if failed.items]
                self._save(incarnation, stream, number, grant)
        missing = [(number, offset) for number in sorted(wanted) for offset in offsets(wanted[number].subtract(found[number].runs))]
        return sum(each.total for each in found.values()), missing

    # -- steps ---------------------------------------------------------------------------------------

    def _lease(self, asked: TakeGrant, number: int) -> StreamGrant:
        """Leases, until there is enough or nothing more. Each has a request id: cut off and asked again, the same are given."""
        grant, stream, per_key = StreamGrant([]), asked.stream, min(asked.per_key, MAX_BATCH_ITEMS)
        left, round_, ended = asked.want, 1, 0
        while left:
            name = digest(b"grant", stream.encode(), *(part.to_bytes(8, "big") for part in (number, round_, ended)))
            request = LeaseRequest(
                min(left, MAX_BATCH_ITEMS), HOLDER + stream, asked.timeout, per_key, name, self._now(), without_payloads=True
            )
            try:
                handed = self._broker.run_request(asked.queue, request)
            except LeaseLost:  # cut off before, and away for so long that the items are everybody's again
                ended += 1
                continue
            if not handed:
                return grant
            for one in handed:
                grant.leases.append((one.partition, one.granted.lease, one.granted.runs))
                left = max(0, left - one.granted.count)
            round_ += 1
        return grant

    def _unread(self, incarnation: int, stream: str, number: int, timeout: int) -> StreamGrant | None:
        """A grant whose answer did not reach the stream: it is given again, but for items whose leases have ended, which may be others'."""
        grant = self._grant(incarnation, stream, number)
        parts = [SettlePart(partition, lease) for partition, lease, _ in grant.leases]
        answers = self._settle(incarnation, SettleRequest("extend", parts, timeout=timeout))
        live = [lease for lease, answer in zip(grant.leases, answers, strict=True) if answer is not None]
        if not live:
            self._inbox.remove_blob(incarnation, grant_name(stream, number))
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
        park = parks_key(self._broker.entry(incarnation).options.policy)
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
        self._inbox.remove_blob(incarnation, grant_name(stream, number))

    def _fail(self, incarnation: int, grant: StreamGrant, failed: GrantFailure) -> None:
        parts = [*_parts(grant, failed.items)]
        self._settle(incarnation, SettleRequest(failed.action, parts, delay=failed.delay, reason=failed.reason, alone=True))

    def _complete(self, incarnation: int, stream: str, grant: StreamGrant) -> None:
        """What did not fail is done: by its lease, or, where that has ended meanwhile, by right, if nobody has taken it since."""
        parts = [part for part in _whole(grant) if part.offsets != []]
        lapsed: dict[int, list[int]] = {}
        for part, answer in zip(parts, self._settle(incarnation, SettleRequest("complete", parts)), strict=True):
            if answer is None:
                runs = next(runs for partition, lease, runs in grant.leases if (partition, lease) == part[:2])
                lapsed.setdefault(part.partition, []).extend(offsets(runs) if part.offsets is None else part.offsets)
            elif answer.refused:
                lapsed.setdefault(part.partition, []).extend(answer.refused)
        if lapsed:
            self._broker.run_request(
                incarnation, FunctionRequest(partial(changes.complete_ended_leases, items=lapsed, consumer=HOLDER + stream))
            )

    def _hear(self, incarnation: int, stream: str, run: str) -> None:
        known = self._runs.setdefault((incarnation, stream), [])
        if run not in known:
            known.append(run)
            del known[:-RUNS]

    def _settle(self, incarnation: int, request: SettleRequest) -> list[Settled | None]:
        """The answer for each part, None where the lease has ended; anything else is raised."""
        answers = self._broker.run_request(incarnation, request) if request.parts else []
        for answer in answers:
            if isinstance(answer, Refused) and answer.code != LeaseLost.code:
                raise answer.error()
        return [None if isinstance(answer, Refused) else answer for answer in answers]

    def _now(self) -> int:
        return self._broker.clock.read().elapsed

    # -- grants --------------------------------------------------------------------------------------

    def _streams(self, incarnation: int) -> list[str]:
        names = self._inbox.blob_names(incarnation, "grant.")
        return sorted({name.removeprefix("grant.").rpartition(".")[0] for name in names})

    def _numbers(self, incarnation: int, stream: str) -> list[int]:
        prefix = grant_name(stream, 0).rpartition(".")[0] + "."
        return sorted(int(name.removeprefix(prefix)) for name in self._inbox.blob_names(incarnation, prefix))

    def _grants(self, incarnation: int, stream: str) -> Iterator[tuple[int, StreamGrant]]:
        return ((number, self._grant(incarnation, stream, number)) for number in self._numbers(incarnation, stream))

    def _grant(self, incarnation: int, stream: str, number: int) -> StreamGrant:
        return read_grant(self._inbox, ReadGrant(queue=incarnation, stream=stream, number=number))

    def _save(self, incarnation: int, stream: str, number: int, grant: StreamGrant) -> None:
        self._inbox.put_blob(incarnation, grant_name(stream, number), msgspec.msgpack.encode(grant))


def grant_name(stream: str, number: int) -> str:
    """The name of the note in which a grant is kept."""
    return f"grant.{stream}.{number:012d}"


def read_grant(inbox: Inbox, asked: ReadGrant) -> StreamGrant:
    """A grant by its number, for the owner and for who was granted it."""
    raw = inbox.blob(asked.queue, grant_name(asked.stream, asked.number))
    if raw is None:
        what = f"grant {asked.number} of the stream {asked.stream} is not there (any more)"
        raise InvalidRequest(f"{what}; start the stream with a new checkpoint")
    return msgspec.msgpack.decode(raw, type=StreamGrant)


def _whole(grant: StreamGrant) -> list[SettlePart]:
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
        parts.append(SettlePart(partition, lease, None if left.total == total else offsets(left.runs)))
    return parts


def _parts(grant: StreamGrant, items: Mapping[int, list[int]]) -> Iterator[SettlePart]:
    """These items by the leases that a grant holds them under."""
    for partition, lease, runs in grant.leases:
        found = _both(runs, RunSet(items.get(partition, ())))
        if found:
            yield SettlePart(partition, lease, offsets(found))


def _common(grant: StreamGrant, wanted: Mapping[int, RunSet]) -> dict[int, list[int]]:
    """Which of the items wanted are in a grant."""
    found: dict[int, list[int]] = {}
    for partition, _, runs in grant.leases:
        if partition in wanted and (common := _both(runs, wanted[partition])):
            found[partition] = RunSet([*found.get(partition, ()), *common]).runs
    return found


def _both(runs: list[int], others: RunSet) -> list[int]:
    return [edge for start, stop in pairs(runs) for edge in others.within(start, stop)]
