"""What a partition owes: the steps taken since all was last safe, the appends that carried them, and the model before them.

Owns: `Account`. It watches a log's appends, so that after a death it knows exactly which of the steps are there: an append is found
whole or not at all, and none without those before it. Whether those that were promised are among them is for `World` to check.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.logs.api import Draft, Frame, Gap
from penstock.logs.files.filelog import FileLog
from simulation.partition.model import Model


class Append(NamedTuple):
    """Frames that were written together."""

    last_sequence: int
    steps: int
    """How many steps had been taken by then."""


class Account:
    """A model, and how to take it back to what was found."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.appended = 0
        """How many of the steps that a power cut may take back were appended, found again or not."""
        self.written = 0
        """How many of them a process kill may not take back."""
        self._appends: list[Append] = []
        self._steps: list[Callable[[Model], None]] = []
        self._kept = pickle.dumps(model)  # the model before them
        self._opening = True

    def take(self, step: Callable[[Model], None]) -> None:
        """The model takes a step."""
        step(self.model)
        self._steps.append(step)

    def watch(self, log: FileLog) -> None:
        """Take note of what is appended to a log, and, when it is recovered, forget what is not there any more."""
        append, recover = log.append, log.recover
        opened: list[int] = []

        def noting_append(drafts: Sequence[Draft]) -> int:
            last = log.sequence + len(drafts)
            if not self._opening:
                self.appended = len(self._steps)
                self._appends.append(Append(last, self.appended))  # also if it fails: it may be there
            elif opened:  # behind the record of the opening, which is no step: leases that were answered, once more
                self._appends.append(Append(last, self.written))
            opened.append(last)
            return append(drafts)

        def noting_recover() -> Iterator[Frame | Gap]:
            last, self._opening = 0, True
            opened.clear()
            for found in recover():
                last = found.sequence if isinstance(found, Frame) else last
                yield found
            self._appends = [one for one in self._appends if one.last_sequence <= last]

        log.append, log.recover = noting_append, noting_recover  # type: ignore[method-assign]

    def committed(self) -> None:
        """Answers leave: from now on a process kill may take nothing back."""
        self.written = self.appended

    def all_kept(self) -> None:
        """Whatever happens from now on, everything up to here must be found."""
        self._kept = pickle.dumps(self.model)
        self._steps.clear()
        self._appends.clear()
        self.appended, self.written, self._opening = 0, 0, False

    @property
    def found(self) -> int:
        """How many steps are there."""
        return self._appends[-1].steps if self._appends else 0

    def go_back(self, steps: int) -> None:
        """Make the model what it was after so many steps."""
        self.model = pickle.loads(self._kept)
        for step in self._steps[:steps]:
            step(self.model)
