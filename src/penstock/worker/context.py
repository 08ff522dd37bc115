"""The context of one call of a handler.

Owns: `Context`. A handler uses it to report progress, to ask for more time and to produce follow-ups. The worker keeps
the deadline of the call there, and uses `claim` so that the outcome is decided once: by the end of the handler or by
its timeout.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from penstock.api import arguments
from penstock.api.arguments import Seconds, bounded_duration
from penstock.api.items import Item, NewItem
from penstock.api.traces import active_tracer
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest
from penstock.words.values import Value, timestamp

if TYPE_CHECKING:
    from penstock.api.spans import HandleSpan


class ContextBackend(Protocol):
    """The operations of the worker that a context uses."""

    @property
    def stopping(self) -> bool:
        """Whether the worker stops at once and does not wait for handlers."""

    def moment(self) -> Moment: ...
    def report_progress(self, context: "Context", text: str) -> None:
        """Have a progress report written, without waiting for it."""

    def check_queue(self, context: "Context", name: str) -> None:
        """Raise QueueNotFound if there is no such queue."""

    def deadline_changed(self, context: "Context") -> None:
        """Called when the deadline of the call has changed."""

    def token(self, context: "Context") -> str: ...


class Context:
    """The second argument of a handler: `def handle(item, context)`."""

    __slots__ = ("_backend", "_unclaimed", "follow_ups", "items", "lease_data", "lease_lost", "queue", "span", "started", "times_out_at")

    def __init__(self, backend: ContextBackend, queue: str, lease_data: Any, items: Sequence[Item]) -> None:
        self._backend = backend
        self.queue = queue
        """The name of the queue."""
        self.items = items
        """The items of this call: one item, or several for a batch handler."""
        self.lease_data = lease_data
        """The leases of the items; in a child process, the token of the first item."""
        self.started = 0
        self.times_out_at = 0
        """Both for the worker, by its elapsed clock in microseconds. 0: not measured, and never."""
        self.follow_ups: list[NewItem | Value] = []
        self.lease_lost = False
        self.span: HandleSpan | None = None
        """The OpenTelemetry span of the call, in a traced process."""
        self._unclaimed = [True]
        """Empty once `claim` has succeeded."""

    @property
    def item(self) -> Item:
        return self.items[0]

    @property
    def attempt(self) -> int:
        """How often the item was leased, including this lease."""
        return self.items[0].attempts

    @property
    def token(self) -> str:
        """The token of the item's lease, for other programs. The worker extends and settles the lease without it."""
        return self._backend.token(self)

    @property
    def deadline(self) -> datetime | None:
        """When the handler will have run too long (`handler_timeout`, moved by `extend`); None is never."""
        if not self.times_out_at:
            return None
        now = self._backend.moment()
        return timestamp(now.wall + self.times_out_at - now.elapsed)

    @property
    def cancelled(self) -> bool:
        """Whether the result will be ignored: the worker stops at once, the handler timed out, the lease was lost."""
        return self.lease_lost or self._backend.stopping or not self._unclaimed

    def progress(self, share: float | str, text: str = "") -> None:
        """Report progress: a share from 0 to 1, a text, or both. `queue.explain(id)` shows it while the handler runs.

        It does not wait. Frequent reports are cheap: only the latest one is written.
        """
        if isinstance(share, str):
            report = share
        elif isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InvalidRequest(f"the progress is {share!r}; give a share from 0 to 1, or a text")
        else:
            report = f"{share:.0%} {text}".rstrip()
        self._backend.report_progress(self, report)

    def extend(self, timeout: Seconds) -> None:
        """Move the deadline of `handler_timeout` to this many seconds from now. The lease is extended in any case."""
        self.times_out_at = self._backend.moment().elapsed + bounded_duration(timeout, "timeout")
        self._backend.deadline_changed(self)

    def follow_up(self, item: NewItem | Value) -> None:
        """Produce an item together with the completion of this one, and not otherwise.

        It goes into the queue that a NewItem names, or else into the queue of this item.
        """
        if len(self.items) > 1:
            raise InvalidRequest("a follow-up belongs to one item, and this call has several; use a handler of single items")
        for name in arguments.follow_ups([item]):
            if name is not None:
                self._backend.check_queue(self, name)
        tracer = active_tracer()
        self.follow_ups.append(item if tracer is None else tracer.follow_up(item))

    def current_span(self) -> AbstractContextManager[None]:
        """A block in which the span of the call is the current one, if it has one."""
        return nullcontext() if self.span is None else self.span.current()

    def claim(self) -> bool:
        """Take the right to decide the outcome of the items. True for the first caller only."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def __repr__(self) -> str:
        return f"Context({self.items[0]!r}{f' and {len(self.items) - 1} more' if len(self.items) > 1 else ''})"
