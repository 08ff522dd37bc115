"""The inbox: requests that wait for a turn.

Owns: `Inbox`. Bounded: a full one refuses at once (`QueueBusy`), but for the places kept free for what relieves the queue: complete,
retry, bury, extend, an operator's word, transfers. Entering and taking out need no lock beyond the interpreter's: a deque is enough.
"""

from collections import deque
from collections.abc import Sequence

from penstock.loop.requests import Request
from penstock.words.errors import BrokerClosed, QueueBusy

PLACES = 10_000
RESERVED = 2_000


class Inbox:
    """Requests in the order in which they came."""

    def __init__(self, name: str, places: int = PLACES, reserved: int = RESERVED) -> None:
        self._name = name
        self._places = places
        self._reserved = reserved
        self._waiting: deque[Request] = deque()
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: Request, held: int = 0) -> None:
        """Take a request in, or refuse it. `held` others have a place already although a turn has taken them."""
        if self.closed:
            raise closed(self._name)
        if len(self._waiting) + held >= self._places + (self._reserved if request.reserved else 0):
            raise QueueBusy(f"{len(self._waiting) + held} requests wait for queue {self._name!r}; try again in a moment")
        self._waiting.append(request)
        if self.closed and request.claim():  # closing looked before this one came
            raise closed(self._name)

    def post(self, request: Request) -> None:
        """Take in what must not be refused: the queue's own messages."""
        self._waiting.append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Take in again, before all others, what a turn had taken and that was undone with it."""
        for request in reversed(requests):
            request.release()
            self._waiting.appendleft(request)

    def take(self, most: int, taken: list[Request]) -> None:
        """Up to `most` requests whose callers have not given up, out of the inbox; at no moment is one in nobody's hands."""
        while self._waiting and len(taken) < most:
            taken.append(self._waiting[0])
            if not taken[-1].claim():
                taken.pop()
            self._waiting.popleft()

    def wake_one(self) -> bool:
        """Open the gate of one caller that sleeps, so that it leads the next turn."""
        try:
            return any(not request.taken and request.open_gate() for request in self._waiting)
        except RuntimeError:  # somebody entered while we looked
            return self.wake_one()


def closed(name: str) -> BrokerClosed:
    return BrokerClosed(f"queue {name!r} is closed here; open the broker again")
