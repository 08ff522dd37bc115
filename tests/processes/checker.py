"""The checker of a campaign: says what is wrong, from the journals and from what is in the queues at the end.

Owns: `Checker` and `Problem`. It knows nothing of Penstock but what the documentation promises:
- an item whose produce was answered is there once; one whose produce was refused is not there; one whose outcome is
  unknown is there at most once; the same for follow-ups, which depend on the completion of their item;
- a transfer (dead letter, redrive, resize) makes one item of one item;
- no item is completed twice, or leased after it was completed;
- a key, and an item, has one holder at a time: a lease is held from its answer until it is settled, or until its
  timeout has passed since it was asked for, whether its process lives or not;
- items of a key that were produced one after the other are handled in that order;
- `LeaseLost` is the answer only when the lease may have ended;
- a cursor skips nothing;
- each call ends in time, with an answer or an error that is documented for it.
It uses lower bounds of what is known: where the journals leave two possibilities, the checker is silent.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tests.processes.journal import KILLED, Call, Facts

GRACE_SECONDS = 4.0
"""How late a call may end on a busy machine."""
SLACK_SECONDS = 0.05
RETRYABLE = {"queue_busy", "outcome_unknown", "storage_failed"}
"""storage_failed: a partition that is being opened, or whose disk is slow, refuses work for a while."""
DOCUMENTED: dict[str, set[str]] = {
    "produce": RETRYABLE | {"queue_full", "queue_held"},
    "lease": RETRYABLE,
    "settle": RETRYABLE | {"lease_lost"},
    "extend": RETRYABLE | {"lease_lost"},
    "open": set(),
}
"""The errors that calls may end with in a campaign; all others only with RETRYABLE."""


class FinalItem(NamedTuple):
    """An item that a cursor finds in a queue at the end."""

    queue: str
    id: str
    payload: str
    key: str | None
    origin: str
    """Where it was transferred from: "<queue>/<id>"; "" if it was produced here."""
    state: str


class Freeze(NamedTuple):
    process: str
    pid: int
    begin: float
    end: float
    owner: bool


@dataclass
class Evidence:
    """All that the checker looks at."""

    calls: list[Call]
    items: list[FinalItem]
    freezes: list[Freeze] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    """The processes that were killed: only their last calls may have no outcome."""
    max_attempts: int = 0


@dataclass
class Produced:
    """An item that some process tried to produce."""

    payload: str
    queue: str
    key: str | None
    begin: float
    """When it was first tried."""
    group: str = ""
    """Items of one group have one dedup id: one of them is stored."""
    plain: bool = True
    """Whether the order of its key is known: neither scheduled, nor deduplicated, nor a follow-up."""
    place: int = 0
    """Its place in the request."""
    acked: float = float("inf")
    """When it was first answered."""
    ids: set[str] = field(default_factory=set)
    unknown: bool = False


class Handling(NamedTuple):
    """A lease of an item, or a call of a worker's handler."""

    call: Call
    queue: str
    payload: str
    key: str | None
    id: str
    attempts: int
    begin: float
    """Since when it was surely held."""
    until: float
    """Until when it was surely held."""
    resolved: float
    """When it was at the earliest completed or buried; infinite if it was not."""


