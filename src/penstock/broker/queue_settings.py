"""The options and partitions of the queues that exist, and how an operator or a program changes them.

Owns: `QueueSettings`, which answers `UpdateQueue`, `ResizeQueue`, `SetReadOnly` and `EnsureQueue`. A change is written
to the catalog first and applied to the queue afterwards. Every change of an option or of the width is logged.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from penstock.broker import partition_layout
from penstock.loop.catalog import Catalog
from penstock.loop.loop import Loop
from penstock.loop.requests import FunctionRequest, ResizeRequest
from penstock.loop.turn import QueueEngine
from penstock.operations import CreateQueue, EnsureQueue, FindQueue, Operation, ResizeQueue, SetReadOnly, UpdateQueue
from penstock.reports import QueueDescription, describe_queue
from penstock.rules import catalog
from penstock.rules.catalog import QueueEntry
from penstock.rules.commands import Call
from penstock.rules.options import changed_options
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest, QueueNotFound
from penstock.words.limits import MAX_PARTITIONS, check_range
from penstock.words.logs import log_fields

_log = logging.getLogger("penstock")


class QueueOwner(Protocol):
    """What the settings need of their broker."""

    catalog: Catalog
    clock: Clock

    def call(self, operation: Operation[Any], /) -> Any: ...
    def loop(self, incarnation: int) -> Loop: ...
    def entry(self, incarnation: int) -> QueueEntry: ...
    def changing_catalog(self) -> AbstractContextManager[None]: ...
    def changed_before(self, operation: Operation[Any]) -> QueueEntry | None: ...
    def configure(self, engine: QueueEngine) -> None: ...
    def apply_recorded_layout(self, engine: QueueEngine) -> None: ...


class QueueSettings:
    """Changes options and partitions of the queues of one broker."""

    def __init__(self, broker: QueueOwner) -> None:
        self._broker = broker
        self._ensuring = threading.Lock()

    def update(self, operation: UpdateQueue) -> QueueDescription:
        """New timeouts apply to new leases and items; every other option applies at once."""
        loop = self._broker.loop(operation.queue)
        with self._broker.changing_catalog():
            before = self._broker.entry(operation.queue)
            entry = self._broker.catalog.update(operation.queue, operation.changes, operation.call)
        loop.call(FunctionRequest(self._broker.configure, recorded_elsewhere=True))
        changed = changed_options(before.options, entry.options)
        if changed:
            _log.info("options of queue %r were changed: %s", entry.name, ", ".join(changed), extra=log_fields(queue=entry.name))
        return describe_queue(entry)

    def resize(self, operation: ResizeQueue) -> QueueDescription:
        check_range("partitions", operation.partitions, 1, MAX_PARTITIONS)
        return self._change_layout(operation, lambda entry: partition_layout.resized_layout(entry, operation.partitions))

    def set_read_only(self, operation: SetReadOnly) -> QueueDescription:
        return self._change_layout(
            operation, lambda entry: partition_layout.layout_with_read_only(entry, operation.partition, operation.read_only)
        )

    def _change_layout(
        self, operation: ResizeQueue | SetReadOnly, choose: Callable[[QueueEntry], partition_layout.PartitionLayout]
    ) -> QueueDescription:
        done = self._broker.changed_before(operation)
        if done is not None:
            return describe_queue(done)
        request = ResizeRequest(lambda engine: self.record_layout(engine, choose, operation.call), recorded_elsewhere=True)
        loop = self._broker.loop(operation.queue)
        before = len(self._broker.entry(operation.queue).active)
        entry = loop.call(request)
        text, about = "queue %r has %d partitions now (before: %d)", log_fields(queue=entry.name)
        _log.info(text, entry.name, len(entry.active), before, extra=about)
        return describe_queue(entry)

    def record_layout(
        self, engine: QueueEngine, choose: Callable[[QueueEntry], partition_layout.PartitionLayout], call: Call | None
    ) -> QueueEntry:
        """Inside a turn: write the new layout to the catalog, then apply it."""
        try:
            with self._broker.changing_catalog():
                return partition_layout.record_layout(self._broker.catalog, engine, choose, self._broker.clock.read().wall, call)
        finally:
            self._broker.apply_recorded_layout(engine)

    # -- ensure --------------------------------------------------------------------------------------

    def ensure(self, operation: EnsureQueue) -> QueueDescription:
        """Create the queue, or change what is different. One change at a time, so that equal calls of several programs
        find the queue as the first of them made it. A call that changes nothing does not wait for others."""
        partitions = operation.partitions
        if partitions is not None:
            check_range("partitions", partitions, 1, MAX_PARTITIONS)
        elif operation.resize:
            raise InvalidRequest("resize is True, and partitions is not given; give the number of partitions")
        unchanged = self._find_unchanged(operation)
        if unchanged is not None:
            return unchanged
        with self._ensuring:
            done = self._broker.changed_before(operation)
            if done is not None:
                return describe_queue(done)
            while True:
                wanted = CreateQueue(
                    name=operation.name, options=operation.options, partitions=partitions or 1, exist_ok=True, call=operation.call
                )
                found: QueueDescription = self._broker.call(wanted)
                try:
                    return self._change(operation, found.incarnation)
                except QueueNotFound:
                    if self._exists(found.incarnation):
                        raise  # the dead queue that is named is missing
                    # else the queue was deleted meanwhile, and is created anew

    def _find_unchanged(self, operation: EnsureQueue) -> QueueDescription | None:
        """The queue, if it exists and nothing must be changed; otherwise None."""
        existing = self._broker.catalog.state.names.get(operation.name)
        if existing is None or self._broker.changed_before(operation) is not None:
            return None
        try:
            if self._difference(operation, existing):
                return None
            found: QueueDescription = self._broker.call(FindQueue(queue=existing.incarnation))
        except QueueNotFound:
            if self._exists(existing.incarnation):
                raise
            return None
        self._log_kept_width(operation, existing)
        return found

    def _exists(self, incarnation: int) -> bool:
        return incarnation in self._broker.catalog.state.entries

    def _change(self, operation: EnsureQueue, incarnation: int) -> QueueDescription:
        """Change the width and the options of an existing queue, as far as they are asked for and different."""
        entry = self._broker.entry(incarnation)
        different, done = self._difference(operation, entry), describe_queue(entry)
        if "partitions" in different and operation.partitions is not None:
            # The call is recorded with the last change: if it is repeated after the first one, it does the rest.
            call = None if "options" in different else operation.call
            done = self.resize(ResizeQueue(queue=incarnation, partitions=operation.partitions, call=call))
        if "options" in different:
            done = self.update(UpdateQueue(queue=incarnation, changes=operation.options, call=operation.call))
        self._log_kept_width(operation, entry)
        return done

    def _difference(self, operation: EnsureQueue, entry: QueueEntry) -> set[str]:
        """What must be changed: "options", "partitions" or both. Raises if the options cannot be changed so."""
        found = {"options"} if catalog.update(self._broker.catalog.state, entry.incarnation, operation.options) else set()
        return found | ({"partitions"} if operation.resize and operation.partitions != len(entry.active) else set())

    def _log_kept_width(self, operation: EnsureQueue, entry: QueueEntry) -> None:
        if operation.partitions not in (None, len(entry.active)) and not operation.resize:
            text = "queue %r keeps its %d partitions, and %d were asked for; resize it to change that"
            _log.info(text, entry.name, len(entry.active), operation.partitions, extra=log_fields(queue=entry.name))
