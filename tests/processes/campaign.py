"""A campaign: processes use one directory while its owner is killed and frozen again and again.

Owns: `Campaign`, `judge`, `run_campaign`, and `measure_takeovers`. To repeat one:
    python -m tests.processes.campaign --seed 7 --takeovers 100
The seed decides what the processes and the driver choose. The machine decides when it happens, so a repetition is
another campaign of the same sort.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock import Broker, Queue
from tests.processes import program
from tests.processes.checker import Checker, Evidence, FinalItem, Freeze
from tests.processes.journal import Failed, read_calls
from tests.processes.program import CURSOR, DEAD, LEASE_SECONDS, MAX_ATTEMPTS, SECOND, WORK, Process

ROLES = ["producer", "both", "consumer", "units", "worker", "async", "operator", "reader"]
TAKEOVER_SECONDS = 20.0
"""How long a take-over may take on a busy machine."""
END_SECONDS = 45.0
"""How long a process may take to end after SIGTERM: its calls may take 30 seconds."""
DRAIN_SECONDS = 60.0
PROGRESS_SECONDS = 3.0
PROGRESS_BYTES = 5_000
POLL_SECONDS = 0.002
ROOT = Path(__file__).resolve().parents[2]


KINDS = {
    "kill": 10,
    "kill two": 2,
    "kill all": 1,
    "kill while opening": 2,
    "end": 2,
    "freeze": 2,
    "freeze and kill": 1,
    "freeze client": 1,
    "rest": 1,
}
"""The kinds of disturbances, and how often each is chosen."""


class CampaignFailed(Exception):
    """The campaign could not go on: nobody took over, or a process ended by itself."""


@dataclass
class Slot:
    """One of the processes, and its successors."""

    number: int
    role: str
    lives: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    start_at: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role}{self.number}.{self.lives}"


@dataclass(frozen=True)
class Owner:
    """The owner as the lock file describes it."""

    pid: int
    secret: str
    since: float
    """When it took the lock, in seconds of the wall clock."""
    opened: bool
    """Whether it has finished opening the broker."""


def read_owner(directory: Path) -> Owner | None:
    """The holder of the lock, read without Penstock; None while the file is being written."""
    try:
        found = json.loads((directory / "LOCK").read_bytes())
        return Owner(found["pid"], found.get("secret", ""), found["since"] / 1e6, not found.get("unfinished"))
    except (OSError, ValueError, KeyError):
        return None


class Campaign:
    """The driver of the processes."""

    kinds: Mapping[str, int] = KINDS

    def __init__(self, folder: Path, seed: int, roles: list[str], partitions: int = 3, max_items: int | None = 400) -> None:
        self.directory = folder / "data"
        self.journals = folder / "journals"
        self.seed = seed
        self.rng = random.Random(seed)
        self.slots = [Slot(number, role) for number, role in enumerate(roles)]
        self.killed: set[str] = set()
        self.freezes: list[Freeze] = []
        self.actions: Counter[str] = Counter()
        self.takeovers = 0
        self.owner: Owner | None = None
        self.journals.mkdir(parents=True)
        with penstock.open(self.directory, exclusive=True) as broker:
            broker.create_queue(DEAD)
            broker.create_queue(SECOND, partitions=2, lease_timeout=LEASE_SECONDS, dead_queue=DEAD, max_attempts=MAX_ATTEMPTS)
            broker.create_queue(
                WORK,
                partitions=partitions,
                lease_timeout=LEASE_SECONDS,
                dead_queue=DEAD,
                max_attempts=MAX_ATTEMPTS,
                max_items=max_items,
                dedup_window=3600,
            )

    # -- processes -----------------------------------------------------------------------------------

    def start(self, slot: Slot) -> None:
        slot.lives += 1
        journal = self.journals / f"{slot.name}.calls"
        command = [sys.executable, "-m", *self.command(slot, journal)]
        with open(self.journals / f"{slot.name}.stderr", "wb") as errors:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
            slot.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment, cwd=ROOT)

    def command(self, slot: Slot, journal: Path) -> list[str]:
        """The module that a process runs, and its arguments."""
        return ["tests.processes.program", str(self.directory), str(journal), slot.role, str(self.seed)]

    def log(self, text: str) -> None:
        with open(self.journals / "driver.log", "a") as file:
            file.write(f"{time.monotonic():.3f} {text}\n")

    def may_start(self, slot: Slot) -> bool:
        """Whether a process can do something if it is started now."""
        return True

    def look_after(self) -> None:
        """Start processes whose time has come. CampaignFailed when one has ended by itself."""
        for slot in self.slots:
            if slot.process is None and time.monotonic() >= slot.start_at and self.may_start(slot):
                self.start(slot)
            elif slot.process is not None and slot.process.poll() is not None:
                raise CampaignFailed(f"{slot.name} ended by itself with {slot.process.returncode}: {self._last_words(slot)}")

    def _last_words(self, slot: Slot) -> str:
        return (self.journals / f"{slot.name}.stderr").read_text("utf-8", "replace")[-6000:]

    def slot_of(self, pid: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.process is not None and slot.process.pid == pid), None)

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.look_after()
            time.sleep(min(left, 0.02))

    def kill(self, slot: Slot) -> float:
        """Kill a process; it is started again soon. Gives the time."""
        assert slot.process is not None
        self.killed.add(slot.name)
        now = time.monotonic()
        slot.process.kill()
        slot.process.wait()
        slot.process, slot.start_at = None, now + self.rng.choice([0.0, 0.1, 0.5])
        return now

    def await_owner(self, *, opened: bool = True) -> Slot:
        """Wait until one of the processes that live owns the directory, and count it as a take-over if it is new."""
        end = time.monotonic() + TAKEOVER_SECONDS
        while time.monotonic() < end:
            self.look_after()
            found = read_owner(self.directory)
            slot = None if found is None else self.slot_of(found.pid)
            if found is not None and slot is not None and found.secret and (found.opened or not opened):
                if found.opened and (self.owner is None or self.owner.secret != found.secret):
                    self.takeovers += self.owner is not None
                    self.owner = found
                    self.log(f"owner {slot.name}")
                return slot
            time.sleep(POLL_SECONDS)
        states = "; ".join(f"{slot.name}: {self._last_words(slot)[-300:]}" for slot in self.slots if slot.process is not None)
        raise CampaignFailed(f"nobody took over within {TAKEOVER_SECONDS:.0f} s; the lock says {read_owner(self.directory)}; {states}")

    def await_all(self) -> None:
        """Wait until every process has done some calls."""
        end = time.monotonic() + TAKEOVER_SECONDS
        while any(not self._calls(slot) for slot in self.slots):
            if time.monotonic() > end:
                raise CampaignFailed("some process does nothing")
            self.wait(0.02)

    def _calls(self, slot: Slot) -> bool:
        journal = self.journals / f"{slot.name}.calls"
        return slot.process is not None and journal.exists() and journal.read_bytes().count(b'"answer":[') > 3

    def freeze(self, slot: Slot, seconds: float) -> None:
        """Stop a process for a while. Nobody may take over meanwhile."""
        assert slot.process is not None
        before, pid = read_owner(self.directory), slot.process.pid
        owner = before is not None and before.pid == pid
        begin = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        self.wait(seconds)
        after = read_owner(self.directory)
        os.kill(pid, signal.SIGCONT)
        self.freezes.append(Freeze(slot.name, pid, begin, time.monotonic(), owner))
        if owner and after != before:
            raise CampaignFailed(f"the owner {before} was frozen, and its directory was taken over by {after}")

    # -- a campaign ----------------------------------------------------------------------------------

    def done(self) -> int:
        """How many there were of what is counted: take-overs."""
        return self.takeovers

    def run(self, count: int) -> None:
        """Start the processes and disturb them until `done` is so many; then end them."""
        try:
            self.await_owner()
            self.wait(1.0)
            while self.done() < count:
                self.disturb()
            self.wait(0.5)
            self.end()
        finally:
            self.kill_all()
        self.drain()

    def kill_all(self) -> None:
        for slot in self.slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()

    def victim(self) -> Slot:
        """The process that is disturbed next: the owner."""
        return self.await_owner()

    def disturb(self) -> None:
        """One disturbance: most often the victim is killed."""
        victim, rng = self.victim(), self.rng
        assert victim.process is not None
        (kind,) = rng.choices([*self.kinds], [*self.kinds.values()])
        self.actions[kind] += 1
        self.log(f"{kind} {victim.name}")
        if rng.random() < 0.7:
            self.await_progress()
        self.wait(rng.choice([0.0, 0.1, 0.3, 0.8]))
        others = [slot for slot in self.slots if slot is not victim and slot.process is not None]
        if kind == "kill two" and others:
            self.kill(others.pop(rng.randrange(len(others))))
        if kind in ("kill", "kill two", "kill all"):
            self.kill(victim)
            for slot in others if kind == "kill all" else ():
                self.kill(slot)
        elif kind == "kill while opening":
            self.kill(victim)
            self._kill_while_opening()
        elif kind == "end":
            self._end_politely(victim)
        elif kind == "freeze":
            self.freeze(victim, rng.choice([0.5, 1.5, 3.0]))
        elif kind == "freeze and kill":
            self.freeze(victim, 1.0)
            self.kill(victim)
        elif kind == "freeze client" and others:
            self.freeze(rng.choice(others), rng.choice([0.5, 3.0]))
        elif kind == "rest":
            self.wait(4.0)  # else no lease would ever end: none does in an owner's first two seconds

    def _kill_while_opening(self) -> None:
        """Kill the next owner as soon as it has the lock, most often before it has opened the broker."""
        slot, found = self.await_owner(opened=False), read_owner(self.directory)
        self.actions["killed before it was open"] += found is not None and not found.opened
        self.kill(slot)

    def await_progress(self) -> None:
        """Wait a moment until the processes have done something with the present owner."""
        before, end = self._written(), time.monotonic() + PROGRESS_SECONDS
        while self._written() < before + PROGRESS_BYTES and time.monotonic() < end:
            self.wait(0.02)

    def _written(self) -> int:
        return sum(path.stat().st_size for path in self.journals.glob("*.calls"))

    def _end_politely(self, slot: Slot) -> None:
        """End a process by SIGTERM, and start it again."""
        assert slot.process is not None
        process, slot.process, slot.start_at = slot.process, None, float("inf")
        process.terminate()
        end = time.monotonic() + END_SECONDS
        while process.poll() is None and time.monotonic() < end:
            self.wait(0.02)
        if process.poll() is None:
            slot.process = process
            raise self._hangs(slot)
        self._check_end(slot, process.returncode)
        slot.start_at = 0.0

    def _hangs(self, slot: Slot) -> CampaignFailed:
        """What to raise for a process that does not end: it says where its threads are."""
        assert slot.process is not None
        slot.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return CampaignFailed(f"{slot.name} did not end within {END_SECONDS:.0f} s after SIGTERM: {self._last_words(slot)}")

    def _check_end(self, slot: Slot, code: int) -> None:
        """A process ends well, or by SIGTERM itself if that came before it was ready."""
        if code == -signal.SIGTERM and not (self.journals / f"{slot.name}.calls").exists():
            return
        if code:
            raise CampaignFailed(f"{slot.name} ended with {code}: {self._last_words(slot)}")

    def end(self) -> None:
        """End all processes."""
        self.look_after()
        self.end_together(self.slots)

    def end_together(self, slots: list[Slot]) -> None:
        """End the processes of these slots."""
        running = [slot for slot in slots if slot.process is not None]
        for slot in running:
            assert slot.process is not None
            slot.process.terminate()
        end = time.monotonic() + END_SECONDS
        for slot in running:
            assert slot.process is not None
            try:
                code = slot.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._hangs(slot) from None
            self._check_end(slot, code)
            slot.process = None

    # -- the end -------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Complete all that is left, and read the cursor to its end."""
        process = Process(str(self.directory), self.journals / "drain.calls", self.seed)
        with penstock.open(self.directory, exclusive=True) as broker:
            queues = [broker.queue(name) for name in (WORK, SECOND)]
            queues[0].resume()
            end = time.monotonic() + DRAIN_SECONDS
            while sum(_complete_some(process, queue) for queue in queues) or _left(broker):
                broker.redrive(DEAD, to=WORK)
                if time.monotonic() > end:
                    raise CampaignFailed(f"items are left after {DRAIN_SECONDS:.0f} s: {_left(broker)}")
                time.sleep(0.05)
            cursor = queues[0].cursor(CURSOR)
            while True:
                with process.journal.call("read", 30.0, queue=WORK, cursor=CURSOR) as outcome:
                    outcome.answer = [item.id for item in cursor.read()]
                if not outcome.answer:
                    break
            self.items = [item for name in (WORK, SECOND, DEAD) for item in _final_items(broker.queue(name))]
        process.journal.close()

    def evidence(self) -> Evidence:
        return Evidence(read_calls(self.journals), self.items, self.freezes, self.killed, MAX_ATTEMPTS)


