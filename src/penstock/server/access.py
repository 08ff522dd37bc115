"""What the API key of a request allows.

Owns: `Access`, which says which operations a key allows on which queues and what it sees of their answers, and
`queues_in`.
- Each kind of operation names the scope that it needs. `FindQueue` needs any: whoever may produce to a queue must be
  able to find it.
- "look" shows counts, states, reasons, names of consumers and positions. Payloads, headers, references and keys of
  items need "read" (or "consume", which leases them).
- The prefixes of a key bind every queue that an operation names: its own, the one that it creates, the dead queue that
  it sets, the queue that it redrives to, and those of follow-ups, which need "produce" as well. Answers about the whole
  broker are filtered; an operation on the broker itself needs a key for all queues.
- Nobody learns which queues exist outside of their prefixes: such a name is refused whether the queue exists or not,
  and such an incarnation is answered like that of a deleted queue. Two things that a key may see do name other queues:
  the options of a queue name its dead queue, and an item that came from another queue has that origin.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.operations import (
    CreateQueue,
    CutLogs,
    DescribeOwner,
    EnsureQueue,
    ExplainItem,
    FindQueue,
    ListQueues,
    Operation,
    ReadHistory,
    ReadMetrics,
    RedriveItems,
    Scope,
    SettleItems,
    TraceItem,
    UpdateQueue,
)
from penstock.reports import BrokerMetrics, ItemEvent, ItemExplanation, ItemTrace, QueueDescription
from penstock.server.api_keys import SCOPES, ApiKey
from penstock.words.errors import AccessDenied, QueueNotFound
from penstock.words.ids import format_id

Op = TypeVar("Op", bound=Operation[Any])
QueueNames: TypeAlias = Callable[[int], str | None]
"""Gives the name of the queue with an incarnation; None if there is none."""
_NAMED = {CreateQueue, EnsureQueue, FindQueue}
"""Operations that give the name of their queue."""
_FILTERED = {ListQueues, ReadMetrics}
"""Operations on all queues whose answers can be filtered."""


class Access:
    """What one caller may do."""

    def __init__(self, scopes: Iterable[Scope] = SCOPES, prefixes: Iterable[str] = (), key_id: str = "") -> None:
        """prefixes: none for all queues. key_id: for messages; "" on a server that needs no keys."""
        self.scopes = frozenset(scopes)
        self.prefixes = tuple(prefixes)
        self.key_id = key_id

    @classmethod
    def of(cls, key: ApiKey | None) -> "Access":
        """The access that a key gives; everything for None, a request to a server that needs no keys."""
        return cls() if key is None else cls(key.scopes, key.prefixes, key.id)

    def allows_queue(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)

    # -- before the operation ------------------------------------------------------------------------

    def check(self, operation: Op, name_of: QueueNames) -> Op:
        """The operation as this caller may do it: a list is narrowed to the caller's queues.

        Raises AccessDenied, which names the scope or the prefix that is missing, and QueueNotFound for an incarnation
        that is unknown or not of the caller's queues.
        """
        kind = type(operation)
        if kind.scope not in self.scopes and kind is not FindQueue:
            raise self._no_scope(kind.scope, kind.__name__)
        if isinstance(operation, SettleItems) and operation.then and "produce" not in self.scopes:
            raise self._no_scope("produce", "a follow-up (then=)")
        return operation if not self.prefixes else self._check_queues(operation, name_of)

    def require(self, scope: Scope, queue: str, doing: str) -> None:
        """Raise AccessDenied unless the caller has the scope, for the queue of this name.

        For what is not an operation. doing: what it is, as in "reading a log".
        """
        if scope not in self.scopes:
            raise self._no_scope(scope, doing)
        self._require_name(queue)

    def _check_queues(self, operation: Op, name_of: QueueNames) -> Op:
        kind = type(operation)
        if kind in _FILTERED:
            return self._narrowed(operation)
        if kind in (DescribeOwner, CutLogs) or not (operation.queue or kind in _NAMED):
            raise AccessDenied(
                f"{kind.__name__} needs an API key for all queues, and {self._who} allows only {self._allowed}; use another key"
            )
        for incarnation in queues_in(operation):
            self._require_incarnation(incarnation, name_of)
        if isinstance(operation, CreateQueue | EnsureQueue | FindQueue) and (operation.name or not operation.queue):
            self._require_name(operation.name)
        if isinstance(operation, CreateQueue):
            self._require_dead_queue(operation.options)
            self._require_dead_queue(operation.given)
        elif isinstance(operation, EnsureQueue):
            self._require_dead_queue(operation.options)
        elif isinstance(operation, UpdateQueue):
            self._require_dead_queue(operation.changes)
        return operation

    def _narrowed(self, operation: Op) -> Op:
        """A ListQueues for the caller's queues only. To filter its answer would not do: an empty page means the end."""
        if not isinstance(operation, ListQueues):
            return operation
        asked = (operation.prefix,) if operation.prefixes is None else tuple(operation.prefixes)
        return msgspec.structs.replace(operation, prefixes=_common(asked, self.prefixes))

    def _require_name(self, name: str) -> None:
        if not self.allows_queue(name):
            raise AccessDenied(f"{self._who} does not allow queue {name!r:.250}, only {self._allowed}; use another key")

    def _require_dead_queue(self, options: Any) -> None:
        name = options.get("dead_queue")
        if isinstance(name, str) and name:
            self._require_name(name)

    def _require_incarnation(self, incarnation: int, name_of: QueueNames) -> None:
        name = name_of(incarnation)
        if name is None or not self.allows_queue(name):
            raise QueueNotFound(f"there is no such queue among {self._allowed}, or it was deleted; find it by name")

    def _no_scope(self, scope: Scope, doing: str) -> AccessDenied:
        return AccessDenied(f"{doing} needs the scope {scope!r}, which {self._who} does not have; use another key")

    @property
    def _who(self) -> str:
        return f"API key {self.key_id}"

    @property
    def _allowed(self) -> str:
        return f"queues that begin with {' or '.join(map(repr, self.prefixes))}"

    # -- after the operation -------------------------------------------------------------------------

    def filter_answer(self, operation: Operation[Any], answer: Any, name_of: QueueNames) -> Any:
        """The answer without what is about queues that the caller may not see."""
        show = _FILTERS.get(type(operation)) if self.prefixes else None
        return answer if show is None else show(self, operation, answer, name_of)

    def _shown_queues(self, _: ListQueues, answer: list[QueueDescription], __: QueueNames) -> list[QueueDescription]:
        return [queue for queue in answer if self.allows_queue(queue.name)]

    def _shown_metrics(self, _: ReadMetrics, answer: BrokerMetrics, __: QueueNames) -> BrokerMetrics:
        return BrokerMetrics({name: found for name, found in answer.queues.items() if self.allows_queue(name)})

    def _shown_explanation(self, operation: ExplainItem, answer: ItemExplanation, name_of: QueueNames) -> ItemExplanation:
        """Without the place of an item that was moved away. A deleted queue is not told from one that is not shown."""
        moved = answer.moved_to is not None and not self._shows(answer.moved_to, name_of)
        if self.allows_queue(answer.queue) and not moved:
            return answer
        why = "moved to a queue that was deleted, or that the API key does not show"
        return ItemExplanation(format_id(operation.partition, operation.offset), "", "moved", why)

    def _shown_trace(self, _: TraceItem, answer: ItemTrace, name_of: QueueNames) -> ItemTrace:
        return ItemTrace(*(at if self._shows(at, name_of) else None for at in (answer.came_from, answer.went_to)))

    def _shown_history(self, _: ReadHistory, answer: list[ItemEvent], __: QueueNames) -> list[ItemEvent]:
        return [
            msgspec.structs.replace(event, destination=self._shown_place(event.destination), source=self._shown_place(event.source))
            for event in answer
            if self.allows_queue(event.queue)
        ]

    def _shown_place(self, text: str) -> str:
        """A place "<queue>/<partition>" in an event, or nothing."""
        return text if self.allows_queue(text.partition("/")[0]) else ""

    def _shows(self, position: tuple[int, int, int] | None, name_of: QueueNames) -> bool:
        name = name_of(position[0]) if position is not None else None
        return name is not None and self.allows_queue(name)


def queues_in(operation: Operation[Any]) -> list[int]:
    """The incarnations that an operation names: those whose names `Access.check` asks for."""
    found = [operation.queue] if operation.queue else []
    if isinstance(operation, SettleItems):
        found += [incarnation for incarnation, _ in operation.then]
    elif isinstance(operation, RedriveItems):
        found.append(operation.to)
    return found


def _common(some: Sequence[str], others: Sequence[str]) -> list[str]:
    """Prefixes of the names that begin with one of `some` and with one of `others`."""
    pairs = ((one, other) for one in some for other in others)
    return sorted({max(one, other, key=len) for one, other in pairs if one.startswith(other) or other.startswith(one)})


_FILTERS: dict[type[Operation[Any]], Callable[[Access, Any, Any, QueueNames], Any]] = {
    ListQueues: Access._shown_queues,
    ReadMetrics: Access._shown_metrics,
    ExplainItem: Access._shown_explanation,
    TraceItem: Access._shown_trace,
    ReadHistory: Access._shown_history,
}
