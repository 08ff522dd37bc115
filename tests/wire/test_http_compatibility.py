"""Clients and servers of one major version work together, whichever is older: they understand recorded messages."""

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from penstock import operations
from penstock.operations import OPERATIONS, FindQueue, answer_type
from penstock.wire.http_calls import CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.wire.messages import MAJOR, decode_answer
from penstock.words.errors import InvalidRequest, QueueNotFound
from tests.server.poster import Poster
from tests.wire.recorded_messages import FOLDER, Recording, post, predictable_server

RECORDINGS = {path.stem: Recording.load(path) for path in sorted(FOLDER.glob(f"{MAJOR}.*.json"))}


@pytest.fixture(params=list(RECORDINGS))
def recording(request: pytest.FixtureRequest) -> Recording:
    return RECORDINGS[request.param]


def test_this_version_is_recorded() -> None:
    """If it is not: python -m tests.wire.recorded_messages."""
    assert VERSION in RECORDINGS


def test_operations_of_older_clients_are_understood(recording: Recording) -> None:
    assert recording.operations
    for raw in recording.operations:
        operation = operations.decode(raw)
        assert operations.decode(operations.encode(operation)) == operation
        assert type(operation).__name__ == msgspec.msgpack.decode(raw)["type"]


def test_an_older_client_gets_the_answers_that_it_understands(recording: Recording) -> None:
    """The same requests, byte for byte: the statuses are the same, and the answers have everything that they had."""
    with predictable_server() as server:
        poster = Poster(server)
        for recorded in recording.conversation:
            step = post(poster, recorded.request, recording.version)
            named = type(operations.decode(recorded.request)).__name__
            assert step.status == recorded.status, (named, step)
            assert_same_shape(msgspec.msgpack.decode(step.answer), msgspec.msgpack.decode(recorded.answer), named)
        poster.connection.close()


def assert_same_shape(found: Any, recorded: Any, where: str) -> None:
    """An older program finds in an answer what it knows, in the same place and of the same type."""
    if found is None or recorded is None:
        return
    assert type(found) is type(recorded) or {type(found), type(recorded)} <= {int, float}, (where, found, recorded)
    if isinstance(recorded, dict):
        assert recorded.keys() <= found.keys(), (where, found, recorded)
        for name, value in recorded.items():
            assert_same_shape(found[name], value, f"{where}.{name}")
    elif isinstance(recorded, list):
        assert len(found) >= len(recorded), (where, found, recorded)
        for index, (one, other) in enumerate(zip(found, recorded, strict=False)):
            assert_same_shape(one, other, f"{where}[{index}]")


def test_answers_of_older_servers_are_understood(recording: Recording) -> None:
    for step in recording.conversation:
        kind = type(operations.decode(step.request))
        if step.status == 200:
            decode_answer(kind, step.answer)
        else:
            assert isinstance(decode_error(step.answer), QueueNotFound)


def test_answers_of_newer_servers_with_fields_that_are_not_known_are_understood(recording: Recording) -> None:
    added = 0
    for step in recording.conversation:
        kind = type(operations.decode(step.request))
        if step.status == 200:
            raw = msgspec.msgpack.decode(step.answer)
            newer = with_new_fields(raw, inspect.type_info(answer_type(kind)))
            added += newer != raw
            assert decode_answer(kind, msgspec.msgpack.encode(newer)) == decode_answer(kind, step.answer), kind.__name__
    assert added >= 10


def with_new_fields(raw: Any, kind: Any) -> Any:
    """A value in which every struct has one more field."""
    if isinstance(kind, inspect.UnionType):
        kind = next((one for one in kind.types if isinstance(one, inspect.StructType) and isinstance(raw, dict)), kind)
    if isinstance(kind, inspect.ListType | inspect.CollectionType):
        return [with_new_fields(one, kind.item_type) for one in raw]
    if isinstance(kind, inspect.DictType):
        return {name: with_new_fields(one, kind.value_type) for name, one in raw.items()}
    if isinstance(kind, inspect.StructType) and isinstance(raw, dict) and not kind.forbid_unknown_fields:
        types = {field.encode_name: field.type for field in kind.fields}
        known = {name: with_new_fields(one, types[name]) if name in types else one for name, one in raw.items()}
        return {**known, "added_later": 1}
    return raw


@pytest.fixture
def poster() -> Any:
    with predictable_server() as server:
        poster = Poster(server)
        yield poster
        poster.connection.close()


@pytest.mark.parametrize("version", [f"{MAJOR}.0", f"{MAJOR}.99"])
def test_every_minor_version_is_served(poster: Poster, version: str) -> None:
    step = post(poster, operations.encode(FindQueue(name="nobody")), version)
    assert isinstance(decode_error(step.answer), QueueNotFound)


def test_what_a_newer_client_asks_for_in_addition_is_refused(poster: Poster) -> None:
    """An operation or a field that this server does not know cannot be left out: the client would think it was done."""
    known = msgspec.msgpack.decode(operations.encode(FindQueue(name="nobody")))
    for raw in ({**known, "type": "TeleportItems"}, {**known, "added_later": 1}):
        status, _, answer = poster.post(CALL_PATH, msgspec.msgpack.encode(raw), {VERSION_HEADER: VERSION})
        error = decode_error(answer)
        assert (status, type(error)) == (400, InvalidRequest) and "use the same Penstock on both sides" in str(error)


def test_fields_with_their_defaults_are_not_sent() -> None:
    """So that an older server refuses only what it cannot do."""
    assert all(kind.__struct_config__.omit_defaults for kind in OPERATIONS)
    assert msgspec.msgpack.decode(operations.encode(FindQueue())) == {"type": "FindQueue"}
