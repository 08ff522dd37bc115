"""The rules of DESIGN §3 and §4 for one partition once more, as plainly as they can be said.

Owns: `Model`, one plain object per item, lists and loops; and `View`, what can be compared of a model and a real partition.
Written from the design, not from `penstock.rules`, of which it uses only the words (states, commands, answers).
A model is shown each command together with the answer it got. Where one answer is right the model demands it; where several are
(which items a lease gives, how much `due` does at a time) it judges whether this one is legal, and follows it.
A wrong answer is an AssertionError.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.rules import commands as c
from penstock.rules.life import State
from penstock.testing.order import Item, available, earlier_of_key, holder_of_key, someone_ahead
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, QueueHeld
from penstock.words.limits import DEFAULT_PRIORITY, IMMEDIATE, MAX_LEASE_TIMEOUT, Policy

EXPIRED = "expired"
LEASE_EXPIRED = "lease expired"


@dataclass(slots=True)
class Holding:
    """A lease: who may settle what until when."""

    number: int
    deadline: int
    timeout: int
    open: list[int]
    """In the order given."""
    done: list[int]
    size: int
    given_at: int
    ended_at: int | None = None

    @property
    def finished(self) -> bool:
        """Everything it gave was completed under it."""
        return len(self.done) == self.size


class View(NamedTuple):
    """What is compared after every step."""

    states: list[State]
    failures: dict[int, tuple[int, str]]
    """Items that came back: (attempts, reason)."""
    burials: dict[int, tuple[int, bool]]
    """(attempts, whether its ttl ran out)."""
    leases: dict[int, tuple[int, list[int]]]
    """(deadline, items still open)."""
    paused: tuple[bool, bool]
    policy: Policy
    overdue: set[int]
    requests: set[bytes]
    dedups: dict[bytes, int]


class Model:
    """What one partition should be doing."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.items: list[Item] = []
        self.holdings: dict[int, Holding] = {}
        """Every lease ever given; those with `ended_at` are over."""
        self.paused_lease = False
        self.paused_produce = False
        self.answers: dict[bytes, tuple[int, Any]] = {}
        """Request id → (until, answer; of a lease its number)."""
        self.dedups: dict[bytes, tuple[int, int]] = {}
        """Dedup id → (until, offset)."""
        self.sources: dict[bytes, int] = {}
        self.step = 0

    def judge(self, command: c.Command, now: Moment, answer: c.Answer | PenstockError) -> None:
        """Check an answer and do what it says."""
        self.step += 1
        getattr(self, "_" + type(command).__name__.lower())(command, now, answer)

    def view(self, now: Moment, *, rebooted: bool = False) -> View:
        """What a partition should show; after a reboot every lease has its full timeout again."""
        items = self.items
        return View(
            [item.state for item in items],
            {item.offset: (item.attempts, item.reason) for item in items if item.attempts and not item.state.resolved},
            {item.offset: (item.attempts, item.reason == EXPIRED) for item in items if item.state is State.BURIED},
            {one.number: (now.elapsed + one.timeout if rebooted else one.deadline, sorted(one.open)) for one in self.live()},
            (self.paused_lease, self.paused_produce),
            self.policy,
            {item.offset for item in items if item.overdue},
            {name for name, (until, _) in self.answers.items() if until > now.elapsed},
            {name: offset for name, (until, offset) in self.dedups.items() if until > now.elapsed},
        )

    def live(self) -> list[Holding]:
        return [one for one in self.holdings.values() if one.ended_at is None]

    def rearm(self, now: Moment) -> None:
        """The machine was off: how long is not known, so every holder gets its full timeout again."""
        for one in self.live():
            one.deadline = now.elapsed + one.timeout

    # -- produce -------------------------------------------------------------------------------------

    def _produce(self, command: c.Produce, now: Moment, answer: Any) -> None:
        known = self._known(command.request, now)
        if known is not None:
            assert (list(answer.offsets), answer.again) == (known, True), f"the repeated request gave {answer}, not {known} again"
            return
        if command.source is not None and command.sequence <= self.sources.get(command.source, 0):
            assert (list(answer.offsets), answer.again) == ([], True), "a transfer was taken twice"
            return
        if command.source is None and self.paused_produce:
            assert isinstance(answer, QueueHeld), f"produce while paused gave {answer}"
            return
        expected = [self._store(command, index, now) for index in range(len(command.batch))]
        assert list(answer.offsets) == expected, f"produce gave {answer}, not {expected}"
        self._remember(command.request, now, expected)
        if command.source is not None:
            self.sources[command.source] = command.sequence

    def _store(self, command: c.Produce, index: int, now: Moment) -> int:
        """The offset of an item: the first one's when its dedup id was seen inside the window, else a new one."""
        batch, offset = command.batch, len(self.items)
        name = batch.dedups[index] if batch.dedups else None
        until, first = self.dedups.get(name, (0, 0)) if name is not None else (0, 0)
        if until > now.elapsed:
            return first
        if name is not None:
            self.dedups[name] = (now.elapsed + self.policy.dedup_window, offset)
        priority = batch.priorities[index] if batch.priorities else DEFAULT_PRIORITY
        item = Item(offset, batch.keys[index] if batch.keys else None, priority, priority)
        ttl = (batch.ttls[index] if batch.ttls else 0) or self.policy.ttl
        item.ttl_deadline = now.elapsed + ttl if ttl else 0
        self.items.append(item)
        at = batch.ats[index] if batch.ats else 0
        if at > now.wall + IMMEDIATE:
            item.state, item.at = State.SCHEDULED, at
        else:
            self._to_tail(item, now, position=offset)
        return offset

    # -- lease ---------------------------------------------------------------------------------------

    def _lease(self, command: c.Lease, now: Moment, answer: Any) -> None:
        known = self._known(command.request, now)
        taken = [offset for start, stop in zip(answer.runs[::2], answer.runs[1::2], strict=True) for offset in range(start, stop)]
        if known is not None:
            holding = self.holdings[known]
            expected = (0, []) if holding.ended_at is not None else (known, sorted(holding.open))
            assert (answer.lease, sorted(taken)) == expected, f"the repeated request gave {answer}, not {expected}"
            return
        if self.paused_lease or not taken:
            assert (answer.lease, taken) == (0, []), f"{answer} while paused"
            assert self.paused_lease or not available(self.items), f"nothing was given though {available(self.items)[0]} may be"
            return
        timeout = command.timeout or self.policy.lease_timeout
        assert len(taken) <= command.want, f"{len(taken)} items for a want of {command.want}"
        assert answer.lease > max(self.holdings, default=0), f"lease {answer.lease} is not a new number"
        assert answer.deadline == now.elapsed + timeout, "the deadline is not now and the timeout"
        units: dict[bytes, int] = {}
        for offset in taken:
            self._take(self.items[offset], command.per_key, units, now)
        attempts = {offset: self.items[offset].attempts + 1 for offset in taken if self.items[offset].attempts}
        assert answer.attempts == attempts, f"attempts {answer.attempts}, not {attempts}"
        self.holdings[answer.lease] = Holding(answer.lease, answer.deadline, timeout, taken, [], len(taken), now.elapsed)
        self._remember(command.request, now, answer.lease)

    def _take(self, item: Item, per_key: int, units: dict[bytes, int], now: Moment) -> None:
        assert item.state is State.READY, f"{item} was leased"
        if item.key is not None:
            earlier = earlier_of_key(self.items, item)
            assert earlier is None, f"{item} was leased before {earlier} of the same key"
        if item.key in units:
            units[item.key] += 1
            assert units[item.key] <= per_key, f"{item} is one more of its key than the {per_key} asked for"
        else:
            if item.key is not None:
                holder = holder_of_key(self.items, item.key)
                assert holder is None, f"{item} was leased though {holder} holds its key"
                units[item.key] = 1
            ahead = someone_ahead(self.items, item, now.elapsed, self.policy.priority_aging)
            assert ahead is None, f"{item} was leased before {ahead}"
        item.state, item.jumps = State.LEASED, False

    # -- settle --------------------------------------------------------------------------------------

    def _complete(self, command: c.Complete, now: Moment, answer: Any) -> None:
        if self._settled_before(command, now, answer):
            return
        holding = self.holdings.get(command.lease)
        if holding is None or holding.ended_at is not None:
            self._complete_ended(holding, command, now, answer)
            return
        wanted = list(holding.open) if command.offsets is None else command.offsets
        good, early = self._sort(holding, wanted)
        again = [offset for offset in wanted if offset in holding.done]
        refused = [offset for offset in wanted if offset not in {*early, *good, *again}]
        self._expect_settled(answer, len(good) + len(again), refused, early)
        for offset in good:
            self._resolve(self.items[offset])
        holding.done += good
        self._close(holding, good, now)
        if good:
            self._remember(command.request, now, answer)

    def _sort(self, holding: Holding, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of what a lease holds: what may be settled, and what must wait for an earlier item of its unit."""
        missing = [other for other in holding.open if other not in wanted]
        early = {later for other in missing for later in self._behind(holding, other) if later in wanted}
        return [offset for offset in wanted if offset in holding.open and offset not in early], sorted(early)

    def _complete_ended(self, holding: Holding | None, command: c.Complete, now: Moment, answer: Any) -> None:
        """What was completed under a lease may be completed again for a while; all else is refused."""
        lost = isinstance(answer, LeaseLost) or answer.refused == list(command.offsets or [])
        if holding is None or holding.ended_at is None:
            assert lost, f"a lease never given was taken: {answer}"
        elif now.elapsed >= min(holding.ended_at, holding.given_at + MAX_LEASE_TIMEOUT) + self.policy.remember:
            return  # forgotten, or not yet; a lease extended beyond the longest timeout may be forgotten as soon as it ends
        elif command.offsets is None:
            assert answer == c.Settled(0) if holding.finished else lost, f"an ended lease was taken: {answer}"
        else:
            done = [offset for offset in command.offsets if offset not in answer.refused]
            assert answer.done == len(done), f"{answer} does not add up"
            # Of a lease that finished only its number is kept, so any item that is completed passes for one of its own.
            fine = [o for o in done if o in holding.done or (holding.finished and self.items[o].state is State.COMPLETED)]
            assert done == fine, f"an ended lease completed {done}"
            missed = [o for o in answer.refused if o in holding.done and self.items[o].state is State.COMPLETED]
            assert not missed, f"a repeated complete was refused for {missed}"

    def _retry(self, command: c.Retry, now: Moment, answer: Any) -> None:
        found = self._held(command, now, answer)
        if found is None:
            return
        holding, chosen = found
        first = [offset for offset in chosen if not any(offset in self._behind(holding, other) for other in chosen)]
        back = {later for offset in first for later in self._behind(holding, offset)}
        for number, offset in enumerate(first):
            item, most = self.items[offset], self.policy.max_attempts
            if item.overdue or (command.counted and most and item.attempts + 1 >= most):
                self._bury_item(item, EXPIRED if item.overdue else "spent", counted=True)
            else:
                self._come_back(item, now, command.reason, command.delay, ("retried", 0, number), counted=command.counted)
        self._return(back, now)
        self._close(holding, [*first, *back], now)

    def _bury(self, command: c.Bury, now: Moment, answer: Any) -> None:
        found = self._held(command, now, answer)
        if found is None:
            return
        holding, chosen = found
        back = {later for offset in chosen for later in self._behind(holding, offset)} - set(chosen)
        for offset in chosen:
            self._bury_item(self.items[offset], command.reason, counted=True)
        self._return(back, now)
        self._close(holding, [*chosen, *back], now)

    def _extend(self, command: c.Extend, now: Moment, answer: Any) -> None:
        if self._settled_before(command, now, answer):
            return
        holding = self.holdings.get(command.lease)
        if holding is None or holding.ended_at is not None:
            assert isinstance(answer, LeaseLost), f"a stale lease was extended: {answer}"
            return
        self._expect_settled(answer, len(holding.open), [], [])
        holding.deadline = now.elapsed + (command.timeout or holding.timeout)
        self._remember(command.request, now, answer)

    def _held(self, command: c.Retry | c.Bury, now: Moment, answer: Any) -> tuple[Holding, list[int]] | None:
        """The lease and which of the offsets it holds; None when nothing is to be done."""
        if self._settled_before(command, now, answer):
            return None
        holding = self.holdings.get(command.lease)
        if holding is None or holding.ended_at is not None:
            assert isinstance(answer, LeaseLost), f"a stale lease was taken: {answer}"
            return None
        wanted = list(holding.open) if command.offsets is None else command.offsets
        chosen, early = self._sort(holding, wanted)
        self._expect_settled(answer, len(chosen), [offset for offset in wanted if offset not in holding.open], early)
        if chosen:
            self._remember(command.request, now, answer)
        return holding, chosen

    def _settled_before(self, command: c.Complete | c.Retry | c.Bury | c.Extend, now: Moment, answer: Any) -> bool:
        known = self._known(command.request, now)
        assert known is None or answer == known, f"the repeated request gave {answer}, not {known}"
        return known is not None

    @staticmethod
    def _expect_settled(answer: Any, done: int, refused: list[int], early: list[int]) -> None:
        assert isinstance(answer, c.Settled), f"settling a live lease gave {answer!r}"
        expected = (done, sorted(refused), sorted(early))
        assert (answer.done, sorted(answer.refused), sorted(answer.early)) == expected, f"{answer}, not {expected}"

    def _behind(self, holding: Holding, offset: int) -> list[int]:
        """Open items of the same key that were given after this one: they are one unit."""
        key = self.items[offset].key
        if key is None:
            return []
        return [other for other in holding.open[holding.open.index(offset) + 1 :] if self.items[other].key == key]

    def _return(self, offsets: Iterable[int], now: Moment) -> None:
        """Later items of a unit go back to their places, their attempt given back."""
        for item in map(self.items.__getitem__, offsets):
            self._to_place(item, now)
            item.spared = item.spared and not item.overdue
            item.overdue = False  # what has outlived its ttl is buried now that it waits

    @staticmethod
    def _close(holding: Holding, offsets: Iterable[int], now: Moment) -> None:
        for offset in offsets:
            holding.open.remove(offset)
        if not holding.open:
            holding.ended_at = now.elapsed

    # -- what comes due ------------------------------------------------------------------------------

    def due(self, now: Moment, seen: Sequence[State], overdue: Iterable[int], *, finished: bool) -> None:
        """Some of what is due was done: `seen` tells which items moved. When nothing was left to do, all of it must be."""
        self.step += 1
        late = set(overdue)
        for item, state in zip(self.items, seen, strict=True):
            if state is not item.state:
                self._came_due(item, state, now)
            elif item.state is State.LEASED and item.ttl_deadline and item.ttl_deadline <= now.elapsed:
                item.overdue = item.overdue or (finished and not item.spared) or item.offset in late
        for holding in self.live():
            gone = [offset for offset in holding.open if self.items[offset].state is not State.LEASED]
            assert not gone or gone == holding.open, f"a lease ended in part: {holding}"
            self._close(holding, gone, now)
        if finished:
            left = [item for item in self.items if self._is_due(item, now, certain=True)]
            assert not left, f"{left[0]} is due and was left"

    def _came_due(self, item: Item, state: State, now: Moment) -> None:
        assert self._is_due(item, now), f"{item} became {state} before its time"
        if item.state is State.LEASED:
            most = self.policy.max_attempts
            given_up = item.overdue or bool(most and item.attempts + 1 >= most)
            assert (state is State.BURIED) == given_up, f"{item} became {state} when its lease ended"
            if given_up:
                self._bury_item(item, EXPIRED if item.overdue else "spent", counted=True)
            else:
                holding = self._holding(item)
                self._come_back(item, now, LEASE_EXPIRED, 0, ("expiry", holding.deadline, self._rank(holding, item)))
        elif state is State.BURIED:
            assert item.ttl_deadline and item.ttl_deadline <= now.elapsed, f"{item} was buried before its ttl"
            self._bury_item(item, EXPIRED)
        else:
            assert state is State.READY, f"{item} became {state}"
            self._scheduled_due(item, now)

    def _scheduled_due(self, item: Item, now: Moment) -> None:
        if item.due and item.key is not None:
            self._to_place(item, now)
        else:
            self._to_tail(item, now, cause=("wall" if item.at else "delay", item.at or item.due, item.offset))
        item.at = item.due = 0

    def _is_due(self, item: Item, now: Moment, *, certain: bool = False) -> bool:
        """Whether something may, or must, happen to an item by itself."""
        if item.state is State.LEASED:
            return self._holding(item).deadline <= now.elapsed
        if item.waits and item.ttl_deadline and item.ttl_deadline <= now.elapsed and not (certain and item.spared):
            return True
        return item.state is State.SCHEDULED and (item.at <= now.wall if item.at else item.due <= now.elapsed)

    def _holding(self, item: Item) -> Holding:
        return next(one for one in self.live() if item.offset in one.open)

    @staticmethod
    def _rank(holding: Holding, item: Item) -> int:
        return holding.number * 1_000 + holding.open.index(item.offset)

    # -- an operator's word --------------------------------------------------------------------------

    def _configure(self, command: c.Configure, now: Moment, answer: Any) -> None:
        changed, self.policy = command.policy != self.policy, command.policy
        most = command.policy.max_attempts
        spent = [item for item in self.items if changed and most and item.waits and item.attempts >= most]
        assert answer == c.Counted(len(spent)), f"configure gave {answer}, not {len(spent)}"
        for item in spent:
            self._bury_item(item, "spent")

    def _pause(self, command: c.Pause, now: Moment, answer: Any) -> None:
        self.paused_lease = self.paused_lease if command.lease is None else command.lease
        self.paused_produce = self.paused_produce if command.produce is None else command.produce

    def _clear(self, command: c.Clear, now: Moment, answer: Any) -> None:
        chosen = [item for item in self.items if getattr(command, item.state.value, False)]
        assert answer == c.Counted(len(chosen)), f"clear gave {answer}, not {len(chosen)}"
        for holding in self.live() if command.leased else []:
            self._close(holding, list(holding.open), now)
        for item in chosen:
            self._resolve(item)

    def _seek(self, command: c.Seek, now: Moment, answer: Any) -> None:
        chosen = [item for item in self.items[command.offset :] if item.state is State.COMPLETED]
        assert answer == c.Counted(len(chosen)), f"seek gave {answer}, not {len(chosen)}"
        for item in chosen:
            item.lane, item.ttl_deadline = DEFAULT_PRIORITY, 0
            self._to_tail(item, now, position=item.offset)

    def _redrive(self, command: c.Redrive, now: Moment, answer: Any) -> None:
        buried = [item.offset for item in self.items if item.state is State.BURIED]
        chosen = buried if command.offsets is None else sorted(set(command.offsets))
        if not set(chosen) <= set(buried):
            assert isinstance(answer, InvalidRequest), f"an item that is not buried was redriven: {answer}"
            return
        assert answer == c.Counted(len(chosen)), f"redrive gave {answer}, not {len(chosen)}"
        for item in map(self.items.__getitem__, chosen):
            item.spared = bool(item.ttl_deadline and item.ttl_deadline <= now.elapsed)
            item.lane, item.attempts, item.reason = item.priority, 0, ""
            self._to_tail(item, now, position=item.offset if item.parked else None, cause=("redriven", 0, item.offset))
            item.parked = False

    # -- what happens to an item ---------------------------------------------------------------------

    def _to_tail(
        self, item: Item, now: Moment, *, position: int | None = None, cause: tuple[str, int, int] = ("", 0, 0)
    ) -> None:
        """Ready: behind everything that is, or (an item that was never late) at its own place in the log's order."""
        item.state, item.ready_since, item.jumps, item.returned = State.READY, now.elapsed, False, False
        item.position = len(self.items) if position is None else position
        item.arrival = (self.step, *cause) if position is None else (self.step, "", item.offset, 0)

    def _to_place(self, item: Item, now: Moment) -> None:
        """Back to its place, which is the first of its key unless an operator put others there meanwhile."""
        item.jumps = earlier_of_key(self.items, item) is not None
        item.returned = True
        item.state, item.ready_since = State.READY, now.elapsed

    def _come_back(self, item: Item, now: Moment, reason: str, delay: int, cause: tuple[str, int, int], *, counted: bool = True) -> None:
        """Without a key to the tail; with one it keeps its place, and a delay holds the key."""
        if counted:
            item.attempts += 1
            item.reason = reason
        if delay:
            item.state, item.due, item.at = State.SCHEDULED, now.elapsed + delay, 0
        elif item.key is None:
            self._to_tail(item, now, cause=cause)
        else:
            self._to_place(item, now)

    def _bury_item(self, item: Item, reason: str, *, counted: bool = False) -> None:
        item.attempts += counted
        item.state, item.reason, item.at, item.due, item.overdue = State.BURIED, reason, 0, 0, False
        item.parked = item.key is not None and self.policy.on_bury == "park"

    @staticmethod
    def _resolve(item: Item) -> None:
        item.state, item.attempts, item.reason, item.at, item.due = State.COMPLETED, 0, "", 0, 0
        item.overdue = item.parked = False

    # -- requests ------------------------------------------------------------------------------------

    def _known(self, request: bytes | None, now: Moment) -> Any:
        until, answer = self.answers.get(request, (0, None)) if request is not None else (0, None)
        return answer if until > now.elapsed else None

    def _remember(self, request: bytes | None, now: Moment, answer: Any) -> None:
        if request is not None:
            self.answers[request] = (now.elapsed + self.policy.remember, answer)
