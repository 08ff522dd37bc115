"""A program with a worker gets SIGTERM, SIGINT, SIGKILL, SIGSTOP and SIGCONT: real processes, real signals."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import penstock
from tests.worker.harness import WAIT, wait_elapsed, wait_until
from tests.worker.test_process_pool import is_alive

ROOT = Path(__file__).resolve().parent.parent.parent


class WorkerProcess:
    """A process that runs worker_program."""

    def __init__(self, place: Path, mode: str) -> None:
        command = [sys.executable, "-m", "tests.worker.worker_program", str(place), mode]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip()

    def lines(self, count: int) -> list[str]:
        return [self.line() for _ in range(count)]

    def rest(self) -> list[str]:
        """Wait for the end of the process; gives the rest of its output."""
        assert self._process.stdout is not None
        return self._process.stdout.read().splitlines()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def signal_until_ended(self, number: int) -> None:
        """Send a signal until the process has ended, at least twice: two pending signals may arrive as one."""
        ended = False
        while not ended:
            self.signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
                ended = True

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def code(self) -> int:
        return self._process.wait(WAIT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                end.close()


Start = Callable[[str], WorkerProcess]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    programs: list[WorkerProcess] = []

    def start(mode: str) -> WorkerProcess:
        programs.append(WorkerProcess(place, mode))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


@contextmanager
def orders(place: Path) -> Iterator[penstock.Queue]:
    """The queue, while no program owns the directory."""
    with penstock.open(place, durability="os") as broker:
        yield broker.create_queue("orders", lease_timeout=1, exist_ok=True)


def fill(place: Path, count: int) -> list[str]:
    with orders(place) as queue:
        return queue.produce_many([b"%d" % n for n in range(count)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(place: Path, start: Start, number: int) -> None:
    fill(place, 5)
    program = start("wait")
    assert sorted(program.lines(2)) == ["begin 0-0 1", "begin 0-1 1"]
    program.signal(number)
    assert program.line() == "draining"
    program.go()
    assert sorted(program.lines(2)) == ["end 0-0", "end 0-1"]
    assert program.rest() == ["drained", "over"]
    assert program.code() == 0
    with orders(place) as queue:
        stats = queue.stats()
        assert (stats.completed, stats.ready, stats.leased) == (2, 3, 0)


def test_a_second_signal_stops_at_once(place: Path, start: Start) -> None:
    fill(place, 3)
    program = start("wait")
    program.lines(2)
    program.signal_until_ended(signal.SIGTERM)
    assert program.rest() == ["draining", "over"]  # the handlers were not waited for
    assert program.code() == 0
    with orders(place) as queue:
        assert (queue.stats().completed, queue.stats().leased) == (0, 2)
        leases = [lease for batch in (queue.lease(3), queue.lease(3, wait=WAIT)) for lease in batch]
        assert Counter(lease.attempts for lease in leases) == {1: 1, 2: len(leases) - 1}


def test_a_program_that_is_killed_loses_nothing(place: Path, start: Start) -> None:
    ids = fill(place, 3_000)
    rng = random.Random(5)
    begun: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for _ in range(3):
        program = start("quick")
        seen = program.lines(rng.randrange(100, 1_500))
        program.signal(signal.SIGKILL)
        seen += program.rest()
        begun.update(line.split()[1] for line in seen if line.startswith("begin"))
        ended.update(line.split()[1] for line in seen if line.startswith("end"))
        assert program.code() == -signal.SIGKILL
    with orders(place) as queue:
        assert queue.stats().completed <= len(ended)  # no item is completed that was not handled
        while queue.stats().depth:
            with queue.lease(1_000, wait=WAIT) as batch:
                begun.update(batch_id for batch_id in (lease.id for lease in batch))
                assert not [lease.id for lease in batch if lease.attempts == 1 and begun[lease.id] > 1]
        assert queue.stats().completed == len(ids)
    assert set(begun) == set(ids)


def test_a_program_suspended_past_its_leases_continues(place: Path, start: Start) -> None:
    fill(place, 4)
    program = start("wait")
    program.lines(2)
    program.signal(signal.SIGSTOP)
    with penstock.open("memory://") as broker:
        wait_elapsed(broker, 1.5)
    program.signal(signal.SIGCONT)
    program.go()
    said = program.lines(6)
    assert sorted(said) == ["begin 0-2 1", "begin 0-3 1", "end 0-0", "end 0-1", "end 0-2", "end 0-3"]
    program.signal(signal.SIGTERM)
    assert program.rest() == ["draining", "drained", "over"]
    with orders(place) as queue:
        assert queue.stats().completed == 4


def test_a_program_suspended_at_any_time_handles_every_item_once(place: Path, start: Start) -> None:
    ids = fill(place, 4_000)
    program = start("quick")
    seen: list[str] = []
    for count in (311, 1_733, 2_944):
        seen += program.lines(count)
        program.signal(signal.SIGSTOP)
        with penstock.open("memory://") as broker:
            wait_elapsed(broker, 1.1)
        program.signal(signal.SIGCONT)
    seen += program.lines(2 * len(ids) - len(seen))
    program.signal(signal.SIGTERM)
    assert program.rest() == ["draining", "over"]
    assert Counter(line.split()[1] for line in seen if line.startswith("end")) == dict.fromkeys(ids, 1)
    with orders(place) as queue:
        assert queue.stats().completed == len(ids)


def test_a_child_does_not_outlive_a_worker_that_is_killed(place: Path, start: Start) -> None:
    fill(place, 1)
    program = start("children")
    pid = int(program.line().split()[2])
    assert is_alive(pid)
    program.signal(signal.SIGTERM)
    program.signal(signal.SIGKILL)
    assert program.code() == -signal.SIGKILL
    wait_until(lambda: not is_alive(pid))
    with orders(place) as queue:
        assert queue.lease(wait=WAIT)[0].attempts == 2


def test_children_ignore_signals(place: Path, start: Start) -> None:
    fill(place, 1)
    program = start("children")
    pid = int(program.line().split()[2])
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert is_alive(pid)
    program.signal_until_ended(signal.SIGTERM)
    assert program.rest() == ["draining", "over"]
    with orders(place) as queue:
        assert queue.lease()[0].attempts == 1  # the handler was killed, so its item was returned at once
