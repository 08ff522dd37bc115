"""Random commands to a partition.

Owns: `RandomCommands`. It draws from the leases, keys and ids that were used before, so that commands are often valid
and sometimes stale.
"""

import random
from itertools import accumulate

import msgspec

from penstock.rules import commands as c
from penstock.rules import routing
from penstock.rules.calls import CallName
from penstock.rules.item_states import ItemState
from penstock.words.batch import Batch
from penstock.words.clock import HOUR, MINUTE, SECOND, Moment
from penstock.words.limits import MIB, Policy, Retention
from simulation.partition.model import PartitionModel
from simulation.partition.model_state import ModelLease
from simulation.simulation import RandomDraws

KEYS = [b"a", b"b", b"", b"customer-42", bytes(range(40))]
DEDUP_WINDOWS = {routing.digest(b"", b"two"): 2 * SECOND, routing.digest(b"", b"three"): 3 * HOUR}
"""The dedup ids whose items have a window of their own."""
STALE_LEASE = 77
KEEP_ALL = Retention(max_age=0, max_bytes=0)
WEIGHTS = {
    "produce": 26, "lease": 26, "complete": 20, "retry": 12, "bury": 4, "extend": 3, "repeat": 5,
    "configure": 2, "pause": 1, "resume": 2, "clear": 1, "seek": 1, "redrive": 3, "move_cursor": 1, "release_cursor": 1,
    "cancel": 2, "reschedule": 5,
}  # fmt: skip


_KINDS, _CUMULATIVE = list(WEIGHTS), list(accumulate(WEIGHTS.values()))
HABITS = ("keyed", "priority", "at", "ttl", "dedup", "text", "big", "request", "retention")


