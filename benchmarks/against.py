"""Runs a benchmark with the code of another commit and with the present code, in turn, and compares the figures.

    python benchmarks/against.py COMMIT [queues | worker] [--rounds N] [--no-write] [options of the benchmark]

Machines are noisy and change from day to day: figures of two commits can be compared only if they are measured in one
run. The benchmark itself is the present one in both cases; steps that the other commit cannot run are left out. Every
figure is the median of the rounds. The gain is above 1 where the present code is faster: times (names that end with
_us) are divided the other way round. Writes benchmarks/results/<benchmark>-against.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = ("queues", "worker")


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(HERE.parent), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def measure(benchmark: str, source: Path, output: Path, options: list[str]) -> dict[str, float]:
    """The figures of one round of a benchmark, with the package in the directory `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, str(HERE / f"{benchmark}.py"), "--rounds", "1", "--lenient", "--output", str(output), *options]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(output.read_text())["per_second"]
    return found


def gain(name: str, before: float, after: float) -> float:
    return before / after if name.endswith("_us") else after / before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the other commit, or any name of it")
    parser.add_argument("benchmark", nargs="?", choices=BENCHMARKS, default="queues")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-write", action="store_true", help="print only")
    given, options = parser.parse_known_args()
    other = git("rev-parse", "--short", f"{given.commit}^{{commit}}")
    figures: dict[str, dict[str, list[float]]] = {"before": defaultdict(list), "after": defaultdict(list)}
    with tempfile.TemporaryDirectory(prefix="penstock-against-") as directory:
        tree, output = Path(directory) / "tree", Path(directory) / "figures.json"
        git("worktree", "add", "--detach", str(tree), other)
        try:
            sources = {"before": tree / "src", "after": HERE.parent / "src"}
            for number in range(given.rounds):
                for side in sorted(sources, reverse=number % 2 == 0):  # who is first changes: the machine may become slower
                    for name, value in measure(given.benchmark, sources[side], output, options).items():
                        figures[side][name].append(value)
        finally:
            git("worktree", "remove", "--force", str(tree))
    before, after = ({name: statistics.median(values) for name, values in side.items()} for side in figures.values())
    rows = {name: (before[name], after[name], gain(name, before[name], after[name])) for name in after if before.get(name)}
    print(f"{'':34} {other:>14} {'now':>14}    gain")
    for name, (old, new, ratio) in rows.items():
        print(f"{name:34} {old:14,.1f} {new:14,.1f} {ratio:7.2f}")
    if missing := sorted(after.keys() - rows.keys()):
        print(f"only now: {', '.join(missing)}")
    if not given.no_write:
        about = {"commit": other, "rounds": given.rounds, "python": platform.python_version(), "cores": os.cpu_count()}
        compared = {name: {"before": old, "after": new, "gain": round(ratio, 3)} for name, (old, new, ratio) in rows.items()}
        path = HERE / "results" / f"{given.benchmark}-against.json"
        path.write_text(json.dumps({"about": about, "compared": compared}, indent=2) + "\n")


if __name__ == "__main__":
    main()
