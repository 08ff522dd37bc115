"""Journals: what each process of a campaign did, one line of JSON per event.

Owns: `Journal` (writing), `Call` and `read_calls` (reading). A process writes a line before each call, and one after it
with the answer or the error. Both have the machine's monotonic time, which all processes share. A line is one `write`,
so a process that is killed leaves whole lines: a call without an outcome is one that was under way when it was killed.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")
Facts = dict[str, Any]
KILLED = "killed"
"""The error of a call whose process was killed before it wrote an outcome."""


class Failed(Exception):
    """A call ended with an error, which is in the journal."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(str(error))
        self.error = error


class Outcome:
    """Where a call leaves its answer for the journal."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The number of the call in its journal."""
        self.answer: Any = None


class Journal:
    """The journal of one process. Any number of threads write to it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._numbers = itertools.count(1)
        self.pending: dict[int, tuple[str, float]] = {}
        """The calls under way: number → operation, and when it began."""

    def write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps({"t": time.monotonic(), **facts}, separators=(",", ":")).encode() + b"\n")

    def begin(self, operation: str, allowed: float, **facts: Any) -> int:
        """Write the beginning of a call, and give its number; its end is a line with the same number."""
        number = next(self._numbers)
        self.write(n=number, op=operation, allowed=allowed, **facts)
        return number

    def note(self, operation: str, **facts: Any) -> None:
        """Write something that is no call, as a call that ends at once."""
        self.write(n=self.begin(operation, 0, **facts), answer=None)

    @contextmanager
    def call(self, operation: str, allowed: float, **facts: Any) -> Iterator[Outcome]:
        """Write the beginning and the end of a call. `Failed` when it raises a PenstockError.

        allowed: the seconds after which it must have ended.
        """
        outcome = Outcome(number := self.begin(operation, allowed, **facts))
        self.pending[number] = operation, time.monotonic()
        try:
            yield outcome
        except PenstockError as error:
            end: Facts = {"n": number, "error": error.code, "message": str(error)}
            if error.results:
                end["results"] = [{"error": one.code} if isinstance(one, PenstockError) else {"id": one} for one in error.results]
            if outcome.answer is not None:
                end["answer"] = outcome.answer
            self.write(**end)
            raise Failed(error) from error
        except BaseException as error:
            self.write(n=number, error="crash", message=f"{type(error).__name__}: {error}")
            raise
        finally:
            del self.pending[number]
        self.write(n=number, answer=outcome.answer)

    def run(self, operation: str, allowed: float, do: Callable[[], T], **facts: Any) -> T:
        """Do a call whose answer need not be in the journal."""
        with self.call(operation, allowed, **facts):
            return do()

    def close(self) -> None:
        os.close(self._file)


# -- reading -----------------------------------------------------------------------------------------


@dataclass
class Call:
    """A call as the journal shows it."""

    process: str
    number: int
    op: str
    begin: float
    allowed: float
    facts: Facts
    end: float = float("inf")
    """Infinite for a call that was under way when its process was killed."""
    error: str = KILLED
    """The error's code; "" for success."""
    message: str = ""
    answer: Any = None
    results: list[Facts] = field(default_factory=list)
    """Of a produce of several items that failed: the id or the error of each."""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def unknown(self) -> bool:
        """Whether it may have been done or not."""
        return self.error in (KILLED, "outcome_unknown")

    @property
    def name(self) -> str:
        return f"{self.process}#{self.number}"

    def __str__(self) -> str:
        return f"{self.op} {self.name} [{self.begin:.3f}…{self.end:.3f} {self.error or 'ok'}]"


def read_lines(path: Path) -> list[Facts]:
    """The lines of a journal. A last line that is not whole is left out."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_calls(folder: Path) -> list[Call]:
    """The calls in all journals of a folder, by the time at which they began."""
    found: list[Call] = []
    for path in sorted(folder.glob("*.calls")):
        calls: dict[int, Call] = {}
        for line in read_lines(path):
            number = line.pop("n")
            if "op" in line:
                call = calls[number] = Call(path.stem, number, line.pop("op"), line.pop("t"), line.pop("allowed"), line)
                found.append(call)
            else:
                call = calls[number]
                call.end, call.error, call.message = line["t"], line.get("error", ""), line.get("message", "")
                call.answer, call.results = line.get("answer"), line.get("results", [])
    return sorted(found, key=lambda call: call.begin)