class RandomCommands(RandomDraws):
    """Draws the next command."""

    request_rate = 0.5

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, HABITS, KEYS)
        self._sent: list[c.Command] = []
        """Requests that may be repeated: of a session only the newest call."""
        self._calls = 0
        self._transfers = 0

    def policy(self) -> Policy:
        return Policy(
            lease_timeout=self.pick([1, 5, 30, 60]) * SECOND,
            max_attempts=self.pick([0, 1, 2, 3, 10]),
            ttl=self.pick([0, 0, 0, 20 * SECOND, 2 * MINUTE]),
            priority_aging=self.pick([0, 0, 5 * SECOND, 60 * SECOND]),
            dedup_window=self.pick([5 * SECOND, 1 * MINUTE, 1 * HOUR]),
            on_bury=self.pick(["release", "park"]),
            retention=self._retention() if self.rates["retention"] < 0.4 else KEEP_ALL,
        )

    def _retention(self) -> Retention:
        return Retention(self.pick([0, 1 * MINUTE, 3 * HOUR]), self.pick([0, 0, 1_000, 5_000]), self.pick([0, 0, 2]), self.pick([1, 2]))

    def command(self, model: PartitionModel, now: Moment) -> c.Command:
        """Draw the next command."""
        kind = self.rng.choices(_KINDS, cum_weights=_CUMULATIVE)[0]
        command: c.Command = getattr(self, "_" + kind)(model, now)
        if getattr(command, "calls", ()):
            self._sent = [other for other in self._sent if other.calls[0].session != command.calls[0].session or other is command]  # type: ignore[union-attr]
            self._sent.append(command)
        return command

    # -- consumers and producers -----------------------------------------------------------------------

    def _produce(self, model: PartitionModel, now: Moment) -> c.Produce:
        batch = self.batch(self.pick([1, 1, 2, 3, 6]), now)
        if self.happens(0.05):
            self._transfers += self.pick([0, 1])
            batch.dedups = batch.dedup_windows = None  # a repeated transfer is recognized by its sequence
            return c.Produce(batch, source=b"another queue", sequence=self._transfers)
        return c.Produce(batch, self.calls())

    def batch(self, count: int, now: Moment) -> Batch:
        keys = self.column(count, "keyed", lambda: self.pick(self.keys))
        dedups = self.column(count, "dedup", lambda: routing.digest(b"", self.pick([b"one", b"two", b"three", b"four"])))
        return Batch(
            [self._payload() for _ in range(count)],
            keys,
            routing.key_ids(keys) if keys else None,
            self.column(count, "text", lambda: msgspec.msgpack.encode({"trace": self.rng.randrange(1_000)})),
            self.column(count, "text", lambda: self.pick(["invoice", "", "mail"])),
            self.column(count, "text", lambda: self.pick(["json", "text"])),
            self.column(count, "text", lambda: f"reference {self.rng.randrange(9)}"),
            bytes(value if value is not None else 5 for value in priorities)
            if (priorities := self.column(count, "priority", lambda: self.rng.randrange(10)))
            else None,
            self._numbers(self.column(count, "at", lambda: now.wall + self.pick([-1 * HOUR, 50_000, 2 * SECOND, 40 * SECOND, 2 * HOUR]))),
            self._numbers(self.column(count, "ttl", lambda: self.pick([1, 10, 60, 7_200]) * SECOND)),
            dedups,
            dedup_windows=[0 if name is None else DEDUP_WINDOWS.get(name, 0) for name in dedups] if dedups else None,
        )

    @staticmethod
    def _numbers(column: list[int | None] | None) -> list[int] | None:
        return [value or 0 for value in column] if column else None

    def _payload(self) -> bytes:
        if self.happens(0.05 * self.rates["big"]):
            return bytes([self.rng.randrange(256)]) * self.rng.randrange(2_000)
        return self.rng.randbytes(self.rng.randrange(24))

    def _lease(self, model: PartitionModel, now: Moment) -> c.AcquireLease:
        timeout = self.pick([0, 0, 0, 2 * SECOND, 10 * MINUTE])
        per_key = self.pick([1, 1, 2, 3])
        return c.AcquireLease(self.pick([1, 2, 3, 10, 100]), self.pick(["", "host-1"]), timeout, per_key, self.calls())

    def _complete(self, model: PartitionModel, now: Moment) -> c.CompleteLeased:
        return c.CompleteLeased(*self._some_leased(model), self.calls())

    def _retry(self, model: PartitionModel, now: Moment) -> c.RetryLeased:
        delay = self.pick([0, 0, 1, 2 * SECOND, 30 * SECOND, 2 * HOUR])
        return c.RetryLeased(*self._some_leased(model), delay, self.pick(["", "timed out"]), self.happens(0.85), self.calls())

    def _bury(self, model: PartitionModel, now: Moment) -> c.BuryLeased:
        return c.BuryLeased(*self._some_leased(model), self.pick(["", "poison"]), self.calls())

    def _extend(self, model: PartitionModel, now: Moment) -> c.ExtendLease:
        return c.ExtendLease(self._some_lease(model).number, self.pick([0, 5 * SECOND, 5 * MINUTE]), self.calls())

    def calls(self) -> tuple[CallName, ...]:
        """The names of a new call: none, a request id, or the next call of a session."""
        name = self.request_id()
        if name is None or self.happens(0.5):
            return () if name is None else (CallName(name, 1, b"content"),)
        self._calls += 1
        return (CallName(self.pick([b"%016d" % session for session in range(4)]), self._calls),)

    def _repeat(self, model: PartitionModel, now: Moment) -> c.Command:
        """Repeat an earlier request with the same request id, as a caller does whose answer was lost."""
        return self.pick(self._sent[-12:]) if self._sent else self._produce(model, now)

    def _some_lease(self, model: PartitionModel) -> ModelLease:
        """Mostly a live lease; else one that ended, or one that never existed."""
        live = model.live()
        if live and self.happens(0.9):
            return self.pick(live)
        past = list(model.leases.values())[-8:]
        return self.pick(past) if past and self.happens(0.9) else ModelLease(STALE_LEASE, 0, 0, [], [], 0, 0)

    def _some_leased(self, model: PartitionModel) -> tuple[int, list[int] | None]:
        """A lease and some of its items, sometimes with an item that it does not hold."""
        lease = self._some_lease(model)
        if self.happens(0.5):
            return lease.number, None
        wanted = [offset for offset in lease.open + lease.done if self.happens(0.6)]
        if model.items and self.happens(0.1):
            wanted.append(self.rng.randrange(len(model.items)))
        self.rng.shuffle(wanted)
        return lease.number, list(dict.fromkeys(wanted)) or None

    # -- operators -------------------------------------------------------------------------------------

    def _configure(self, model: PartitionModel, now: Moment) -> c.Configure:
        other = self.policy()
        names = [name for name in Policy.__struct_fields__ if self.happens(0.5)]
        return c.Configure(msgspec.structs.replace(model.policy, **{name: getattr(other, name) for name in names}))

    def _pause(self, model: PartitionModel, now: Moment) -> c.Pause:
        return c.Pause(*self.pick([(True, None), (None, True), (True, True)]))

    def _resume(self, model: PartitionModel, now: Moment) -> c.Pause:
        return c.Pause(False, False)

    def _clear(self, model: PartitionModel, now: Moment) -> c.Clear:
        return c.Clear(*(self.happens(0.4) for _ in range(4)))

    def _seek(self, model: PartitionModel, now: Moment) -> c.Seek | c.SkipWaiting:
        kind = c.SkipWaiting if self.happens(0.4) else c.Seek
        return kind(self.rng.randrange(len(model.items) + 2))

    def _redrive(self, model: PartitionModel, now: Moment) -> c.Redrive:
        buried = [item.offset for item in model.items if item.state is ItemState.BURIED]
        if self.happens(0.4):
            return c.Redrive()
        chosen = [offset for offset in buried if self.happens(0.6)]
        if model.items and self.happens(0.05):
            chosen.append(self.rng.randrange(len(model.items)))
        return c.Redrive(chosen)

    def _cancel(self, model: PartitionModel, now: Moment) -> c.CancelWaiting:
        return c.CancelWaiting(self._some_items(model))

    def _reschedule(self, model: PartitionModel, now: Moment) -> c.RescheduleWaiting:
        at = now.wall + self.pick([-1 * HOUR, 50_000, 2 * SECOND, 40 * SECOND, 2 * HOUR])
        delay = self.pick([0, 1, 2 * SECOND, 30 * SECOND, 2 * HOUR])
        return c.RescheduleWaiting(self._some_items(model), *((at, 0) if self.happens(0.5) else (0, delay)))

    def _some_items(self, model: PartitionModel) -> list[int]:
        """Mostly items that wait; sometimes others, and one that does not exist."""
        waiting = [item.offset for item in model.items if item.waits]
        chosen = self.rng.sample(waiting, min(len(waiting), self.pick([1, 1, 2, 5])))
        if self.happens(0.2):
            chosen.append(self.rng.randrange(len(model.items) + 2))
        return chosen

    def _move_cursor(self, model: PartitionModel, now: Moment) -> c.PutCursor:
        return c.PutCursor(self.pick(["audit", "lake"]), self.rng.randrange(len(model.items) + 2))

    def _release_cursor(self, model: PartitionModel, now: Moment) -> c.ForgetCursor:
        return c.ForgetCursor(self.pick(["audit", "lake"]))

    # -- durations and sizes ---------------------------------------------------------------------------

    def pause_between_turns(self) -> int:
        return self.pick([0, 1, 50_000, 1 * SECOND, 3 * SECOND, 20 * SECOND, 90 * SECOND, 20 * MINUTE, 3 * HOUR])

    def segment_bytes(self) -> int:
        return self.pick([256, 1_000, 4_000, 1 * MIB])