class Checker:
    """Finds what is wrong."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.calls = evidence.calls
        self.problems: list[str] = []
        self.produced = self._collect_produced()
        self.settles = self._collect_settles()
        self.handlings = sorted(self._collect_handlings(), key=lambda one: one.begin)

    def check(self) -> list[str]:
        """All problems, each in a line."""
        self._check_calls()
        self._check_owner_named()
        self._check_stored()
        self._check_transfers()
        self._check_completed()
        self._check_leases_lost()
        self._check_attempts()
        self._check_holders()
        self._check_order()
        self._check_cursors()
        return self.problems

    def _problem(self, kind: str, text: str) -> None:
        self.problems.append(f"{kind}: {text}")

    # -- what the journals say -----------------------------------------------------------------------

    def _collect_produced(self) -> dict[str, Produced]:
        found: dict[str, Produced] = {}
        for call in self.calls:
            if call.op == "produce":
                for place, facts in enumerate(call.facts["items"]):
                    dedup = facts.get("dedup", "")
                    group = f"{call.facts['queue']}/{facts['key']}/{dedup}" if dedup else ""
                    plain = not group and not facts.get("scheduled")
                    fresh = Produced(facts["payload"], call.facts["queue"], facts["key"], call.begin, group, plain, place)
                    self._note_outcome(found.setdefault(fresh.payload, fresh), call, place)
        for call, facts, state in self._follow_ups():
            item = found[facts["payload"]] = Produced(facts["payload"], facts["queue"], facts["key"], call.begin, plain=False)
            if state == "completed":
                item.acked = call.end
            item.unknown = state == "unknown"
        return found

    @staticmethod
    def _note_outcome(item: Produced, call: Call, place: int) -> None:
        part = call.results[place] if call.results else {"error": call.error} if call.error else {"id": call.answer[place]}
        if "id" in part:
            item.acked = min(item.acked, call.end)
            item.ids.add(part["id"])
        elif part["error"] in (KILLED, "outcome_unknown"):
            item.unknown = True

    def _follow_ups(self) -> Iterator[tuple[Call, Facts, str]]:
        """Each follow-up with the call that would make it: "completed", "refused" or "unknown"."""
        for call in self.calls:
            if call.op == "settle":
                state = "completed" if call.ok else "unknown" if call.unknown else "refused"
                for facts in call.facts["then"]:
                    yield call, facts, state
            elif call.op == "handle":
                for facts in call.facts["then"]:
                    yield call, facts, "unknown" if call.error == KILLED or call.answer == "complete" else "refused"

    def _collect_settles(self) -> "dict[tuple[str, int, str], list[tuple[Call, str, str]]]":
        """(process, number of the lease, payload) → its settling calls, with action and outcome."""
        found: dict[tuple[str, int, str], list[tuple[Call, str, str]]] = defaultdict(list)
        for call in self.calls:
            if call.op in ("settle", "drop"):
                action = call.facts.get("action", "drop")
                for place, payload in enumerate(call.facts["payloads"]):
                    found[call.process, call.facts["lease"], payload].append((call, action, _settled_as(call, place)))
            elif call.op == "extend":
                outcome = "done" if call.ok else "lost" if call.error == "lease_lost" else "unknown"
                found[call.process, call.facts["lease"], call.facts["payload"]].append((call, "extend", outcome))
        return found

    def _collect_handlings(self) -> Iterator[Handling]:
        for call in self.calls:
            if call.op == "lease" and call.ok:
                for item in call.answer:
                    yield self._leased(call, item)
            elif call.op == "handle":
                item, end = call.facts["item"], call.end
                until = min([end if end != float("inf") else call.begin, *self._freeze_begins(call)])
                resolved = end if call.ok and call.answer in ("complete", "bury") else float("inf")
                yield Handling(
                    call, call.facts["queue"], item["payload"], item["key"], item["id"], item["attempts"], call.begin, until, resolved
                )

    def _leased(self, call: Call, item: Facts) -> Handling:
        until, resolved = call.begin + call.facts["lease_timeout"] - SLACK_SECONDS, float("inf")
        settled = float("inf")
        for settle, action, outcome in self.settles.get((call.process, call.number, item["payload"]), ()):
            if action == "extend":
                if outcome == "done":
                    until = max(until, settle.begin + settle.facts["lease_timeout"] - SLACK_SECONDS)
                continue
            settled = min(settled, settle.begin)
            if action in ("complete", "bury") and outcome in ("done", "unknown"):
                resolved = min(resolved, settle.begin)
        queue, begin = call.facts["queue"], call.end
        return Handling(call, queue, item["payload"], item["key"], item["id"], item["attempts"], begin, min(until, settled), resolved)

    def _freeze_begins(self, call: Call) -> list[float]:
        return [
            one.begin for one in self.evidence.freezes if one.process == call.process and call.begin <= one.end and one.begin <= call.end
        ]

    # -- calls ---------------------------------------------------------------------------------------

    def _check_calls(self) -> None:
        for call in self.calls:
            if call.error == KILLED:
                if call.process not in self.evidence.killed:
                    self._problem("no answer", f"{call} has none, and its process was not killed")
                continue
            if call.error and call.error not in DOCUMENTED.get(call.op, RETRYABLE):
                self._problem("error", f"{call} ended with {call.error}: {call.message}")
            took = call.end - call.begin - self._frozen_seconds(call)
            if call.allowed and took > call.allowed + GRACE_SECONDS:
                self._problem("late", f"{call} took {took:.1f} s of {call.allowed:.1f} s {call.message}")

    def _frozen_seconds(self, call: Call) -> float:
        """How long its own process was frozen during the call."""
        return sum(
            max(0.0, min(call.end, one.end) - max(call.begin, one.begin)) for one in self.evidence.freezes if one.process == call.process
        )

    def _check_owner_named(self) -> None:
        """A call that ends while the owner is frozen says which process does not answer."""
        for call in self.calls:
            if "the owner" not in call.message or "has not answered" not in call.message:
                continue
            named = re.search(r"process (\d+) |this very process ", call.message)
            if named is None:
                self._problem("unnamed", f"{call} does not name the owner: {call.message}")
                continue
            for one in self.evidence.freezes:
                if one.owner and one.begin < call.begin and call.end < one.end and named[1] != str(one.pid):
                    self._problem("unnamed", f"{call} names another process than the frozen owner {one.pid}: {call.message}")

    # -- items ---------------------------------------------------------------------------------------

    def _check_stored(self) -> None:
        """Each item that was produced is there as often as its answer says."""
        roots = Counter(item.payload for item in self.evidence.items if not item.origin)
        groups: dict[str, list[Produced]] = defaultdict(list)
        for item in self.produced.values():
            stored = roots[item.payload]
            if stored > 1:
                self._problem("doubled", f"{item.payload} is stored {stored} times")
            if item.group:
                groups[item.group].append(item)
            elif item.acked != float("inf") and not stored:
                self._problem("lost", f"{item.payload} was answered at {item.acked:.3f} and is not there")
            elif item.acked == float("inf") and not item.unknown and stored:
                self._problem("refused", f"{item.payload} was refused and is there")
        for group, items in groups.items():
            stored = sum(roots[item.payload] for item in items)
            if stored > 1:
                self._problem("doubled", f"{stored} items of dedup id {group} are stored")
            if not stored and any(item.acked != float("inf") for item in items):
                self._problem("lost", f"an item of dedup id {group} was answered and none is there")
            if len(ids := set().union(*(item.ids for item in items))) > 1:
                self._problem("doubled", f"produces of dedup id {group} were answered with several ids: {sorted(ids)}")
        for payload in roots.keys() - self.produced.keys():
            self._problem("unexplained", f"nobody produced {payload}")
        for item in self.produced.values():
            if not item.group and len(item.ids) > 1:
                self._problem("doubled", f"repeats of {item.payload} were answered with several ids: {sorted(item.ids)}")

    def _check_transfers(self) -> None:
        for (queue, origin), count in Counter((item.queue, item.origin) for item in self.evidence.items if item.origin).items():
            if count > 1:
                self._problem("transfer", f"{count} items of {queue} were made from {origin}")

    def _check_completed(self) -> None:
        """Each item is completed once."""
        done: dict[str, list[Call]] = defaultdict(list)
        maybe: set[str] = set()
        for (_, _, payload), settles in self.settles.items():
            completions = [(call, outcome) for call, action, outcome in settles if action == "complete"]
            done[payload] += [call for call, outcome in completions if outcome == "done"][:1]  # the same lease may repeat it
            maybe.update(payload for _, outcome in completions if outcome == "unknown")
        maybe.update(call.facts["item"]["payload"] for call in self.calls if call.op == "handle" and call.answer == "complete")
        for payload, calls in done.items():
            if len(calls) > 1:
                self._problem("twice", f"{payload} was completed by {', '.join(map(str, calls))}")
        ends = {payload: min(call.end for call in calls) for payload, calls in done.items() if calls}
        for one in self.handlings:
            if one.call.op == "lease" and one.call.begin > ends.get(one.payload, float("inf")):
                self._problem("twice", f"{one.payload} was leased by {one.call} after it was completed at {ends[one.payload]:.3f}")
        for item in self.evidence.items:
            if item.state != "completed":
                self._problem("left", f"{item.queue}/{item.id} ({item.payload}) is {item.state} at the end")
            if not done[item.payload] and item.payload not in maybe:
                self._problem("lost", f"{item.queue}/{item.id} ({item.payload}) is {item.state}, and nobody completed it")

    def _check_leases_lost(self) -> None:
        """A lease is lost only after its end."""
        for one in self.handlings:
            if one.call.op != "lease":
                continue
            limit, unsure = one.call.begin + one.call.facts["lease_timeout"] - SLACK_SECONDS, False
            for settle, action, outcome in self.settles.get((one.call.process, one.call.number, one.payload), ()):
                if outcome == "lost" and settle.end < limit and not unsure:
                    self._problem("lease lost", f"{one.payload}: {settle} was refused; its lease {one.call} lasts until {limit:.3f}")
                if action == "extend" and outcome == "done":
                    limit = max(limit, settle.begin + settle.facts["lease_timeout"] - SLACK_SECONDS)
                unsure = unsure or outcome == "unknown" or action == "drop"

    def _check_attempts(self) -> None:
        """The attempts of an item grow with each lease, and do not exceed the maximum."""
        last: dict[tuple[str, str], Handling] = {}
        for one in self.handlings:
            if self.evidence.max_attempts and one.attempts > self.evidence.max_attempts:
                self._problem("attempts", f"{one.payload} had attempt {one.attempts} of {self.evidence.max_attempts}")
            before = last.get((one.queue, one.id))
            if before is not None and before.call.end < one.call.begin and before.attempts >= one.attempts:
                self._problem(
                    "attempts", f"{one.payload} had attempt {before.attempts} in {before.call}, then {one.attempts} in {one.call}"
                )
            settles = self.settles.get((one.call.process, one.call.number, one.payload), ())
            if not any(action == "drop" for _, action, _ in settles):  # it may have returned uncounted
                last[one.queue, one.id] = one

    # -- keys ----------------------------------------------------------------------------------------

    def _check_holders(self) -> None:
        """No key, and no item, is held twice at a time."""
        latest: dict[tuple[str, str], Handling] = {}
        for one in self.handlings:
            names = [(one.queue, f"item {one.payload}")] + ([(one.queue, f"key {one.key}")] if one.key is not None else [])
            for name in names:
                before = latest.get(name)
                if before is not None and before.until > one.begin and before.call is not one.call and one.until > one.begin:
                    self._problem(
                        "two holders",
                        f"{name[1]} of {name[0]}: {before.payload} by {before.call} until {before.until:.3f}, "
                        f"{one.payload} by {one.call} since {one.begin:.3f}",
                    )
                if before is None or one.until > before.until:
                    latest[name] = one

    def _check_order(self) -> None:
        """An item of a key is not handled before all items that were surely produced before it are resolved."""
        given_up = {item.payload for item in self.evidence.items if item.queue == "dead"}
        first: dict[str, float] = {}
        resolved: dict[str, float] = {}
        for one in self.handlings:
            begin = one.begin
            if one.call.facts.get("per_key", 1) > 1:  # a unit: its items are held together and settled in order
                begin = self._settled_at(one)
            first[one.payload] = min(first.get(one.payload, float("inf")), begin)
            resolved[one.payload] = min(resolved.get(one.payload, float("inf")), one.resolved)
        by_key: dict[tuple[str, str], list[Produced]] = defaultdict(list)
        for item in self.produced.values():
            if item.key is not None and item.plain and item.acked != float("inf"):
                by_key[item.queue, item.key].append(item)
        for items in by_key.values():
            self._check_key([item for item in items if item.payload not in given_up], items, first, resolved)

    def _settled_at(self, one: Handling) -> float:
        """When an item was settled under a lease; infinite if it surely was not."""
        settles = self.settles.get((one.call.process, one.call.number, one.payload), ())
        done = (call.begin for call, action, outcome in settles if action not in ("drop", "extend") and outcome in ("done", "unknown"))
        return min(done, default=float("inf"))

    def _check_key(self, before: list[Produced], after: list[Produced], first: dict[str, float], resolved: dict[str, float]) -> None:
        earlier = sorted(before, key=lambda item: item.acked)
        latest: Produced | None = None
        at = 0
        for item in sorted(after, key=lambda item: (item.begin, item.place)):
            while at < len(earlier) and earlier[at].acked < item.begin:
                if latest is None or resolved.get(earlier[at].payload, float("inf")) > resolved.get(latest.payload, float("inf")):
                    latest = earlier[at]
                at += 1
            self._check_pair(latest, item, first, resolved)
        batches: dict[tuple[float, float], list[Produced]] = defaultdict(list)
        for item in before:
            batches[item.begin, item.acked].append(item)
        for items in batches.values():
            ordered = sorted(items, key=lambda item: item.place)
            for one, other in pairwise(ordered):
                self._check_pair(one, other, first, resolved)

    def _check_pair(self, before: Produced | None, item: Produced, first: dict[str, float], resolved: dict[str, float]) -> None:
        if before is None:
            return
        end, begin = resolved.get(before.payload, float("inf")), first.get(item.payload, float("inf"))
        if begin < end:
            self._problem(
                "order",
                f"key {item.key} of {item.queue}: {item.payload} was handled at {begin:.3f}, before {before.payload}, which was "
                f"produced first (answered at {before.acked:.3f}, the other begun at {item.begin:.3f}) and resolved at {end:.3f}",
            )

    # -- cursors -------------------------------------------------------------------------------------

    def _check_cursors(self) -> None:
        """What was read by the processes of a cursor, one after the other, is all that there is."""
        read: dict[tuple[str, str], set[str]] = defaultdict(set)
        for call in self.calls:
            if call.op == "read" and call.ok:
                read[call.facts["queue"], call.facts["cursor"]].update(call.answer)
        for (queue, cursor), ids in read.items():
            there = {item.id for item in self.evidence.items if item.queue == queue}
            for some, what in ((there - ids, "skipped"), (ids - there, "read what is not there:")):
                if some:
                    self._problem("cursor", f"{cursor} of {queue} {what} {len(some)} items, as {_some(some)}")

    def summary(self) -> str:
        """What the campaign did, in a line."""
        counts = Counter(call.op for call in self.calls)
        errors = Counter(call.error for call in self.calls if call.error)
        handled = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        ended = ", ".join(f"{count} {name}" for name, count in sorted(errors.items())) or "none"
        return f"{len(self.evidence.items)} items; calls: {handled}; errors: {ended}"


def _settled_as(call: Call, place: int) -> str:
    """What became of one item of a settling call: "done", "lost" or "unknown"."""
    if call.op == "drop":
        return "done"
    state = call.answer[place] if call.answer else ""
    if call.ok or state in ("completed", "retried", "buried"):
        return "done"
    if state in ("lost", "returned"):
        return "lost"
    return "unknown" if call.unknown else "refused"


def _some(ids: Iterable[str]) -> str:
    return ", ".join(sorted(ids)[:5])
