"""Streams outside the owner's process that consume a queue (ADR 15): the owner's side.

Owns: `StreamCoordinator`, which gives consumer rights and grants. A stream has the consumer right of a queue for as
long as it renews it. It takes one grant after the other. A grant is a set of leases in the stream's name; it is kept as
a blob in the inbox, under its number, and the stream reads the items from the log itself. A stream that takes the next
grant has committed all grants before it: these are completed first.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
HOLDER_PREFIX = "spark:"
MAX_RUNS = 16
"""How many runs of one stream are remembered."""


class StreamOwner(Protocol):
    """What the coordinator needs of its broker."""

    clock: Clock
    catalog: Catalog

    def call(self, operation: Operation[Any], /) -> Any: ...
    def run_request(self, incarnation: int, request: Request) -> Any: ...
    def entry(self, incarnation: int) -> QueueEntry: ...
    def changing_catalog(self) -> AbstractContextManager[None]: ...


def _locked(method: "Callable[Concatenate[StreamCoordinator, P], R]") -> "Callable[Concatenate[StreamCoordinator, P], R]":
    """Make a method hold the coordinator's lock."""

    def run(self: "StreamCoordinator", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


class StreamCoordinator:
    """Gives consumer rights and grants to the streams that consume queues of one broker."""

    def __init__(self, inbox: Inbox, broker: StreamOwner) -> None:
        self._inbox = inbox
        self._broker = broker
        self._runs: dict[tuple[int, str], list[str]] = {}
        """(queue, stream) → its known runs, the newest last: an old process may end after its successor has begun.
        Those of a stream that has the right are in the catalog, too, for the next owner."""
        self._lock = threading.RLock()
        """Held during each operation: grants are read, changed and saved."""
        self._right_ends_at: dict[int, int] = {}
        """Queue (incarnation) → when its consumer right ends (elapsed)."""

    # -- consumer rights -----------------------------------------------------------------------------

    def restore_consumer_rights(self) -> None:
        """At opening: every holder in the catalog has the whole timeout to renew its right."""
        now = self._now()
        held = [entry for entry in self._broker.catalog.entries if entry.consumer_right_holder]
        self._right_ends_at = {entry.incarnation: now + entry.consumer_right_timeout for entry in held}
        streams = [(entry, entry.consumer_right_holder.removeprefix(HOLDER_PREFIX)) for entry in held]
        self._runs = {(entry.incarnation, stream): [*entry.consumer_right_runs] for entry, stream in streams}

    @_locked
    def set_consumer_right(self, incarnation: int, holder: str, timeout: int, runs: Sequence[str] = ()) -> None:
        """Give the consumer right of a queue to a holder, until the timeout passes without renewal; with holder "" end
        it.

        QueueHeld while another holder has it.
        """
        change = partial(self._set_right, holder=holder, timeout=timeout, runs=runs)
        self._broker.run_request(incarnation, FunctionRequest(change, recorded_elsewhere=True, needs_all_open=False))
        self._right_ends_at.pop(incarnation, None)
        if holder:
            self._right_ends_at[incarnation] = self._now() + timeout

    @_locked
    def expire_consumer_rights(self) -> None:
        """End the rights that were not renewed in time, also in the catalog, from which an opening restores them."""
        now = self._now()
        for incarnation in [incarnation for incarnation, until in self._right_ends_at.items() if until <= now]:
            with suppress(PenstockError):  # the next call tries again
                if incarnation in self._broker.catalog.state.entries:
                    self.set_consumer_right(incarnation, "", 0)
                self._right_ends_at.pop(incarnation, None)

    def _set_right(self, engine: QueueEngine, holder: str, timeout: int, runs: Sequence[str]) -> None:
        if holder:
            engine.lease_step.check_consumer_right(holder)
        with self._broker.changing_catalog():
            self._broker.catalog.set_consumer_right(engine.incarnation, holder, timeout, runs)
        engine.lease_step.set_consumer_right(holder, timeout)

    # -- operations ----------------------------------------------------------------------------------

    @_locked
    def take(self, operation: TakeGrant) -> GrantAnswer:
        """Complete the committed grants (up to `done`), and give a new one of up to `want` items (0: none)."""
        incarnation, stream, done, timeout = operation.queue, operation.stream, operation.done, operation.timeout
        check_range("want", operation.want, 0, MAX_GRANT)
        check_range("per_key", operation.per_key, 1, MAX_BATCH_ITEMS)
        self._give_right(operation)
        grant: StreamGrant | None = None
        newest = done + 1
        for number in self._numbers(incarnation, stream):
            if number <= done:
                self._finish(incarnation, stream, number)
            else:
                newest, grant = number, self._grant_again(incarnation, stream, number, timeout)
        if grant is None and operation.want:
            grant = self._lease(operation, done + 1)
            newest = done + 1
            if grant.leases:
                # The stream reads the log from outside: the items must be published.
                self._broker.run_request(incarnation, FunctionRequest(changes.publish_partitions, needs_all_open=False))
                self._save(incarnation, stream, newest, grant)
        items = grant.items if grant is not None else 0
        stats = self._broker.call(ReadStats(queue=incarnation))
        oldest = max((one.oldest_ready_seconds for one in stats.partitions), default=0.0)
        return GrantAnswer(newest if items else done, items, stats.ready, oldest)

    @_locked
    def renew(self, operation: RenewStream) -> None:
        """Renew the stream's right and leases.

        With `reset_after`, forget the failures reported for grants after that number: their items are handled again.
        """
        incarnation, stream, timeout = operation.queue, operation.stream, operation.timeout
        self._give_right(operation)
        leases = [lease for _, grant in self._grants(incarnation, stream) for lease in grant.leases]
        self._settle(
            incarnation, SettleRequest("extend", [SettlePart(partition, lease) for partition, lease, _ in leases], timeout=timeout)
        )
        if operation.reset_after is not None:
            for number, grant in self._grants(incarnation, stream):
                if number > operation.reset_after and grant.failed and not grant.completed:
                    grant.failed = []
                    self._save(incarnation, stream, number, grant)

    @_locked
    def end(self, operation: EndStream) -> None:
        """End the stream's right, unless a newer run of the stream has begun.

        Items that it has not committed become ready when their leases end.
        """
        incarnation, stream, run = operation.queue, operation.stream, operation.run
        known = self._runs.get((incarnation, stream))
        newest = not known or run == known[-1]  # none is known of a right that an earlier version recorded
        if newest and self._broker.entry(incarnation).consumer_right_holder == HOLDER_PREFIX + stream:
            self.set_consumer_right(incarnation, "", 0)
            self._runs.pop((incarnation, stream), None)

    @_locked
    def fail(self, operation: FailGranted) -> tuple[int, list[tuple[int, int]]]:
        """Mark granted items as failed; gives how many, and the (partition, offset) of those that are in no grant."""
        incarnation, action, delay = operation.queue, operation.action, check_range("delay", operation.delay, 0, MAX_DELAY)
        groups: list[tuple[str, dict[int, RunSet]]] = []
        wanted: dict[int, RunSet] = {}
        for why, chosen in reversed(operation.groups):
            group = {partition: RunSet(from_offsets(sorted(set(each)))) for partition, each in chosen.items()}
            for partition, mine in group.items():
                known = wanted.setdefault(partition, RunSet())
                mine.remove_all(known.runs)
                known.add_all(mine.runs)
            groups.append((truncate_reason(why), group))
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
                grant.failed += [GrantFailure(action, delay, why, _common(grant, group)) for why, group in reversed(groups)]
                grant.failed = [failed for failed in grant.failed if failed.items]
                self._save(incarnation, stream, number, grant)
        missing = [(number, offset) for number in sorted(wanted) for offset in offsets(wanted[number].subtract(found[number].runs))]
        return sum(each.total for each in found.values()), missing

    # -- steps ---------------------------------------------------------------------------------------

    def _lease(self, operation: TakeGrant, number: int) -> StreamGrant:
        """Lease up to `want` items, in several requests.

        Each has a request id made from the grant's number, so that a repetition after a crash gets the same items.
        """
        grant, stream, per_key = StreamGrant([]), operation.stream, min(operation.per_key, MAX_BATCH_ITEMS)
        left, round_, ended = operation.want, 1, 0
        while left:
            name = digest(b"grant", stream.encode(), *(part.to_bytes(8, "big") for part in (number, round_, ended)))
            request = LeaseRequest(
                min(left, MAX_BATCH_ITEMS), HOLDER_PREFIX + stream, operation.timeout, per_key, name, self._now(), without_payloads=True
            )
            try:
                results = self._broker.run_request(operation.queue, request)
            except LeaseLost:  # repeated after a crash, and the leases of the first time have ended
                ended += 1
                continue
            if not results:
                return grant
            for one in results:
                grant.leases.append((one.partition, one.granted.lease, one.granted.runs))
                left = max(0, left - one.granted.count)
            round_ += 1
        return grant

    def _grant_again(self, incarnation: int, stream: str, number: int, timeout: int) -> StreamGrant | None:
        """Give a grant again whose answer did not reach the stream, without the leases that have ended.

        None when all have ended: the items may be leased to another consumer by now.
        """
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
        """Settle a committed grant: retry or bury the failed items, complete the others, remove the blob.

        Items of the same key behind a retried item come back with it; behind a buried item only if that parks the key.
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
            grant.completed = True  # saved first: a repetition must not complete items that came back with a failed one
            self._save(incarnation, stream, number, grant)
        for failed in later:
            self._fail(incarnation, grant, failed)
        self._inbox.remove_blob(incarnation, grant_name(stream, number))

    def _fail(self, incarnation: int, grant: StreamGrant, failed: GrantFailure) -> None:
        parts = [*_parts_of_items(grant, failed.items)]
        self._settle(incarnation, SettleRequest(failed.action, parts, delay=failed.delay, reason=failed.reason, alone=True))

    def _complete(self, incarnation: int, stream: str, grant: StreamGrant) -> None:
        """Complete the items that did not fail.

        Where the lease has ended meanwhile, the items are completed without it, unless they were leased again since.
        """
        parts = [part for part in _parts_to_complete(grant) if part.offsets != []]
        lapsed: dict[int, list[int]] = {}
        for part, answer in zip(parts, self._settle(incarnation, SettleRequest("complete", parts)), strict=True):
            if answer is None:
                runs = next(runs for partition, lease, runs in grant.leases if (partition, lease) == part[:2])
                lapsed.setdefault(part.partition, []).extend(offsets(runs) if part.offsets is None else part.offsets)
            elif answer.refused:
                lapsed.setdefault(part.partition, []).extend(answer.refused)
        if lapsed:
            self._broker.run_request(
                incarnation, FunctionRequest(partial(changes.complete_ended_leases, items=lapsed, consumer=HOLDER_PREFIX + stream))
            )

    def _give_right(self, operation: TakeGrant | RenewStream) -> None:
        """Give a stream the consumer right, or renew it. A run that is not known yet is its newest."""
        timeout = check_lease_timeout(operation.timeout, "timeout")
        known = self._runs.setdefault((operation.queue, operation.stream), [])
        if operation.run not in known:
            known.append(operation.run)
            del known[:-MAX_RUNS]
        self.set_consumer_right(operation.queue, HOLDER_PREFIX + operation.stream, timeout, known)

    def _settle(self, incarnation: int, request: SettleRequest) -> list[Settled | None]:
        """The answer for each part, None where the lease has ended; any other refusal is raised."""
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
    """The name of the blob in which a grant is kept."""
    return f"grant.{stream}.{number:012d}"


def read_grant(inbox: Inbox, operation: ReadGrant) -> StreamGrant:
    """A grant by its number; InvalidRequest when it was removed."""
    raw = inbox.blob(operation.queue, grant_name(operation.stream, operation.number))
    if raw is None:
        what = f"grant {operation.number} of the stream {operation.stream} does not exist any more"
        raise InvalidRequest(f"{what}; start the stream with a new checkpoint")
    return msgspec.msgpack.decode(raw, type=StreamGrant)


def _parts_to_complete(grant: StreamGrant) -> list[SettlePart]:
    """Every lease of a grant, without the items that failed."""
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


def _parts_of_items(grant: StreamGrant, items: Mapping[int, list[int]]) -> Iterator[SettlePart]:
    """These items, grouped by the grant's leases that hold them."""
    for partition, lease, runs in grant.leases:
        found = _intersection(runs, RunSet(items.get(partition, ())))
        if found:
            yield SettlePart(partition, lease, offsets(found))


def _common(grant: StreamGrant, wanted: Mapping[int, RunSet]) -> dict[int, list[int]]:
    """Those of the wanted items that are in a grant: partition → runs."""
    found: dict[int, list[int]] = {}
    for partition, _, runs in grant.leases:
        if partition in wanted and (common := _intersection(runs, wanted[partition])):
            found[partition] = RunSet([*found.get(partition, ()), *common]).runs
    return found


def _intersection(runs: list[int], others: RunSet) -> list[int]:
    return [edge for start, stop in pairs(runs) for edge in others.within(start, stop)]
