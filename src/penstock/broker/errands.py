"""Errands: what those who do not own a broker's directory may ask of whoever does, by a file in the inbox.

Owns: `Errand`, `Reply`, and `Errands`, which does them. An errand that asks for an answer gets one, whatever comes of it; one that could
not be done for now stays in the inbox and is tried again, so each verb may be run twice.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, get_type_hints

import msgspec

from penstock.broker.consuming import Consuming, Count
from penstock.broker.consuming import Host as ConsumingHost
from penstock.logs.store import Inbox, Waiting
from penstock.reports import QueueInfo
from penstock.words import errors
from penstock.words.errors import InvalidRequest, PenstockError

T = TypeVar("T")


class Errand(msgspec.Struct):
    """A verb and its arguments."""

    verb: str
    args: dict[str, Any] = {}
    answer: bool = True


class Reply(msgspec.Struct):
    """What came of it: a value, or an error by its code."""

    value: Any = None
    error: str = ""
    message: str = ""

    def result(self) -> Any:
        """The value, or the error raised."""
        if self.error:
            raise _ERRORS.get(self.error, PenstockError)(self.message)
        return self.value


class Host(ConsumingHost, Protocol):
    """What a broker is to its errands."""

    def find(self, name: str) -> QueueInfo: ...


class Errands:
    """Does what is asked in the inbox of one broker."""

    def __init__(self, inbox: Inbox, host: Host) -> None:
        self._inbox = inbox
        self._host = host
        self._consuming = Consuming(inbox, host)
        verbs: dict[str, Callable[..., Any]] = {
            "cursor": self._cursor,
            "redrive": self._redrive,
            "take": self._consuming.take,
            "renew": self._consuming.renew,
            "settle": self._consuming.settle,
            "let_go": self._consuming.let_go,
        }
        self._verbs = {name: (verb, _arguments(verb)) for name, verb in verbs.items()}

    def run(self, waiting: Waiting) -> None:
        """Do one errand, answer it, and take it out of the inbox."""
        raw = self._inbox.body(waiting)
        if raw is None:
            return
        wants_answer = True
        try:
            errand = _understood(raw, Errand)
            wants_answer = errand.answer
            reply = Reply(self._do(waiting.incarnation, errand))
        except PenstockError as error:
            if error.retryable and not isinstance(error, errors.QueueHeld):
                raise
            reply = Reply(error=error.code, message=str(error))
        if wants_answer:
            self._inbox.put_note(waiting.incarnation, waiting.name, msgspec.msgpack.encode(reply))
        self._inbox.done(waiting, raw)

    def _do(self, incarnation: int, errand: Errand) -> Any:
        found = self._verbs.get(errand.verb)
        if found is None:
            raise InvalidRequest(f"there is no errand {errand.verb!r}; there are {', '.join(sorted(self._verbs))}")
        self._host.entry(incarnation)  # or it was deleted
        verb, arguments = found
        return verb(incarnation, **msgspec.structs.asdict(_understood(errand.args, arguments)))

    def _cursor(self, incarnation: int, name: str, positions: Mapping[Count, Count]) -> None:
        """A reader has come so far; a cursor never goes back by this."""
        known = self._host.ask(incarnation, "cursor", name=name)
        assert isinstance(known, dict)
        onward = {partition: max(offset, known.get(partition, 0)) for partition, offset in positions.items()}
        self._host.ask(incarnation, "move_cursor", name=name, offsets=onward)

    def _redrive(self, incarnation: int, items: Mapping[Count, Sequence[Count]], to: str = "") -> Any:
        """Items that are ready or buried go to the queue named, or, buried, back to their places here; says how many did."""
        if not to:
            return self._host.ask(incarnation, "redrive", partition_offsets=items)
        return self._host.ask(incarnation, "send", partition_offsets=items, to=self._host.find(to).incarnation)


def _understood(given: bytes | dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(given, type=kind) if isinstance(given, bytes) else msgspec.convert(given, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the errand cannot be understood ({error}); use the same Penstock on both sides") from error


def _arguments(verb: Callable[..., Any]) -> type[msgspec.Struct]:
    """The arguments of a verb, but for the queue, as a type that refuses wrong ones."""
    hints = get_type_hints(verb, include_extras=True)
    fields: list[Any] = []
    for name, parameter in [*inspect.signature(verb).parameters.items()][1:]:
        fields.append((name, hints[name], *(() if parameter.default is parameter.empty else (parameter.default,))))
    return msgspec.defstruct(verb.__name__, fields, forbid_unknown_fields=True)


_ERRORS: dict[str, type[PenstockError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)
}
