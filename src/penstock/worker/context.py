"""The context of a call of a handler.

Owns: `Context`, one for each call. A handler uses it to report progress, to ask for more time and to produce follow-ups. The worker uses
it to keep the call's deadline, and to have its outcome decided only once (`claim`): by the end of the handler or by its timeout.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.api import arguments as calls
from penstock.api.arguments import Seconds, bounded_duration
from penstock.api.items import Item, NewItem
from penstock.words.errors import InvalidRequest
from penstock.words.values import Value


class ContextBackend(Protocol):
    """What a context needs of the worker."""

    @property
    def stopping(self) -> bool:
        """The worker stops at once and does not wait for handlers."""

    def now(self) -> int: ...
    def report_progress(self, context: "Context", text: str) -> None:
        """Write a progress report. Does not wait."""

    def check_queue(self, context: "Context", name: str) -> None:
        """Raise QueueNotFound if there is no such queue."""

    def deadline_changed(self, context: "Context") -> None:
        """The deadline of the call was moved."""

    def token(self, context: "Context") -> str: ...


class Context:
    """What a handler gets besides its item: `def handle(item, context)`."""

    __slots__ = ("_backend", "_mine", "deadline", "follow_ups", "items", "lease_data", "lease_lost", "queue", "started_at")

    def __init__(self, backend: ContextBackend, queue: str, tag: Any, items: Sequence[Item]) -> None:
        self._backend = backend
        self.queue = queue
        """The name of the queue."""
        self.items = items
        """The items of this call: one, unless it is a batch handler's."""
        self.lease_data = tag
        """What the backend needs to know of the items: their leases, or in a child process the token."""
        self.started_at = 0
        self.deadline = 0
        """When it runs too long; 0 is never."""
        self.follow_ups: list[NewItem | Value] = []
        self.lease_lost = False
        self._mine = [True]

    @property
    def item(self) -> Item:
        return self.items[0]

    @property
    def attempt(self) -> int:
        """How often the item was leased, this time included."""
        return self.items[0].attempts

    @property
    def token(self) -> str:
        """What proves the lease of the item, to be passed on. The worker extends and settles the lease; a handler has no need to."""
        return self._backend.token(self)

    @property
    def cancelled(self) -> bool:
        """Whether the result is not waited for any more: the worker stops at once, `handler_timeout` is over, or the lease was lost."""
        return self.lease_lost or self._backend.stopping or not self._mine

    def progress(self, share: float | str, text: str = "") -> None:
        """Say how far it has come: a share from 0 to 1, a text, or both. It is seen in `queue.explain(id)` while the handler works.

        It does not wait, and the last word counts: a handler may say it as often as it likes.
        """
        if isinstance(share, str):
            said = share
        elif isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InvalidRequest(f"the progress is {share!r}; give a share from 0 to 1, or a text")
        else:
            said = f"{share:.0%} {text}".rstrip()
        self._backend.report_progress(self, said)

    def extend(self, timeout: Seconds) -> None:
        """Let the handler run for so long from now before `handler_timeout` strikes. Its lease is extended in any case."""
        self.deadline = self._backend.now() + bounded_duration(timeout, "timeout")
        self._backend.deadline_changed(self)

    def follow_up(self, item: NewItem | Value) -> None:
        """Produce an item exactly if this one is completed: into the queue that a NewItem names, or else into the same queue."""
        if len(self.items) > 1:
            raise InvalidRequest("a follow-up belongs to one item, and this handler has several; use a handler of single items")
        for name in calls.follow_ups([item]):
            if name is not None:
                self._backend.check_queue(self, name)
        self.follow_ups.append(item)

    def claim(self) -> bool:
        """Take the right to decide the outcome of the items: True for the first caller only."""
        try:
            return self._mine.pop()
        except IndexError:
            return False

    def __repr__(self) -> str:
        return f"Context({self.items[0]!r}{f' and {len(self.items) - 1} more' if len(self.items) > 1 else ''})"
