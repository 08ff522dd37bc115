"""A campaign: streams write, read and consume a queue while drivers, JVMs, Python workers and owners are killed.

Owns: `SparkCampaign` and `run_spark_campaign`. One Spark runs three streams (campaign_program.py): files → queue, queue
→ files, and queue → files with consume=true. Two processes own the directory in turn, and the queue is resized. When
all kills are done, every row of the source must be in the queue once and in both sinks once, each completed once, and
the rows of a key in order.
A kill is ordered at a step of a micro-batch of one stream (kill_points.py), or comes at any moment. It counts for every
stream that it interrupts: all three, if they have finished a batch since Spark was started; that of a Python worker for
its own only. To repeat one:
    python -m tests.spark.campaign --seed 7 --kills 50
The seed decides what is killed where. The machine decides when, so a repetition is another campaign of the same sort.
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
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import penstock
from penstock.errors import PenstockError
from tests.processes.campaign import CampaignFailed, read_owner
from tests.spark.campaign_check import Row, find_problems
from tests.spark.campaign_program import ITEMS_PER_BATCH, QUEUE
from tests.spark.kill_points import (
    CONSUME,
    DIRECTIONS,
    DONE,
    DRIVER,
    DRIVER_STEPS,
    FOLDER,
    JVM,
    KINDS,
    OWNER,
    READ,
    WORKER,
    WORKER_STEPS,
    WRITE,
    KillOrder,
    record_process,
    recorded_process,
)
from tests.spark.stream_runs import StreamRun

ROOT = Path(__file__).resolve().parents[2]
KEYS = 20
ROWS_PER_FILE = 40
FILE_SECONDS = 0.3
"""A file of rows is written so often, while less than MOST_WAITING rows are on their way."""
MOST_WAITING = 2_000
KILLS_PER_RESIZE = 6
WIDTHS = (1, 2, 3, 4, 6)
TIMEOUTS = (5, 60)
"""consumerTimeout: the stream comes back after it has lost its leases, or before."""
ANY_MOMENT = 0.2
"""The share of kills that come at any moment."""
PROGRESS_SECONDS = 300.0
"""How long a stream may take to finish a micro-batch on a busy machine, with the start of Spark."""
BACKLOG_SECONDS = 5.0
EXIT_SECONDS = 60.0
POLL_SECONDS = 0.02
SLOW_START = "Python worker failed to connect back"


class SparkCampaign:
    """The driver of the processes."""

    def __init__(self, folder: Path, seed: int, kills: int) -> None:
        self.folder = folder
        self.seed = seed
        self.rng = random.Random(seed)
        self.plan = self._plan(kills)
        self.killed: Counter[tuple[str, str]] = Counter()
        """How many kills of a kind each direction has seen."""
        self.source: list[Row] = []
        self.resizes = self.lives = 0
        self._numbers: Counter[str] = Counter()
        self._counted: dict[str, dict[str, int]] = {READ: {}, CONSUME: {}}
        self._next_file = 0.0
        self._owners: list[subprocess.Popen[bytes]] = []
        self._spark: subprocess.Popen[bytes] | None = None
        self._progress = dict.fromkeys(DIRECTIONS, 0)
        for name in ("rows", READ, CONSUME):
            (folder / name).mkdir(parents=True)
        with penstock.open(folder / "data", exclusive=True) as broker:
            broker.create_queue(QUEUE, partitions=3, max_attempts=0)

    def _plan(self, kills: int) -> list[KillOrder]:
        """The kills in random order; step "" is any moment."""
        found = []
        for kind in KINDS:
            for number in range(kills * (len(DIRECTIONS) if kind == WORKER else 1)):
                direction = DIRECTIONS[number % len(DIRECTIONS)]
                steps = WORKER_STEPS[direction] + (DRIVER_STEPS[direction] if kind != WORKER else ())
                anywhere = kind != WORKER and self.rng.random() < ANY_MOMENT
                found.append(KillOrder(kind, direction, "" if anywhere else self.rng.choice(steps)))
        self.rng.shuffle(found)
        return found

    # -- processes -----------------------------------------------------------------------------------

    def _start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), FOLDER: str(self.folder)}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _keep_owners(self) -> None:
        """Start an owner and one that waits to take over, and make known which process is the owner."""
        self._owners = [one for one in self._owners if one.poll() is None]
        while len(self._owners) < 2:
            self._owners.append(self._start("owners", "penstock.cli", "own", str(self.folder / "data")))
        found = read_owner(self.folder / "data")
        if found is not None and found.opened and any(one.pid == found.pid for one in self._owners):
            record_process(self.folder, OWNER, found.pid)

    def _start_spark(self) -> None:
        self.lives += 1
        self._progress = {direction: self._batches(direction) for direction in DIRECTIONS}
        timeout = str(self.rng.choice(TIMEOUTS))
        self._spark = self._start("spark", "tests.spark.campaign_program", str(self.folder), timeout)

    def _await_end_of_spark(self, *, killed: bool) -> None:
        """Wait until the driver and the JVM are gone: two of them must not use one checkpoint."""
        assert self._spark is not None
        java = recorded_process(self.folder, JVM)
        self._wait_for("the end of Spark", lambda: self._spark.poll() is not None and not _runs(java), EXIT_SECONDS)  # type: ignore[union-attr]
        if not killed and self._spark.returncode:
            raise CampaignFailed(f"Spark ended with {self._spark.returncode}: {self._last_words()}")
        self._spark = None

    def _kill_all(self) -> None:
        for process in [*self._owners, *([self._spark] if self._spark is not None else [])]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, text: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)

    # -- waiting, feeding ----------------------------------------------------------------------------

    def _wait_for(self, what: str, condition: "Callable[[], bool]", seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise CampaignFailed(f"{what} did not come within {seconds:.0f} s: {self._last_words()}")
            self._keep_owners()
            self._feed()
            time.sleep(POLL_SECONDS)

    def _last_words(self) -> str:
        names = ("failures", "spark.log", "owners.log")
        return "; ".join(f"{name}: {(self.folder / name).read_text()[-2_000:]}" for name in names if (self.folder / name).exists())

    def _feed(self) -> None:
        """Write a file of rows if it is time to."""
        if time.monotonic() < self._next_file or len(self.source) - min(self._count(READ), self._count(CONSUME)) > MOST_WAITING:
            return
        self._next_file = time.monotonic() + FILE_SECONDS
        rows = []
        for _ in range(ROWS_PER_FILE):
            key = f"k{self.rng.randrange(KEYS)}"
            self._numbers[key] += 1
            rows.append(Row(key, self._numbers[key]))
        first = len(self.source)
        lines = (json.dumps({"key": row.key, "payload": str(row.number), "seq": first + at}) for at, row in enumerate(rows))
        (self.folder / "rows" / f".{first:09d}").write_text("".join(f"{line}\n" for line in lines))
        (self.folder / "rows" / f".{first:09d}").rename(self.folder / "rows" / f"{first:09d}.json")
        self.source += rows

    def _count(self, direction: str) -> int:
        """How many rows are in a sink."""
        counted = self._counted[direction]
        for path in (self.folder / direction).iterdir():
            if path.name not in counted and not path.suffix:
                counted[path.name] = path.read_bytes().count(b"\n")
        return sum(counted.values())

    def _has_all(self, direction: str) -> bool:
        return self._count(direction) >= len(self.source)

    def _batches(self, direction: str) -> int:
        path = self.folder / f"progress {direction}"
        return path.stat().st_size if path.exists() else 0

    def _progressed(self) -> bool:
        """Whether all streams have finished a micro-batch since Spark was started."""
        return all(self._batches(direction) > self._progress[direction] for direction in DIRECTIONS)

    # -- the campaign --------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry out the plan, and let the streams finish."""
        try:
            self._start_spark()
            for number, order in enumerate(self.plan):
                self._wait_for(f"a batch of each stream, before {order}", self._progressed, PROGRESS_SECONDS)
                self._kill(order)
                self._log(f"kill {number + 1} of {len(self.plan)}: {order.kind}, {order.direction} {order.step or 'any moment'}")
                if number % KILLS_PER_RESIZE == 0:
                    self._resize()
            self._finish()
        finally:
            self._kill_all()

    def _kill(self, order: KillOrder) -> None:
        if order.kind == OWNER:
            self._wait_for("an owner", (self.folder / f"pid {OWNER}").exists, PROGRESS_SECONDS)
        if order.step:
            order.leave(self.folder)
            self._wait_for(f"{order}", (self.folder / DONE).exists, PROGRESS_SECONDS)
            (self.folder / DONE).unlink()
        else:
            time.sleep(self.rng.uniform(0, 0.5))
            os.kill(recorded_process(self.folder, order.kind), signal.SIGKILL)
        for direction in DIRECTIONS if order.kind != WORKER else (order.direction,):
            self.killed[order.kind, direction] += 1
        if order.kind == OWNER:
            owner = recorded_process(self.folder, OWNER)
            self._wait_for("the end of the owner", lambda: not _runs(owner), EXIT_SECONDS)
            (self.folder / f"pid {OWNER}").unlink()  # until another process has taken over
        if order.kind in (DRIVER, JVM):
            self._await_end_of_spark(killed=True)
            self._start_spark()

    def _resize(self) -> None:
        """Give the queue another number of partitions, through its owner, whoever that is now.

        Best while the stream that reads has a backlog: it must not mix it up with what comes after the resize.
        """
        end = time.monotonic() + BACKLOG_SECONDS
        while len(self.source) - self._count(READ) < ITEMS_PER_BATCH and time.monotonic() < end:
            self._keep_owners()
            self._feed()
            time.sleep(POLL_SECONDS)
        try:
            with penstock.open(self.folder / "data", own=False, wait=30) as broker:
                broker.queue(QUEUE).resize(self.rng.choice(WIDTHS))
        except PenstockError as error:  # the owner was killed meanwhile, or an earlier resize is not done
            self._log(f"no resize: {error}")
        else:
            self.resizes += 1

    def _finish(self) -> None:
        """Wait until all rows are in both sinks, and end the processes."""
        self._next_file = float("inf")
        for direction in (CONSUME, READ):
            self._wait_for(f"the last rows of {direction}", partial(self._has_all, direction), PROGRESS_SECONDS)
        with penstock.open(self.folder / "data", own=False, wait=30) as broker:
            left = broker.queue(QUEUE).stats
            self._wait_for("the completion of the last items", lambda: not left().ready and not left().leased, PROGRESS_SECONDS)
        (self.folder / "stop").touch()
        self._await_end_of_spark(killed=False)
        for owner in self._owners:
            owner.terminate()
        for owner in self._owners:
            owner.wait(EXIT_SECONDS)

    # -- the end -------------------------------------------------------------------------------------

    def sink(self, direction: str) -> list[Row]:
        """The rows of a sink, in the order of its batches."""
        files = sorted(path for path in (self.folder / direction).iterdir() if not path.suffix)
        pairs = [line.split() for path in files for line in path.read_text().splitlines()]
        return [Row(key, int(number)) for key, number in pairs]

    def check(self) -> list[str]:
        """The problems of the campaign."""
        with penstock.open(self.folder / "data", exclusive=True) as broker:
            items = {item.id: Row(str(item.key), int(item.payload)) for item in broker.queue(QUEUE).cursor("check")}
        history = StreamRun(str(self.folder / "data"), QUEUE, table="events", columns="event,id")
        history.all()
        completed = [items[row["id"]] for row in history.rows if row["event"] == "completed" and row["id"] in items]
        places = {"the queue": [*items.values()], "completed": completed, READ: self.sink(READ), CONSUME: self.sink(CONSUME)}
        problems = find_problems(self.source, places, ordered=(READ, CONSUME))
        if self.failures() > sum(self.killed[WORKER, direction] for direction in DIRECTIONS) + 3 * self.killed[OWNER, WRITE]:
            problems.append(f"queries failed {self.failures()} times, more often than processes were killed: {self._last_words()}")
        return problems

    def failures(self) -> int:
        """How often a query had to be started again in a Spark that runs.

        Not counted: a Python process of Spark did not start within Spark's ten seconds, because the machine was busy.
        """
        path = self.folder / "failures"
        return sum(SLOW_START not in line for line in path.read_text().splitlines()) if path.exists() else 0

    def summary(self, seconds: float) -> str:
        """What was done, as a table for docs/spark.md."""
        lines = [
            f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, seed {self.seed}: {len(self.source):,} rows of {KEYS} keys, {self.resizes} "
            f"resizes, {self.lives} starts of Spark, {self.failures()} further restarts of queries, {seconds / 60:.0f} minutes.",
            "",
            f"| SIGKILLs | {' | '.join(KINDS)} |",
            f"|---|{'---|' * len(KINDS)}",
            *(f"| {direction} | {' | '.join(str(self.killed[kind, direction]) for kind in KINDS)} |" for direction in DIRECTIONS),
        ]
        return "\n".join(lines)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def commit() -> str:
    """The commit of this source, and whether it was changed since."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if found.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True).stdout
    return found.stdout.strip() + (" with changes" if changed else "")


def run_spark_campaign(folder: Path, seed: int, kills: int) -> tuple[list[str], str]:
    """Run a campaign. Gives its problems, the first of which says how to repeat it, and what it did."""
    began = time.monotonic()
    campaign = SparkCampaign(folder, seed, kills)
    try:
        campaign.run()
        problems = campaign.check()
    except CampaignFailed as error:
        problems = [f"campaign: {error}"]
    if problems:
        problems.insert(0, f"repeat: python -m tests.spark.campaign --seed {seed} --kills {kills}   files: {folder}")
    return problems, campaign.summary(time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="else a random one")
    parser.add_argument("--kills", type=int, default=50, help="of each kind, for each direction")
    parser.add_argument("--folder", type=Path, default=None, help="keep data and logs here")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(1_000_000)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="penstock-campaign-"))
    problems, done = run_spark_campaign(folder, seed, given.kills)
    print(done)
    for problem in problems[:40]:
        print(problem)
    if not problems and given.folder is None:
        shutil.rmtree(folder)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