def _complete_some(process: Process, queue: Queue) -> bool:
    """Lease and complete what is ready; whether there was something."""
    with process.journal.call("lease", 30.0, **program.lease_facts(queue.name, 100, 1, 10.0)) as outcome:
        batch = queue.lease(100, lease_timeout=10.0)
        outcome.answer = [program.item_facts(lease.item) for lease in batch]
    if not batch:
        return False
    leases = list(batch)
    facts = {"lease": outcome.number, "action": "complete", "payloads": [lease.item.value for lease in leases], "then": []}
    try:
        with process.journal.call("settle", 30.0, **facts) as settled:
            try:
                batch.complete()
            finally:
                settled.answer = [lease.state for lease in leases]
    except Failed:
        pass
    return True


def _left(broker: Broker) -> list[str]:
    states = ["ready", "scheduled", "leased", "moving", "buried"]
    return [f"{name}: {item!r}" for name in (WORK, SECOND, DEAD) for item in broker.queue(name).items(states, limit=5)]


def _final_items(queue: Queue) -> list[FinalItem]:
    """All items that a cursor reads. It reads an item that a resize moved only once, where it was produced."""
    states, after = {}, None
    while page := queue.items(after=after, limit=1_000):
        after = page[-1].id
        states.update({item.id: item.state for item in page})
    found = []
    for item in queue.cursor("final"):
        came_from = "" if item.origin is None else f"{item.origin.queue}/{item.origin.id}"
        found.append(FinalItem(queue.name, item.id, item.value, item.key, came_from, states.get(item.id, "completed")))
    return found


