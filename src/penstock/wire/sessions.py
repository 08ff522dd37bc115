"""The calls of sessions that a server has taken, to recognise repetitions.

Owns: `SessionTable`. A client that lost its connection repeats a call on another one. Then the original may still wait
here, and must be cancelled; or its bytes are read only after the repetition, and it must be ignored.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.rules.commands import Call

MAX_SESSIONS = 100_000
S = TypeVar("S")


class SessionTable(Generic[S]):
    """The newest call of each session."""

    def __init__(self) -> None:
        self._newest: dict[bytes, tuple[int, S]] = {}

    def enter(self, call: Call, served: S) -> tuple[bool, S | None]:
        """Note a call. Gives whether to run it (False: its repetition came before it), and the original if this call
        repeats one.
        """
        number, original = self._newest.pop(call.session, (0, None))
        if original is not None and call.number < number + (not call.again):
            self._newest[call.session] = number, original
            return False, None
        self._newest[call.session] = call.number, served  # at the end: oldest first
        if len(self._newest) > MAX_SESSIONS:
            del self._newest[next(iter(self._newest))]
        return True, original if call.number == number else None

    def forget(self, chosen: Callable[[S], bool]) -> None:
        """Forget the sessions whose newest call is one of those chosen."""
        for session in [session for session, (_, newest) in self._newest.items() if chosen(newest)]:
            del self._newest[session]
