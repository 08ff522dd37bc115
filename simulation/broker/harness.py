"""Runs a real broker together with its model, on a simulated disk and a manual clock, and kills and reopens it.

Owns: `BrokerHarness`. It submits requests and runs every turn itself; turns of different queues interleave at random.
After every turn it looks up all items (inventory.py), lets the model check the answers, and compares both.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.loop.loop import Loop
from penstock.loop.partition_handle import SLOW_AFTER, PartitionHandle
from penstock.loop.partition_reader import PartitionReader
from penstock.loop.requests import LeaseResult, Request, StoredPart
from penstock.operations import ListQueues
from penstock.reports import QueueDescription
from penstock.rules.commands import Settled
from penstock.testing.clock import MicrosecondClock
from penstock.testing.disk import Fault, Halt
from penstock.words.clock import HOUR, MINUTE, SECOND
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, QueueNotFound, Refused, StorageFailed
from simulation.broker import damage
from simulation.broker.manual_broker import MOST_TURNS, loops_due, open_broker
from simulation.broker.model import BrokerModel
from simulation.broker.sent_requests import SentLease, SentProduce, SentRequest, SentSettle
from simulation.partition import checks
from simulation.simulated_machine import InterruptingClock, SimulatedMachine
from simulation.simulation import StepPrinter


class BrokerHarness(SimulatedMachine):
    """A broker and its model."""

    clock: InterruptingClock

    def __init__(self, seed: int, say: StepPrinter) -> None:
        super().__init__(seed + 1, InterruptingClock(), say)
        self.rng = random.Random(seed)
        self.model = BrokerModel(self.disk.undisturbed)
        self.model.wall = self.clock.read().wall
        self.model.inventory.reader_of = lambda incarnation, number: PartitionReader(
            self.broker.store.reader(incarnation, number), self.clock
        )
        self.segment_bytes = self.rng.choice([600, 2_000, 1 << 20])
        self._entropy = random.Random(seed + 2)
        self._pending: list[SentRequest] = []
        """Submitted and not answered."""
        self._answers: list[SentRequest] = []
        """Answered, and not checked yet."""
        self._unchecked: list[SentRequest] = []
        """Answered by a process that has ended, and not checked yet."""
        self._hanging: dict[tuple[int, int], int] = {}
        """(Queue, partition) → until when its disk does not answer."""
        self._in_io: dict[tuple[int, int], tuple[int, int]] = {}
        """Partitions that were in I/O at the last look → (the `io_since` that identifies this I/O, since when)."""
        self._too_early: list[str] = []
        """Messages about answers that were sent before the partitions they depend on were durable."""
        self._abandoned: list[SentLease] = []
        """Leases whose callers had gone: the next turn returns them, unless a fault comes first."""
        self._calls = 0
        self._open()

    @property
    def pending(self) -> list[SentRequest]:
        return self._pending

    # -- requests --------------------------------------------------------------------------------------

    def submit(self, sent: SentRequest) -> None:
        """Submit a request to its queue."""
        self._prepare(sent)
        try:
            self.broker.loop(sent.incarnation).submit(sent.request)
        except (QueueNotFound, BrokerClosed) as error:
            sent.request.finish(error=error)
        self._observe_and_check()

    def call(self, sent: SentRequest) -> None:
        """Run a request in a turn of the calling thread. If that is interrupted, its own answer is lost, but no other
        one."""
        self._prepare(sent)
        self.model.inventory.changed.add(sent.incarnation)
        try:
            self.broker.run_request(sent.incarnation, sent.request)
        except KeyboardInterrupt:
            self._forget_request(sent)
            self.model.answer_lost(sent)
            self._run_next_turn(sent.incarnation)
        except PenstockError as error:
            sent.request.finish(error=error)  # no effect if that was its answer already
        self._observe_and_check()

    def _prepare(self, sent: SentRequest) -> None:
        self.say("   %s", sent)
        self._calls += 1
        sent.make(MicrosecondClock.read(self.clock).elapsed, self._calls)  # not self.clock.read: only the turn may be interrupted
        sent.request.on_done = partial(self._record_answer, sent)
        sent.no_file_failed = not self.disk.failure_pending
        sent.no_failure_expected = self.model.inventory.all_healthy and sent.no_file_failed
        self._pending.append(sent)
        self.model.request_sent(sent)

    def _record_answer(self, sent: SentRequest, request: Request) -> None:
        """Record an answer, once."""
        if request is sent.request and sent not in self._answers:
            sent.answered_at = self.model.now
            self._answers.append(sent)
            self._check_durable(sent)

    def cancel(self, sent: SentRequest) -> None:
        """Cancel a request: its caller has gone and does not get the answer."""
        self.say("   gone: %s", sent)
        if isinstance(sent, SentLease) and (sent.ran_at is not None or not self.model.inventory.all_healthy):
            # its items are returned when its answer is ready; the next process may find a lease whose write failed
            self.model.leases.answer_lost(sent)
        with suppress(QueueNotFound, BrokerClosed):
            self.broker.loop(sent.incarnation).cancel(sent.request)
        self._forget_request(sent)

    def _forget_request(self, sent: SentRequest) -> None:
        """Forget a request: its answer is not checked."""
        self._pending = [other for other in self._pending if other is not sent]
        self._answers = [other for other in self._answers if other is not sent]
        sent.request.on_done = None

    def submit_and_abandon(self, sent: SentLease) -> None:
        """Submit a lease request, run a turn and cancel it, as if its caller had gone in between."""
        self._abandoned.append(sent)
        self.model.leases.lost += 1
        sent.make(self.broker.clock.read().elapsed)
        self.broker.loop(sent.incarnation).submit(sent.request)
        for loop in self.broker.loops():
            if loop.engine.incarnation == sent.incarnation:
                self.model.inventory.changed.add(sent.incarnation)
                loop.turn()
        if not sent.request.done:  # it waits for a disk: its items are returned when the disk has answered
            self.model.leases.answer_lost(sent)
        self.cancel(sent)
        if self.disk.fault_pending or not self.model.inventory.all_healthy:
            self._doubt_abandoned()
        self._observe_and_check()

    def _doubt_abandoned(self) -> None:
        """A fault may prevent that abandoned leases are returned: the model must not rely on it."""
        for sent in self._abandoned:
            self.model.leases.answer_lost(sent)
        self._abandoned.clear()

    def operate(
        self, what: str, action: Callable[[], Any], then: Callable[[Any], None] | None = None, queue: int | None = None, leads: int = 0
    ) -> Any:
        """Run an administrative operation at once, in a turn with the queue's pending requests; returns its answer or
        error.

        `then` gets the answer before other answers are checked. `queue`: the queue that it changes, or None for all.
        `leads`: the queue whose turn it runs, if that is not `queue`.
        """
        answer: Any
        try:
            answer = action()
        except PenstockError as error:
            answer = error
        except KeyboardInterrupt:
            answer = OutcomeUnknown("the operator was interrupted")
            self._run_next_turn(leads or queue)
        self.say("   %s → %.300r", what, answer)
        assert "please report it" not in str(answer), f"{what} was answered with an internal error: {answer}"
        self.model.inventory.changed.update(
            loop.engine.incarnation for loop in self.broker.loops() if queue in (None, loop.engine.incarnation)
        )
        self._observe_and_check(lambda: then(answer) if then is not None else None)
        return answer

    # -- hanging disks ---------------------------------------------------------------------------------

    def hang_disk(self, incarnation: int, partition: int, duration: int) -> None:
        """Let the disk of a partition hang for this long."""
        self.say("   the disk of partition %d of %x hangs for %s s", partition, incarnation, duration / SECOND)
        self._hanging[incarnation, partition] = self.model.now + duration

    def let_disks_answer(self, incarnation: int) -> None:
        """End the hanging of a queue's disks."""
        self._hanging = {owner: until for owner, until in self._hanging.items() if owner[0] != incarnation}

    def _follow_disks(self) -> None:
        """Record which partitions began and ended I/O. When a slow one has ended, run a turn of its queue at once, as a
        runner does."""
        for loop in self.broker.loops():
            loop.stays_in_io = partial(self._hangs, loop.engine.incarnation)
            if self._see_finished_io(loop):
                self.model.inventory.changed.add(loop.engine.incarnation)
                try:
                    loop.turn()
                except KeyboardInterrupt:
                    self._run_next_turn(loop.engine.incarnation)
                self._see_finished_io(loop)

    def _hangs(self, incarnation: int, handle: PartitionHandle) -> bool:
        return self._hanging.get((incarnation, handle.number), 0) > self.model.now

    def _see_finished_io(self, loop: Loop) -> bool:
        """Record which partitions of a queue are in I/O; returns whether a slow one has ended its I/O without an
        error."""
        incarnation, now, slow = loop.engine.incarnation, self.model.now, False
        in_io = {(incarnation, handle.number): handle for handle in loop.manual_io}
        for owner in [owner for owner in self._in_io if owner[0] == incarnation]:
            began, since = self._in_io[owner]
            if owner in in_io and in_io[owner].io_since == began:
                continue
            del self._in_io[owner]
            handle = loop.engine.handles.get(owner[1])
            if now - since >= SLOW_AFTER and handle is not None and (owner in in_io or handle.is_usable):
                self.model.leases.postpone_expiry(owner, since, sure=not self.disk.fault_pending)
                slow = True
        for sent in self._pending:
            if sent.incarnation == incarnation:
                sent.no_failure_expected = sent.no_failure_expected and not in_io
        for owner, handle in in_io.items():
            self._in_io.setdefault(owner, (handle.io_since, now))
        self._see_awaited(loop)
        return slow

    def _see_awaited(self, loop: Loop) -> None:
        """Record for which partitions each answer still waits. Others may be in I/O again, for a later turn, before it
        is sent."""
        sent_by = {id(sent.request): sent for sent in self._pending if sent.incarnation == loop.engine.incarnation}
        for sent in sent_by.values():
            sent.awaits = set()
        for handle in loop.engine.handles_in_io.values():
            if handle.in_io and handle not in loop.engine.io_finished:
                for waiting in handle.pending_answers:
                    found = sent_by.get(id(waiting.request))
                    if found is not None:
                        found.ran_at = self.model.now if found.ran_at is None else found.ran_at
                        found.awaits.add(handle.number)

    def _check_durable(self, sent: SentRequest) -> None:
        """Check that no answer depends on a partition whose I/O has not ended."""
        loop = next((loop for loop in self.broker.loops() if loop.engine.incarnation == sent.incarnation), None)
        answer = sent.request.answer
        if loop is None or sent.request.error is not None or not isinstance(answer, list):
            return
        depends_on = [
            one.partition for one in answer if isinstance(one, LeaseResult) or (isinstance(one, StoredPart) and one.stored is not None)
        ]
        if isinstance(sent, SentSettle):
            depends_on = [held.partition for (held, _), one in zip(sent.parts, answer, strict=True) if isinstance(one, Settled)]
        unsure = (
            depends_on if sent.ran_at is None else sent.awaits.intersection(depends_on)
        )  # the others have committed it, and may be in I/O again
        in_io = [number for number in unsure if number in loop.engine.handles and loop.engine.handles[number].in_io]
        if in_io:
            self._too_early.append(f"{sent} was answered while partitions {in_io} were in I/O: {answer!r:.200}")

    # -- turns -----------------------------------------------------------------------------------------

    def turn(self, loop: Loop) -> None:
        """Run one turn of a queue."""
        self.say("   turn of %s", loop.engine.name)
        self.model.inventory.changed.add(loop.engine.incarnation)
        try:
            loop.turn()
        except KeyboardInterrupt:
            self._run_next_turn(loop.engine.incarnation)
        self._observe_and_check()

    def _run_next_turn(self, queue: int | None) -> None:
        """After an interrupt in a turn, run the queue's next turn, with all pending requests."""
        self.say("   interrupted")
        self.forget_interrupts()
        for loop in self.broker.loops():
            if loop.engine.incarnation == queue:
                self._see_awaited(loop)
                loop.turn()

    def loops_due(self) -> list[Loop]:
        """Queues that have a turn due now."""
        return loops_due(self.broker)

    def run_until_idle(self) -> None:
        """Run turns of random queues until no queue has one due."""
        for _ in range(MOST_TURNS):
            loops = self.loops_due()
            if not loops:
                break
            self.turn(self.rng.choice(loops))
        else:
            raise AssertionError(f"{self.loops_due()} run turns without end")
        self._abandoned.clear()
        self.model.check_idle(self.broker.loops(), self._pending, self.broker.clock.read().elapsed, troubled=self.disk.fault_pending)

    def recover_all(self) -> None:
        """Remove all faults, then run turns and advance time until no partition fails and every transfer has
        arrived."""
        self.disk.remove_all_faults()
        self._hanging.clear()
        for _ in range(12):
            self.run_until_idle()
            if self.model.is_idle(self.broker.loops()):
                break
            self.advance(1 * SECOND)
        self.model.check_recovered(self.broker.loops())

    def advance(self, duration: int) -> None:
        for sent in [sent for sent in self._pending if not sent.first and not self.model.remembers(sent, duration)]:
            self.cancel(sent)  # callers do not wait for a repeated request beyond the time that the broker remembers it
            self.model.answer_lost(sent)
        self.say("   %s s pass", duration / SECOND)
        self.clock.advance(duration)
        self.model.pass_time(duration, self.clock.read().wall)

    def step_wall(self, step: int) -> None:
        self.model.date_set_at = self.model.now
        self.clock.step_wall(step)
        self.model.pass_time(0, self.clock.read().wall)

    def _observe_and_check(self, effect: Callable[[], None] | None = None) -> None:
        """Look up everything that changed, check every new answer, and compare broker and model."""
        self._follow_disks()
        assert not self._too_early, self._too_early[0]
        if not self.model.inventory.changed and not self._answers and effect is None:
            return
        model = self.model
        model.inventory.look(self.broker.loops())
        if effect is not None:
            effect()
        model.follow()
        answers, self._answers = self._answers, []
        for sent in answers:
            self._pending = [other for other in self._pending if other is not sent]
            self.say("   answer to %s: %.400r", sent, sent.request.error or sent.request.answer)
            model.check_answer(sent)
            self._check_no_failure(sent)
            self._check_failures(sent)
        model.compare()

    def _check_no_failure(self, sent: SentRequest) -> None:
        """No caller gets a storage error, or `OutcomeUnknown`, only because another caller was interrupted."""
        wrong = _storage_errors(sent)
        late = sent.ran_at is not None and sent.ran_at + SLOW_AFTER <= self.model.now
        assert late or not (wrong and sent.no_failure_expected), f"no file call failed, and yet {sent} was answered with {wrong[0]!r}"

    def _check_failures(self, sent: SentRequest) -> None:
        """Check storage errors of a request since which no file call failed: partitions were failing or in I/O before.

        Such errors must be retryable, and a produce that may use any partition must have used a healthy one.
        """
        partitions = self.model.inventory.partitions
        for error in _storage_errors(sent) if sent.no_file_failed else ():
            if isinstance(error, OutcomeUnknown):
                assert sent.repeats_call or (sent.ran_at is not None and sent.ran_at < self.model.now), (
                    f"{sent} did not wait for a disk and was answered with {error!r}"
                )
                continue
            assert error.retryable, f"{sent} was answered with an error that is not retryable: {error!r}"
            asked = "cannot be asked" not in str(error)  # else a request id may be known to a partition that was never open
            if isinstance(sent, SentProduce) and sent.anywhere and asked and sent.ran_at is None and sent.incarnation in self.model.queues:
                active = [partitions.get((sent.incarnation, number)) for number in self.model.queues[sent.incarnation].active]
                free = [seen for seen in active if seen is not None and seen.was_healthy and seen.takes_items]
                assert not free, f"{sent} was refused though {len(free)} partitions could take its items: {error!r}"

    def replay(self) -> None:
        """Check that replaying every log gives its partition's state."""
        with self.disk.undisturbed():
            for loop in self.broker.loops():
                for handle in loop.engine.handles.values():
                    checks.check_replay(handle.usable_partition)

    # -- faults ----------------------------------------------------------------------------------------

    def inject_fault(self, fault: Fault, ahead: int) -> None:
        """Make the file call after `ahead` more calls meet this fault."""
        self._expect(fault)
        super().inject_fault(fault, ahead)

    def arm_after_sync(self, path: str, fault: Fault, ahead: int) -> None:
        """Put a fault `ahead` calls after the next sync of a file whose path contains `path`."""
        self.say("   call %d after a sync of %s will meet %s", ahead, path, fault)
        self._expect(fault)
        self.disk.fail_after_sync(path, fault, ahead)

    def _expect(self, fault: Fault) -> None:
        self._doubt_abandoned()
        if fault != "interrupt":
            self.expect_failures()

    def fill_disk(self, free_bytes: int) -> None:
        self._doubt_abandoned()
        self.expect_failures()
        self.disk.set_free_bytes(free_bytes)

    def expect_failures(self) -> None:
        """Pending requests may from now on be answered with storage errors."""
        for sent in (*self._pending, *self._answers):
            sent.no_failure_expected = sent.no_file_failed = False

    def interrupt_at_clock(self, ahead: int) -> None:
        """Raise `KeyboardInterrupt` at the clock read after `ahead` more reads."""
        self.say("   interrupted after %d more reads of the clock", ahead)
        self._doubt_abandoned()
        self.clock.interrupt_after = ahead

    def forget_interrupts(self) -> None:
        """Remove all planned interrupts."""
        self.clock.interrupt_after = None
        self.disk.drop_interrupts()

    def damage_a_copy(self, rng: random.Random) -> None:
        """Damage a copy of this broker and check that the undamaged items are served."""
        damage.check_damaged_copy(self.disk, self.clock, self.segment_bytes, rng, self.say)

    def crash_and_reopen(self, power: bool) -> None:
        """End the process and open the broker in a new one."""
        self._end_process(power)
        self._open()

    def _end_process(self, power: bool) -> None:
        """End the process: answers that were sent are kept to be checked; pending requests may have been executed or
        not."""
        self.forget_interrupts()
        self.expect_failures()
        self._doubt_abandoned()
        self._unchecked, self._answers = self._answers, []
        for sent in self._pending:
            if sent not in self._unchecked:
                self.model.answer_lost(sent)
        self._pending.clear()
        self.model.leases.look_back(self.broker.loops())
        if power:
            downtime = self.rng.choice([0, MINUTE, HOUR])
            self.cut_power(downtime)
            self.model.rebooted(downtime, self.clock.read().wall, power=True)
        else:
            self.kill_process()

    def restart(self, reboot: int | None) -> None:
        """Close and open again, after a reboot that took `reboot` (None: no reboot)."""
        try:
            self.broker.close()
        except (StorageFailed, OutcomeUnknown) as error:
            self.say("   closing: %r", error)
            self.crash_and_reopen(power=False)
            return
        self._unchecked, self._answers = self._answers, []
        self.model.leases.look_back(self.broker.loops())
        for sent in self._pending:
            assert sent in self._unchecked, f"{sent} was not answered when the broker was closed"
        self._pending.clear()
        if reboot is not None:
            self.clock.reboot(reboot)
            self.model.rebooted(reboot, self.clock.read().wall, power=False)
        self._open()

    def _open(self) -> None:
        while True:
            try:
                self.broker = open_broker(self.disk, self.clock, self._entropy, self.segment_bytes)
                break
            except Halt:
                power = self.rng.random() < 0.5
                if power:
                    self.disk.crash()
                    self.clock.reboot(MINUTE)
                    self.model.rebooted(MINUTE, self.clock.read().wall, power=True)
                else:
                    self.disk.kill()
            except (StorageFailed, OutcomeUnknown) as error:
                self.say("   opening: %r", error)
                self.disk.remove_all_faults()
                self.disk.kill()
        self._in_io.clear()
        queues: list[QueueDescription] = self.broker.call(ListQueues())
        self.model.opened(queues)
        self.model.inventory.changed.update(loop.engine.incarnation for loop in self.broker.loops())
        self._answers, self._unchecked = self._unchecked, []
        self._observe_and_check()
        self.model.last_answers_checked()


def _storage_errors(sent: SentRequest) -> list[StorageFailed | OutcomeUnknown]:
    """The storage errors and unknown outcomes in an answer."""
    found = sent.request.answer if isinstance(sent.request.answer, list) else []
    refused = [one.refused if isinstance(one, StoredPart) else one for one in found]
    errors = [sent.request.error, *(one.error() for one in refused if isinstance(one, Refused))]
    return [error for error in errors if isinstance(error, StorageFailed | OutcomeUnknown)]