def judge(campaign: Campaign, count: int, repeat: str) -> tuple[list[str], str]:
    """Run a campaign. Gives its problems, the first of which says how to repeat it, and what it did."""
    began = time.monotonic()
    problems: list[str] = []
    done = "it did not end"
    try:
        campaign.run(count)
        checker = Checker(campaign.evidence())
        problems, done = checker.check(), checker.summary()
    except CampaignFailed as error:
        problems = [f"campaign: {error}"]
    took = time.monotonic() - began
    done = f"seed {campaign.seed}: {campaign.takeovers} take-overs in {took:.0f} s ({dict(campaign.actions)}); {done}"
    if problems:
        problems.insert(0, f"repeat: python -m {repeat}   journals: {campaign.journals}")
    return problems, done


def run_campaign(folder: Path, seed: int, takeovers: int) -> tuple[list[str], str]:
    """Run a campaign with all roles; as `judge`."""
    return judge(Campaign(folder, seed, ROLES), takeovers, f"tests.processes.campaign --seed {seed} --takeovers {takeovers}")


def report(problems: list[str], done: str) -> None:
    """Print what a campaign did, and its problems."""
    print(done)
    for problem in problems[:40]:
        print(problem)
    if len(problems) > 40:
        print(f"… and {len(problems) - 40} more: {dict(Counter(one.split(':')[0] for one in problems))}")


