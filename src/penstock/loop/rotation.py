"""When the newest segment of a log is closed and the next one begun: by its size and by its age.

Owns: `RotationPlan`. The limits are those of the queue; a large Base makes larger segments, so that few writes are
Bases. Limits that are changed apply to the newest segment too.
"""

from penstock.loop.retention import LEAST_ROTATION_AGE, SEGMENT_AGE, rotation_age, rotation_time
from penstock.rules.state import State

CLOSE_FRAMES = 2
"""With no more frames than an opening writes, no checkpoint is written at closing, and age causes no rotation."""


class RotationPlan:
    """The limits of a partition's newest segment, and how far it is from them."""

    __slots__ = ("_base_offset", "_least_age", "_started", "age", "room", "size_bytes")

    def __init__(self, size_bytes: int, age: int = SEGMENT_AGE) -> None:
        self.size_bytes = size_bytes
        self.age = age
        self._least_age = min(age, LEAST_ROTATION_AGE)
        self.room = 0
        """How many bytes it may still get: whoever writes to it subtracts them."""
        self._base_offset = 0
        self._started = 0  # by elapsed time

    def set_limits(self, size_bytes: int, age: int) -> None:
        """Change the limits. Another thread may use the plan: it sees the old limits or the new ones."""
        self.room += size_bytes - self.size_bytes
        self.size_bytes, self.age, self._least_age = size_bytes, age, min(age, LEAST_ROTATION_AGE)

    def begin(self, offset: int, started: int, used: int, base_bytes: int = 0) -> None:
        """Note the first offset and the start time of the newest segment, its size, and that of its Base."""
        self.room = max(self.size_bytes, 4 * base_bytes) - used
        self._base_offset, self._started = offset, started

    def postpone(self, now: int, used: int) -> None:
        """Fill the newest segment once more: no other one can be begun."""
        self.begin(self._base_offset, now, used)

    def is_full(self, state: State, now: int, frames: int) -> bool:
        """Whether the newest segment, which has so many frames, is full or old."""
        if self.room <= 0:
            return True
        if now < self._started + self._least_age:
            return False
        if state.next_offset > self._base_offset:
            return now >= self._started + rotation_age(state.policy.retention, self.age)
        return frames > CLOSE_FRAMES and now >= self._started + self.age  # else it is almost empty

    def due_at(self, state: State) -> int | None:
        """When the newest segment is closed for its age, also without a write; None: it has no items."""
        return rotation_time(state, self._base_offset, self._started, self.age)
