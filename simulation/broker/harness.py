"""A broker that is killed and opened again, on a simulated disk, under a manual clock, every turn run by hand, beside its model.

Owns: `BrokerHarness`. Requests are put into a queue's inbox and answered by whichever turn comes; turns of different queues interleave
at random. After every turn the census is taken, the answers that were seen are judged by the model, and both must agree.
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
from penstock.testing.clock import ManualClock
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
        self.model.census.reader_of = lambda incarnation, number: PartitionReader(self.broker.store.reader(incarnation, number), self.clock)
        self.segment_bytes = self.rng.choice([600, 2_000, 1 << 20])
        self._entropy = random.Random(seed + 2)
        self._pending: list[SentRequest] = []
        """Put into an inbox and not answered."""
        self._answers: list[SentRequest] = []
        """Answered, and not judged yet."""
        self._unjudged: list[SentRequest] = []
        """Answered by a process that is gone, and not judged yet."""
        self._held_up: dict[tuple[int, int], int] = {}
        """Queue and partition → until when its disk does not answer."""
        self._out: dict[tuple[int, int], tuple[int, int]] = {}
        """Partitions that were out at the last look: what tells one time from the next, and since when."""
        self._too_early: list[str] = []
        """Answers that came before what they rest on was durable."""
        self._missed: list[SentLease] = []
        """LeaseModel whose callers were gone: they go back in the next turn, if nothing happens before."""
        self._open()

    @property
    def pending(self) -> list[SentRequest]:
        return self._pending

    # -- what is asked of the broker -----------------------------------------------------------------

    def submit(self, sent: SentRequest) -> None:
        """Put a request into the inbox of its queue."""
        self._ready(sent)
        try:
            self.broker.loop(sent.incarnation).submit(sent.request)
        except (QueueNotFound, BrokerClosed) as error:
            sent.request.finish(error=error)
        self._observe_and_check()

    def call(self, sent: SentRequest) -> None:
        """A caller runs the turn itself. It may be interrupted; then it never learns its answer, but all others learn theirs."""
        self._ready(sent)
        self.model.census.changed.add(sent.incarnation)
        try:
            self.broker.run_request(sent.incarnation, sent.request)
        except KeyboardInterrupt:
            self._drop(sent)
            self.model.lost(sent)
            self._go_on(sent.incarnation)
        except PenstockError as error:
            sent.request.finish(error=error)  # unless that is what it was answered
        self._observe_and_check()

    def _ready(self, sent: SentRequest) -> None:
        self.say("   %s", sent)
        sent.make(ManualClock.read(self.clock).elapsed)  # an interrupt is for whoever runs the turn
        sent.request.on_done = partial(self._note, sent)
        sent.no_file_failed = not self.disk.failure_pending
        sent.no_failure_expected = self.model.census.all_healthy and sent.no_file_failed
        self._pending.append(sent)
        self.model.sending(sent)

    def _note(self, sent: SentRequest, request: Request) -> None:
        """An answer is there; whoever is told twice notes it once."""
        if request is sent.request and sent not in self._answers:
            self._answers.append(sent)
            self._check_landed(sent)

    def cancel(self, sent: SentRequest) -> None:
        """The caller is gone and will not see the answer."""
        self.say("   gone: %s", sent)
        if isinstance(sent, SentLease) and sent.ran_at is not None:  # what it was given goes back when the answer is there
            self.model.leases.unknown(sent)
        with suppress(QueueNotFound, BrokerClosed):
            self.broker.loop(sent.incarnation).cancel(sent.request)
        self._drop(sent)

    def _drop(self, sent: SentRequest) -> None:
        """Nobody will see its answer."""
        self._pending = [other for other in self._pending if other is not sent]
        self._answers = [other for other in self._answers if other is not sent]
        sent.request.on_done = None

    def submit_and_abandon(self, sent: SentLease) -> None:
        """A turn answers a request whose caller has just gone."""
        self._missed.append(sent)
        self.model.leases.lost += 1
        sent.make(self.broker.clock.read().elapsed)
        self.broker.loop(sent.incarnation).submit(sent.request)
        for loop in self.broker.loops():
            if loop.engine.incarnation == sent.incarnation:
                self.model.census.changed.add(sent.incarnation)
                loop.turn()
        if not sent.request.done:  # it waits for a disk: what it was given goes back when that has answered
            self.model.leases.unknown(sent)
        self.cancel(sent)
        if self.disk.fault_pending or not self.model.census.all_healthy:
            self._doubt_missed()
        self._observe_and_check()

    def _doubt_missed(self) -> None:
        """Nobody may come to take back what somebody else did not take."""
        for sent in self._missed:
            self.model.leases.unknown(sent)
        self._missed.clear()

    def operate(
        self, what: str, action: Callable[[], Any], then: Callable[[Any], None] | None = None, queue: int | None = None, leads: int = 0
    ) -> Any:
        """An operator's word: done at once, with whatever waits in that queue. `then` is told of the answer before others are judged.

        It is a matter of one queue, or (None) perhaps of all; the turn that it runs is that of the queue `leads`, if not of `queue`.
        """
        answer: Any
        try:
            answer = action()
        except PenstockError as error:
            answer = error
        except KeyboardInterrupt:
            answer = OutcomeUnknown("the operator was interrupted")
            self._go_on(leads or queue)
        self.say("   %s → %.300r", what, answer)
        assert "please report this" not in str(answer), f"{what} was answered with a mistake of ours: {answer}"
        self.model.census.changed.update(
            loop.engine.incarnation for loop in self.broker.loops() if queue in (None, loop.engine.incarnation)
        )
        self._observe_and_check(lambda: then(answer) if then is not None else None)
        return answer

    # -- disks that take their time ------------------------------------------------------------------

    def hang_disk(self, incarnation: int, partition: int, duration: int) -> None:
        """Let the disk of a partition not answer for this long."""
        self.say("   the disk of partition %d of %x hangs for %s s", partition, incarnation, duration / SECOND)
        self._held_up[incarnation, partition] = self.model.now + duration

    def let_disks_answer(self, incarnation: int) -> None:
        """The disks of a queue hang no longer."""
        self._held_up = {owner: until for owner, until in self._held_up.items() if owner[0] != incarnation}

    def _follow_disks(self) -> None:
        """See which partitions went out and which came back. After a slow one is back its queue runs a turn at once, as a runner would."""
        for loop in self.broker.loops():
            loop.stays_in_io = partial(self._hangs, loop.engine.incarnation)
            if self._see_landed(loop):
                self.model.census.changed.add(loop.engine.incarnation)
                try:
                    loop.turn()
                except KeyboardInterrupt:
                    self._go_on(loop.engine.incarnation)
                self._see_landed(loop)

    def _hangs(self, incarnation: int, member: PartitionHandle) -> bool:
        return self._held_up.get((incarnation, member.number), 0) > self.model.now

    def _see_landed(self, loop: Loop) -> bool:
        """Note who is out, and for which answers; whether a slow one came back, in order."""
        incarnation, now, slow = loop.engine.incarnation, self.model.now, False
        out = {(incarnation, member.number): member for member in loop.manual_io}
        for owner in [owner for owner in self._out if owner[0] == incarnation]:
            went, since = self._out[owner]
            if owner in out and out[owner].io_since == went:
                continue
            del self._out[owner]
            member = loop.engine.handles.get(owner[1])
            if now - since >= SLOW_AFTER and member is not None and (owner in out or member.is_usable):
                self.model.leases.postpone_expiry(owner, since, sure=not self.disk.fault_pending)
                slow = True
        for sent in self._pending:
            if sent.incarnation == incarnation:
                sent.no_failure_expected = sent.no_failure_expected and not out
        for owner, member in out.items():
            self._out.setdefault(owner, (member.io_since, now))
        self._see_awaited(loop)
        return slow

    def _see_awaited(self, loop: Loop) -> None:
        """Note for which partitions each answer still waits: others that it rests on have landed, and may go out again before it leaves."""
        sent_by = {id(sent.request): sent for sent in self._pending if sent.incarnation == loop.engine.incarnation}
        for sent in sent_by.values():
            sent.awaits = set()
        for member in loop.engine.handles_in_io.values():
            if member.in_io and member not in loop.engine.io_finished:
                for waiting in member.pending_answers:
                    found = sent_by.get(id(waiting.request))
                    if found is not None:
                        found.ran_at = self.model.now if found.ran_at is None else found.ran_at
                        found.awaits.add(member.number)

    def _check_landed(self, sent: SentRequest) -> None:
        """No answer speaks of a partition that is out."""
        loop = next((loop for loop in self.broker.loops() if loop.engine.incarnation == sent.incarnation), None)
        answer = sent.request.answer
        if loop is None or sent.request.error is not None or not isinstance(answer, list):
            return
        rests_on = [
            one.partition for one in answer if isinstance(one, LeaseResult) or (isinstance(one, StoredPart) and one.stored is not None)
        ]
        if isinstance(sent, SentSettle):
            rests_on = [held.partition for (held, _), one in zip(sent.parts, answer, strict=True) if isinstance(one, Settled)]
        unsure = rests_on if sent.ran_at is None else sent.awaits.intersection(rests_on)  # the others have landed, and may be out again
        out = [number for number in unsure if number in loop.engine.handles and loop.engine.handles[number].in_io]
        if out:
            self._too_early.append(f"{sent} was answered while partitions {out} were out: {answer!r:.200}")

    # -- turns ---------------------------------------------------------------------------------------

    def turn(self, loop: Loop) -> None:
        """One turn of one queue."""
        self.say("   turn of %s", loop.engine.name)
        self.model.census.changed.add(loop.engine.incarnation)
        try:
            loop.turn()
        except KeyboardInterrupt:
            self._go_on(loop.engine.incarnation)
        self._observe_and_check()

    def _go_on(self, queue: int | None) -> None:
        """Whoever ran a turn of a queue was interrupted: somebody else runs the next one, with everybody's requests."""
        self.say("   interrupted")
        self.forget_interrupts()
        for loop in self.broker.loops():
            if loop.engine.incarnation == queue:
                self._see_awaited(loop)
                loop.turn()

    def wanting(self) -> list[Loop]:
        """Queues that would run a turn by themselves now."""
        return loops_due(self.broker)

    def run_until_idle(self) -> None:
        """Run turns, in any order, until no queue wants one."""
        for _ in range(MOST_TURNS):
            loops = self.wanting()
            if not loops:
                break
            self.turn(self.rng.choice(loops))
        else:
            raise AssertionError(f"{self.wanting()} find no rest")
        self._missed.clear()
        self.model.at_rest(self.broker.loops(), self._pending, self.broker.clock.read().elapsed, troubled=self.disk.fault_pending)

    def recover_all(self) -> None:
        """Nothing goes wrong for a while: what fails is tried again, what is under way arrives."""
        self.disk.remove_all_faults()
        self._held_up.clear()
        for _ in range(12):
            self.run_until_idle()
            if self.model.is_idle(self.broker.loops()):
                break
            self.advance(1 * SECOND)
        self.model.check_calm(self.broker.loops())

    def advance(self, duration: int) -> None:
        for sent in [sent for sent in self._pending if not sent.first and not self.model.remembers(sent, duration)]:
            self.cancel(sent)  # whoever repeats a request does not wait until it is forgotten
            self.model.lost(sent)
        self.say("   %s s pass", duration / SECOND)
        self.clock.advance(duration)
        self.model.pass_time(duration, self.clock.read().wall)

    def step_wall(self, step: int) -> None:
        self.model.date_set_at = self.model.now
        self.clock.step_wall(step)
        self.model.pass_time(0, self.clock.read().wall)

    def _observe_and_check(self, effect: Callable[[], None] | None = None) -> None:
        """Look at everything that has changed and judge every answer."""
        self._follow_disks()
        assert not self._too_early, self._too_early[0]
        if not self.model.census.changed and not self._answers and effect is None:
            return
        model = self.model
        model.census.look(self.broker.loops())
        if effect is not None:
            effect()
        model.follow()
        answers, self._answers = self._answers, []
        for sent in answers:
            self._pending = [other for other in self._pending if other is not sent]
            self.say("   answer to %s: %.400r", sent, sent.request.error or sent.request.answer)
            model.check_answer(sent)
            self._check_quiet(sent)
            self._check_calm(sent)
        model.compare()

    def _check_quiet(self, sent: SentRequest) -> None:
        """Nobody is told of a failed disk, or that nobody knows, because somebody else was interrupted."""
        wrong = _troubles(sent)
        late = sent.ran_at is not None and sent.ran_at + SLOW_AFTER <= self.model.now
        assert late or not (wrong and sent.no_failure_expected), f"no file call failed, and yet {sent} was answered with {wrong[0]!r}"

    def _check_calm(self, sent: SentRequest) -> None:
        """While partitions are out or fail, and no file call has failed since: whoever is refused may ask again, or went elsewhere."""
        partitions = self.model.census.partitions
        for error in _troubles(sent) if sent.no_file_failed else ():
            if isinstance(error, OutcomeUnknown):
                assert sent.ran_at is not None and sent.ran_at < self.model.now, f"{sent} did not wait for a disk and was told {error!r}"
                continue
            assert error.retryable, f"{sent} was told not to ask again: {error!r}"
            if isinstance(sent, SentProduce) and sent.anywhere and sent.ran_at is None and sent.incarnation in self.model.queues:
                active = [partitions.get((sent.incarnation, number)) for number in self.model.queues[sent.incarnation].active]
                free = [seen for seen in active if seen is not None and seen.was_healthy and seen.takes_items]
                assert not free, f"{sent} was refused though {len(free)} partitions could take its items: {error!r}"

    def replay(self) -> None:
        """Every log tells what its partition knows."""
        with self.disk.undisturbed():
            for loop in self.broker.loops():
                for member in loop.engine.handles.values():
                    checks.check_replay(member.usable_partition)

    # -- bad luck ------------------------------------------------------------------------------------

    def inject_fault(self, fault: Fault, ahead: int) -> None:
        """One of the next file calls will go wrong."""
        self._expect(fault)
        super().inject_fault(fault, ahead)

    def arm_after_sync(self, path: str, fault: Fault, ahead: int) -> None:
        """A file call soon after the next sync of such a file will go wrong."""
        self.say("   call %d after a sync of %s will meet %s", ahead, path, fault)
        self._expect(fault)
        self.disk.fail_after_sync(path, fault, ahead)

    def _expect(self, fault: Fault) -> None:
        self._doubt_missed()
        if fault != "interrupt":
            self.expect_failures()

    def fill_disk(self, free_bytes: int) -> None:
        self._doubt_missed()
        self.expect_failures()
        self.disk.set_free_bytes(free_bytes)

    def expect_failures(self) -> None:
        """Whoever waits for an answer may be told of trouble."""
        for sent in (*self._pending, *self._answers):
            sent.no_failure_expected = sent.no_file_failed = False

    def interrupt_at_clock(self, ahead: int) -> None:
        """Whoever reads the clock then is interrupted."""
        self.say("   interrupted after %d more looks at the clock", ahead)
        self._doubt_missed()
        self.clock.interrupt_after = ahead

    def forget_interrupts(self) -> None:
        """Nobody is interrupted any more."""
        self.clock.interrupt_after = None
        self.disk.drop_interrupts()

    def damage_a_copy(self, rng: random.Random) -> None:
        """A broker like this one, of whose items some are damaged: the others are served."""
        damage.check_damaged_copy(self.disk, self.clock, self.segment_bytes, rng, self.say)

    def crash_and_reopen(self, power: bool) -> None:
        """The process ends here; then another one finds what there is."""
        self._end(power)
        self._open()

    def _end(self, power: bool) -> None:
        """What was answered was answered; what was not is nobody's to know."""
        self.forget_interrupts()
        self.expect_failures()
        self._doubt_missed()
        self._unjudged, self._answers = self._answers, []
        for sent in self._pending:
            if sent not in self._unjudged:
                self.model.lost(sent)
        self._pending.clear()
        self.model.leases.look_back(self.broker.loops())
        if power:
            downtime = self.rng.choice([0, MINUTE, HOUR])
            self.cut_power(downtime)
            self.model.rebooted(downtime, self.clock.read().wall, power=True)
        else:
            self.kill_process()

    def restart(self, reboot: int | None) -> None:
        """Close and open again, perhaps after a reboot that took so long."""
        try:
            self.broker.close()
        except (StorageFailed, OutcomeUnknown) as error:
            self.say("   closing: %r", error)
            self.crash_and_reopen(power=False)
            return
        self._unjudged, self._answers = self._answers, []
        self.model.leases.look_back(self.broker.loops())
        for sent in self._pending:
            assert sent in self._unjudged, f"{sent} was not answered when the broker was closed"
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
        self._out.clear()
        queues: list[QueueDescription] = self.broker.call(ListQueues())
        self.model.opened(queues)
        self.model.census.changed.update(loop.engine.incarnation for loop in self.broker.loops())
        self._answers, self._unjudged = self._unjudged, []
        self._observe_and_check()
        self.model.decided()


def _troubles(sent: SentRequest) -> list[StorageFailed | OutcomeUnknown]:
    """What a caller was told of a storage that failed, or of something that nobody knows."""
    found = sent.request.answer if isinstance(sent.request.answer, list) else []
    refused = [one.refused if isinstance(one, StoredPart) else one for one in found]
    errors = [sent.request.error, *(one.error() for one in refused if isinstance(one, Refused))]
    return [error for error in errors if isinstance(error, StorageFailed | OutcomeUnknown)]
