"""Record which modules a call passes through: the hop lists of docs/architecture.md.

    python scripts/hops.py                 print them
    python scripts/hops.py --write         put them into docs/architecture.md
    python scripts/hops.py --check         fail if the paths in docs/architecture.md are not up to date
    python scripts/hops.py --calls NAME    print every call of one scenario, indented by depth

Each scenario runs once to warm up and once under `sys.setprofile`, in every thread. Its path is the list of modules on
the call stack when one of `STEPS` is called: a decision, a change of state, an append to a log, a sync, a query. All
other calls (ids, limits, checks, encodings) count only in the numbers of modules and calls.
"""

import argparse
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import penstock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(Path(penstock.__file__).parent)
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- hops: written by scripts/hops.py -->", "<!-- end of hops -->"


class Call(NamedTuple):
    """One call of a Penstock function."""

    module: str
    function: str
    stack: tuple["Call", ...]


BEFORE = {
    "produce": 13,
    "lease": 10,
    "complete": 13,
    "retry to the dead queue": 14,
    "redrive": 16,
    "stats": 9,
    "a Spark write, staged by a task, published by the driver, adopted by the owner": 20,
    "a Spark consume: a grant is taken, and the one before completed": 26,
}
"""Hops at commit a7a7161, before operations were data (ADR 20), measured by this script with the names of that time."""
STEPS = {
    ("rules/machine", "decide"),
    ("rules/machine", "apply"),
    ("logs/files/filelog", "append"),
    ("logs/files/filesystem", "sync"),
    ("logs/files/inbox", "publish"),
    ("logs/files/inbox", "put_blob"),
    ("broker/queries", "stats"),
}
"""(Module, function) of the steps whose call stacks make up a path."""


class Recorder:
    """Records the calls of Penstock functions, in the order in which they begin."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._stacks: dict[int, list[Call]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        stack = self._stacks.setdefault(threading.get_ident(), [])
        if event == "return":
            if stack:
                stack.pop()
            return
        module = frame.f_code.co_filename.removeprefix(PACKAGE + "/").removesuffix(".py")
        call = Call(module, frame.f_code.co_qualname, tuple(stack))
        self.calls.append(call)
        stack.append(call)

    def modules(self) -> set[str]:
        return {call.module for call in self.calls}

    def path(self) -> list[Call]:
        """For each module on the call stack of a step, the call by which it was entered first."""
        found: dict[str, Call] = {}
        for call in self.calls:
            if (call.module, call.function.rpartition(".")[2]) in STEPS:
                for one in (*call.stack, call):
                    found.setdefault(one.module, one)
        return [*found.values()]


@contextmanager
def recorded() -> Iterator[Recorder]:
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def record(step: Callable[[], object]) -> Recorder:
    """Run a function twice; returns the calls of the second run."""
    step()
    with recorded() as recorder:
        step()
    return recorder


# -- scenarios -------------------------------------------------------------------------------------


def on_a_queue(folder: str) -> Iterator[tuple[str, Recorder]]:
    with penstock.open(folder) as broker:
        broker.create_queue("dead")
        queue = broker.create_queue("orders", dead_queue="dead", max_attempts=1)
        other = broker.create_queue("others")
        yield "produce", record(lambda: queue.produce(b"x", key="customer-42"))
        yield "lease", record(lambda: queue.lease())
        held = [queue.lease(lease_timeout=600) for _ in range(2) if other.produce(b"y") and queue.produce(b"z")]
        yield "complete", record(lambda: held.pop().complete())
        for _ in range(2):
            queue.produce(b"bad")
        failing = [queue.lease(), queue.lease()]
        yield "retry to the dead queue", record(lambda: failing.pop().retry())
        dead = broker.queue("dead")
        while dead.stats().ready < 2:  # the dead letters are being transferred
            pass
        yield "redrive", record(lambda: broker.redrive("dead", to="others", limit=1))
        yield "stats", record(queue.stats)


def in_spark(folder: str) -> Iterator[tuple[str, Recorder]]:
    """What Spark's driver and tasks do, without a JVM, in the process of the owner."""
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from penstock.broker import shared
    from penstock.broker.embedded import EmbeddedBroker
    from penstock.operations import CreateQueue
    from penstock.spark import broker_access, consuming_reader, staging
    from penstock.spark.options import STREAM, parse_options
    from penstock.spark.sort_order import SortOrder

    owner = EmbeddedBroker.open(folder, threaded=False)
    owner.call(CreateQueue(name="orders"))
    opened_here = SimpleNamespace(call=owner.call, submit=owner.submit, close=lambda: None)
    vars(shared)["join_shared"] = lambda target: opened_here
    writes, order = staging.StagedWriteClient(broker_access.parse_broker(folder)), SortOrder.parse("")
    destination = writes.find("orders")
    rows = pa.record_batch({"payload": [b"a", b"b"], "key": [b"k", b"l"]})

    def write() -> None:
        name = writes.new_write_name()
        writes.prepare(name)
        runs = writes.stage(name, destination, order, iter([rows]), "task-0")
        writes.publish(name, destination, order, name, 1, runs)
        owner.inbox.process()

    yield "a Spark write, staged by a task, published by the driver, adopted by the owner", record(write)
    reader = consuming_reader.ConsumingReader(
        parse_options({"broker": folder, "queue": "orders", "consume": "true"}, STREAM), ["id", "payload"]
    )
    offsets = [reader.initialOffset()]

    def take() -> None:
        offsets.append(reader.latestOffset(offsets[-1], ReadMaxRows(1)))

    yield "a Spark consume: a grant is taken, and the one before completed", record(take)
    reader.stop()
    owner.close()


def scenarios() -> Iterator[tuple[str, Recorder]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from on_a_queue(f"{folder}/data")
        yield from in_spark(f"{folder}/spark")


# -- output ----------------------------------------------------------------------------------------


def described(name: str, recorder: Recorder) -> str:
    path = recorder.path()
    shown = " → ".join(f"`{call.module}` {call.function.rpartition('.')[2]}" for call in path)
    counts = f"{len(path)} hops (before: {BEFORE[name]}; {len(recorder.modules())} modules and {len(recorder.calls)} calls in all)"
    return f"**{name}**, {counts}: {shown}"


def _paths(text: str) -> set[str]:
    """Scenarios and their paths, without the counts, which vary from run to run."""
    return {re.sub(r", \d+ hops \(.*?\)", "", line) for line in text.splitlines() if line.startswith("**")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--calls", default="")
    given = parser.parse_args()
    found = dict(scenarios())
    if given.calls:
        for call in found[given.calls].calls:
            print(f"{'  ' * len(call.stack)}{call.module} {call.function}")
        return 0
    text = "\n\n".join(described(name, recorder) for name, recorder in found.items())
    if not given.write and not given.check:
        print(text)
        return 0
    document = DOCUMENT.read_text("utf-8")
    before, _, rest = document.partition(BEGIN)
    if given.check:
        stale = _paths(text) - _paths(rest.partition(END)[0])
        for line in sorted(stale):
            print(f"docs/architecture.md has another path; it is now {line}; run python scripts/hops.py --write", file=sys.stderr)
        return 1 if stale else 0
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
