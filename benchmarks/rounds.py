"""Runs the steps of a benchmark in rounds, and writes what they measured.

Owns: `Rounds`, which benchmarks whose steps fill one table of figures share. With `--lenient` a step that fails is left
out: so `against.py` runs a benchmark with the code of an older commit, which may lack what a step needs.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Figures = dict[str, list[float]]


class Rounds:
    """The options of a benchmark, and the figures of its rounds."""

    def __init__(self, name: str, doc: str | None, rounds: int, **options: int) -> None:
        """options: further options of the command line, each a number, with its default."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rounds", type=int, default=rounds)
        for option, default in options.items():
            parser.add_argument(f"--{option}", type=int, default=default)
        results = Path(__file__).parent / "results" / f"{name}.json"
        parser.add_argument("--output", type=Path, default=results, help="the file for the results")
        parser.add_argument("--no-write", action="store_true", help="print only")
        parser.add_argument("--lenient", action="store_true", help="leave out steps that fail")
        self.given = parser.parse_args()
        self.figures: Figures = defaultdict(list)

    def run(self, steps: Mapping[str, Callable[[Path], None]]) -> dict[str, float]:
        """Run all steps, as often as asked, each in a new directory; gives the medians of what they measured."""
        left_out: set[str] = set()
        for _ in range(self.given.rounds):
            for name, step in steps.items():
                if name in left_out:
                    continue
                with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
                    try:
                        step(Path(root))
                    except Exception as error:
                        if not self.given.lenient:
                            raise
                        print(f"left out: {name} ({type(error).__name__}: {error})", file=sys.stderr)
                        left_out.add(name)
        return {name: statistics.median(values) for name, values in self.figures.items()}

    def write(self, ratios: Mapping[str, float], found: Mapping[str, float], **about: Any) -> None:
        if self.given.no_write:
            return
        machine = {"rounds": self.given.rounds, "python": platform.python_version(), "cores": os.cpu_count()}
        rounded = {name: round(value, 3) for name, value in ratios.items()}
        written = {"about": {**about, **machine}, "ratios": rounded, "per_second": found}
        self.given.output.write_text(json.dumps(written, indent=2) + "\n")
