"""A broker that another process owns: looked at beside it, and asked through its inbox.

Owns: `InboxClient`, the home of Spark's driver and tasks. Queries are answered from what is published, as it is at the moment of the
call; a staged write is published without the owner; any other operation is put into the inbox as bytes, and the owner does it in a moment,
or whoever opens the broker next (broker/inbox.py). It holds no lock and no thread.
"""

import os
from collections.abc import Callable
from threading import Event
from typing import Any, cast

import msgspec

from penstock import operations
from penstock.broker.inbox import Errand, Reply
from penstock.broker.snapshot import Snapshot
from penstock.logs.api import Readable
from penstock.logs.backends import Files, Target, open_read_only
from penstock.logs.store import DropManifest, ReadStore
from penstock.operations import TIMEOUT, A, Cancel, Done, Operation, PublishWrite, Query, Staging, answer_type
from penstock.rules.routing import digest
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import OutcomeUnknown, PenstockError, StorageFailed

POLL_SECONDS = 0.005


class InboxClient:
    """A broker's directory, from a process that does not own it."""

    def __init__(self, store: ReadStore, clock: Clock, timeout: int = TIMEOUT, meanwhile: Callable[[], None] = lambda: None) -> None:
        """timeout: how long an answer of the owner is waited for. meanwhile: called again and again while it is."""
        self.clock = clock
        self.timeout = timeout
        self._store = store
        self._meanwhile = meanwhile
        self._seen: Snapshot | None = None

    @classmethod
    def open(cls, target: Target, *, files: Files | None = None, clock: Clock | None = None, **options: Any) -> "InboxClient":
        return cls(open_read_only(target, files=files), clock or SystemClock(), **options)

    def call(self, operation: Operation[A], /) -> A:
        """Where no answer comes in time: StorageFailed if the operation was still there to be taken back, else OutcomeUnknown."""
        if isinstance(operation, Query):
            found: A = self._snapshot().call(operation)
            return found
        if isinstance(operation, PublishWrite):
            manifest = DropManifest([*operation.parts], operation.source, operation.number)
            published: Any = self._store.inbox.publish(operation.write, operation.queue, manifest)
            return cast(A, published)
        return self._ask(operation)

    def submit(self, operation: Operation[Any], done: Done | None = None, /) -> Cancel:
        """Without `done` this does not wait for the owner: it is in the inbox durably when this returns. Else it is waited for here."""
        if done is None:
            name = _name(operation)
            self._store.inbox.put_errand(operation.queue, name, _errand(operation, answer=False))
            return lambda: self._store.inbox.withdraw(operation.queue, name)
        try:
            found: Any = self.call(operation)
        except PenstockError as error:
            found = error
        done(found)
        return lambda: None

    def keep(self, queue: int, partition: int, lease: int, /) -> None:
        raise StorageFailed(f"{self._store.name} is owned by another process, which does not keep leases for this one; extend them")

    let_go = keep

    def log(self, queue: int, partition: int, /) -> Readable:
        return self._snapshot(refresh=False).log(queue, partition)

    def staging(self) -> Staging:
        return self._store.inbox

    def has_owner(self) -> bool:
        """Whether some process has the broker open, as far as can be told."""
        return self._store.inbox.has_owner()

    def close(self) -> None:
        if self._seen is not None:
            self._seen.close()
        self._store.close()

    def __repr__(self) -> str:
        return f"InboxClient({self._store.name!r})"

    # -- steps ---------------------------------------------------------------------------------------

    def _snapshot(self, refresh: bool = True) -> Snapshot:
        if self._seen is None:
            self._seen = Snapshot(self._store, self.clock)
        elif refresh:
            self._seen.refresh()
        return self._seen

    def _ask(self, operation: Operation[A]) -> A:
        inbox, queue, name = self._store.inbox, operation.queue, f"{type(operation).__name__}-{os.urandom(8).hex()}"
        deadline = self.clock.read().elapsed + self.timeout
        inbox.put_errand(queue, name, _errand(operation, answer=True))
        while (raw := inbox.note(queue, name)) is None:
            if self.clock.read().elapsed > deadline:
                raw = self._last_look(queue, name)
                break
            self._meanwhile()
            Event().wait(POLL_SECONDS)
        inbox.remove_note(queue, name)
        reply = msgspec.msgpack.decode(raw, type=Reply)
        if reply.refused is not None:
            raise reply.refused.error()
        answer: A = msgspec.msgpack.decode(reply.answer, type=answer_type(type(operation)))
        return answer

    def _last_look(self, queue: int, name: str) -> bytes:
        inbox, owner = self._store.inbox, self._store.name
        waits = any((one.incarnation, one.name, one.is_errand) == (queue, name, True) for one in inbox.waiting())
        inbox.withdraw(queue, name)
        found = inbox.note(queue, name)
        if found is not None:
            return found
        if not waits:
            raise OutcomeUnknown(f"the owner of {owner} took up the word and has not answered; look what became of it")
        raise StorageFailed(
            f"nobody who has {owner} open has answered for {self.timeout / SECOND:g} s; keep the broker open in some program "
            f"(penstock.open({owner!r}), or a worker) while this runs"
        )


def _errand(operation: Operation[Any], answer: bool) -> bytes:
    return msgspec.msgpack.encode(Errand(msgspec.Raw(operations.encode(operation)), answer))


def _name(operation: Operation[Any]) -> str:
    """The same for operations of which a newer one takes the place of an older one that still waits."""
    told = [repr(getattr(operation, field)) for field in operation.about] or [os.urandom(8).hex()]
    return f"{type(operation).__name__}-{digest(b'errand', *(one.encode() for one in told)).hex()}"
