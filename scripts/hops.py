"""Which modules a call passes through: the hop lists of docs/architecture.md.

    python scripts/hops.py                 print them
    python scripts/hops.py --write         put them into docs/architecture.md
    python scripts/hops.py --calls NAME    print every call of one of them, indented by depth

Each scenario runs once to warm up and once under `sys.setprofile`, in every thread. A hop is a module of Penstock that the call enters for
the first time, with the function by which it does; modules of `words/` are left out (ids, limits, errors, clock: they lead nowhere).
"""

import argparse
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import penstock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(Path(penstock.__file__).parent)
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- hops: written by scripts/hops.py -->", "<!-- end of hops -->"


class Call(NamedTuple):
    """One call of a function of Penstock."""

    module: str
    function: str
    depth: int
    thread: int


class Recorder:
    """Records the calls of Penstock's functions, in the order in which they begin."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._depth: dict[int, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        thread = threading.get_ident()
        depth = self._depth.get(thread, 0)
        if event == "return":
            self._depth[thread] = max(0, depth - 1)
            return
        module = frame.f_code.co_filename.removeprefix(PACKAGE + "/").removesuffix(".py")
        self.calls.append(Call(module, frame.f_code.co_qualname, depth, thread))
        self._depth[thread] = depth + 1

    def hops(self) -> list[Call]:
        """The first call into each module, but for those of words/."""
        found: dict[str, Call] = {}
        for call in self.calls:
            if not call.module.startswith("words/") and not re.search(r"<(lambda|genexpr|listcomp|dictcomp)>$", call.function):
                found.setdefault(call.module, call)
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
    """The calls of one step, which has run before."""
    step()
    with recorded() as recorder:
        step()
    return recorder


# -- scenarios ---------------------------------------------------------------------------------------


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
        yield "redrive", record(lambda: broker.redrive("dead", to="others", limit=1))
        yield "stats", record(queue.stats)


def scenarios() -> Iterator[tuple[str, Recorder]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from on_a_queue(f"{folder}/data")


# -- output ------------------------------------------------------------------------------------------


def told(name: str, recorder: Recorder) -> str:
    hops = recorder.hops()
    path = " → ".join(f"`{call.module}` {call.function.rpartition('.')[2]}" for call in hops)
    return f"**{name}** ({len(hops)} modules, {len(recorder.calls)} calls): {path}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--calls", default="")
    given = parser.parse_args()
    found = dict(scenarios())
    if given.calls:
        for call in found[given.calls].calls:
            print(f"{'  ' * call.depth}{call.module} {call.function}")
        return 0
    text = "\n\n".join(told(name, recorder) for name, recorder in found.items())
    if not given.write:
        print(text)
        return 0
    document = DOCUMENT.read_text("utf-8")
    before, _, rest = document.partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
