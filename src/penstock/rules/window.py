"""What is remembered for a while: request ids and what was answered.

Owns: `Window`. Entries lie in generations of a sixteenth of the window by the time they came, so that forgetting drops a whole
generation and costs nothing per entry. An entry is answered for at least its window, and never after it.
"""

from collections import deque
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Window(Generic[Value]):
    """Values by 16-byte id, each until its deadline."""

    __slots__ = ("_generations", "total")

    def __init__(self) -> None:
        self._generations: deque[tuple[int, dict[bytes, tuple[int, Value]]]] = deque()
        self.total = 0

    def __len__(self) -> int:
        return self.total

    def get(self, name: bytes, now: int) -> Value | None:
        for _, entries in self._generations:
            found = entries.get(name)
            if found is not None and found[0] > now:
                return found[1]
        return None

    def put(self, name: bytes, value: Value, now: int, span: int) -> None:
        """Remember `value` until now + span; also forgets what is over."""
        self.forget(now)
        deadline = now + span
        step = max(1, span // 16)
        last = deadline - deadline % step + step  # every entry of a generation is over by then
        entries = next((known for until, known in self._generations if until == last), None)
        if entries is None:
            entries = {}
            self._generations.append((last, entries))
        self.total += name not in entries
        entries[name] = (deadline, value)

    def forget(self, now: int) -> None:
        """Drop the generations that are over."""
        if any(until <= now for until, _ in self._generations):
            self._generations = deque(pair for pair in self._generations if pair[0] > now)
            self.total = sum(len(entries) for _, entries in self._generations)

    def live(self, now: int) -> list[tuple[bytes, int, Value]]:
        """What is remembered at `now` as (id, deadline, value), in a settled order."""
        latest: dict[bytes, tuple[int, Value]] = {}
        for _, entries in self._generations:
            for name, (deadline, value) in entries.items():
                if deadline > now and (name not in latest or deadline > latest[name][0]):
                    latest[name] = (deadline, value)
        return [(name, deadline, value) for name, (deadline, value) in sorted(latest.items(), key=lambda pair: (pair[1][0], pair[0]))]

    def restore(self, name: bytes, deadline: int, value: Value) -> None:
        """Put back an entry of `live` (in its order)."""
        if not self._generations:
            self._generations.append((deadline, {}))
        until, entries = self._generations[0]
        self._generations[0] = (max(until, deadline), entries)
        self.total += name not in entries
        entries[name] = (deadline, value)
