"""The consumer right: while one has it, nobody else leases from the queue."""

from pathlib import Path

import pytest

import penstock
from penstock.broker.embedded import Embedded
from penstock.errors import QueueHeld, QueueNotFound
from penstock.logs.files.filesystem import SystemFiles
from penstock.operations import EndStream, FindQueue
from penstock.reports import TakenGrant
from penstock.testing import SimulatedFiles
from penstock.words.clock import MINUTE, SECOND
from tests.broker.broker_under_test import Desk, Rig, until
from tests.broker.grants import renewing, taking
from tests.broker.other_process import Outsider, ask, look, outsider
from tests.broker.storages import PatchyFiles, Simulated
from tests.worker.harness import working

TIMEOUT = 10
US, THEM = "us", "them"


def take(rig: Rig, desk: Desk, stream: str = US, want: int = 0, timeout: float = TIMEOUT, done: int = 0) -> TakenGrant:
    return ask(rig, desk, taking(stream, done=done, want=want, per_key=10, timeout=int(timeout * SECOND)))


def refused(desk: Desk, consumer: str = "other") -> bool:
    """Whether somebody else may not lease."""
    try:
        desk.lease(1, consumer=consumer).retry()
    except QueueHeld:
        return True
    return False


def test_nobody_else_leases(rig: Rig) -> None:
    desk, free = rig.create(), rig.create("free")
    desk.produce("a", "b")
    free.produce("c")
    assert not refused(desk)
    take(rig, desk)
    assert refused(desk) and refused(desk, "") and not refused(free)
    with pytest.raises(QueueHeld, match=r"consumed by spark:us, .* wait until its right has ended"):
        desk.lease(1)
    assert desk.stats().holder == "spark:us" and free.stats().holder == ""
    assert desk.lease(1, consumer="spark:us"), "the holder itself does"
    desk.produce("d")
    assert desk.stats().ready == 2, "all but leasing goes on"


def test_those_who_wait_in_line_are_told(rig: Rig) -> None:
    desk = rig.create()
    waiting, own = desk.waiter(consumer="other"), desk.waiter(consumer="spark:us", wait=30)
    take(rig, desk)
    with pytest.raises(QueueHeld):
        _ = waiting.result
    assert not own.done
    desk.produce("a")
    assert own.held.texts == ["a"]


def test_a_right_ends_when_its_holder_keeps_silent(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    take(rig, desk)
    rig.pass_by(TIMEOUT - 1)
    assert refused(desk)
    rig.pass_by(1)
    assert not refused(desk) and desk.stats().holder == ""


def test_and_goes_on_while_it_does_not(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    take(rig, desk)
    for _ in range(5):
        rig.pass_by(TIMEOUT - 1)
        assert ask(rig, desk, renewing(US, TIMEOUT * SECOND)) is None
    assert refused(desk)
    ask(rig, desk, renewing(US, TIMEOUT * 2 * SECOND))
    rig.pass_by(TIMEOUT + 1)
    assert refused(desk), "the last word counts"


def test_it_survives_its_owner(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    take(rig, desk)
    for end in (rig.restart, rig.kill):
        rig.pass_by(TIMEOUT - 1)
        end()
        assert refused(desk)
    rig.pass_by(TIMEOUT - 1)
    assert refused(desk), "it has its full time again"
    rig.pass_by(1)
    assert not refused(desk)


def test_one_that_has_ended_does_not_come_back_with_the_owner(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    take(rig, desk)
    rig.pass_by(TIMEOUT)
    look(rig)
    rig.kill()
    assert not refused(desk)


def test_it_is_let_go(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    take(rig, desk)
    ask(rig, desk, EndStream(stream=THEM, run=""))
    assert refused(desk), "only by its holder"
    ask(rig, desk, EndStream(stream=US, run=""))
    assert not refused(desk)
    rig.kill()
    assert not refused(desk)
    ask(rig, desk, EndStream(stream=US, run=""))


def test_a_run_that_ends_late_takes_nothing_from_its_successor(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    timeout = TIMEOUT * SECOND
    ask(rig, desk, taking(US, timeout=timeout, run="old"))
    ask(rig, desk, renewing(US, timeout, "new"))
    ask(rig, desk, renewing(US, timeout, "old"))
    ask(rig, desk, EndStream(stream=US, run="old"))
    assert refused(desk), "a stream is as old as its first word"
    ask(rig, desk, EndStream(stream=US, run="new"))
    assert not refused(desk)
    ask(rig, desk, renewing(US, timeout, "newest"))
    rig.restart()
    ask(rig, desk, EndStream(stream=US, run="newest"))
    assert not refused(desk), "an owner that has heard of none believes it"


def test_a_second_stream_is_refused_while_the_first_has_it(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a", "b")
    assert take(rig, desk, US, want=1).items == 1
    for verb in (lambda: take(rig, desk, THEM, want=1), lambda: ask(rig, desk, renewing(THEM, SECOND))):
        with pytest.raises(QueueHeld):
            verb()
    assert outsider(rig).left() == []
    rig.pass_by(TIMEOUT)
    assert take(rig, desk, THEM, want=9).items == 2
    with pytest.raises(QueueHeld):
        take(rig, desk, US)


def test_it_goes_with_the_queue(rig: Rig) -> None:
    desk = rig.create()
    take(rig, desk)
    rig.delete("q")
    again = rig.create("q")
    again.produce("a")
    assert not refused(again)
    rig.pass_by(TIMEOUT)
    look(rig)
    with pytest.raises(QueueNotFound):
        take(rig, desk)


def test_a_right_that_could_not_be_noted_is_nobodys() -> None:
    """The catalog's disk fails: the errand stays, and is done when it can be."""
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(), Outsider(files)
    desk.produce("a")
    name = other.put(desk.incarnation, taking(US, want=1, timeout=MINUTE))
    calls = files.calls
    files.fail(calls + 4, 5)
    look(rig)
    rig.advance(1)
    look(rig)
    assert other.answer(desk.incarnation, name).items == 1 and refused(desk)
    rig.broker.close()


@pytest.mark.parametrize("call", range(1, 30, 2))
def test_whichever_file_call_fails_a_right_is_given_or_not(call: int) -> None:
    files = SimulatedFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(), Outsider(files)
    desk.produce("a")
    name = other.put(desk.incarnation, taking(US, want=1, timeout=10 * MINUTE))
    files.fail(files.calls + call, 5)
    look(rig)
    files.mend()
    for _ in range(9):
        rig.pass_by(10)
        look(rig)
    found = other.answer(desk.incarnation, name)
    assert other.left() == []
    if not found.grant:  # nothing could be leased at that moment
        found = take(rig, desk, want=1, timeout=600)
    assert found == TakenGrant(1, 1, 0) and refused(desk)
    rig.broker.close()


def test_a_worker_waits_it_out(tmp_path: Path) -> None:
    done: list[str] = []
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        queue.produce("a")
        other, owner = Outsider(SystemFiles(), str(tmp_path / "data")), broker._home
        assert isinstance(owner, Embedded)
        incarnation = owner.call(FindQueue(name="q")).incarnation
        name = other.put(incarnation, taking(US, timeout=MINUTE))
        until(lambda: other.inbox.note(incarnation, name) is not None)
        with working(penstock.Worker(queue, lambda item: done.append(item.payload.decode()))):
            other.put(incarnation, EndStream(stream=US, run=""))
            until(lambda: bool(done))
    assert done == ["a"]