# -- how long a take-over takes ----------------------------------------------------------------------


def measure_takeovers(folder: Path, kills: int, processes: int = 4, partitions: int = 8, seed: int = 0) -> list[float]:
    """Seconds from a kill of the owner to the first answered produce, at each of the other processes."""
    campaign = Campaign(folder, seed, ["pulse"] * processes, partitions, max_items=None)
    offset = time.time() - time.monotonic()
    killed: list[tuple[float, float]] = []
    try:
        for slot in campaign.slots:
            campaign.start(slot)
        for _ in range(kills):
            campaign.await_all()
            campaign.wait(campaign.rng.uniform(0.1, 0.3))
            at = campaign.kill(campaign.await_owner())
            campaign.await_owner()
            assert campaign.owner is not None
            killed.append((at, campaign.owner.since - offset))
        campaign.await_all()
        campaign.end()
    finally:
        campaign.kill_all()
    calls = [call for call in read_calls(campaign.journals) if call.op == "produce" and call.ok]
    found = []
    for at, taken in killed:
        before = {call.process for call in calls if call.end < at}
        first: dict[str, float] = {}
        for call in calls:
            if call.process in before and call.end > taken:
                first[call.process] = min(first.get(call.process, call.end), call.end)
        found += [end - at for end in first.values()]
    return sorted(found)


def print_takeover_times(folder: Path, kills: int) -> None:
    times = measure_takeovers(folder, kills)
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"from a kill of the owner to the first answered produce of another process: p50 {p50:.3f} s, p99 {p99:.3f} s, "
          f"longest {times[-1]:.3f} s ({kills} kills, {len(times)} times)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--takeovers", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=None, help="keep data and journals here")
    parser.add_argument("--measure", type=int, default=0, metavar="KILLS", help="measure how long take-overs take, and nothing else")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-campaign-"))
    if options.measure:
        print_takeover_times(folder, options.measure)
        return
    problems, done = run_campaign(folder, options.seed, options.takeovers)
    report(problems, done)
    if not problems and options.folder is None:
        shutil.rmtree(folder)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
