"""The calls of Penstock's own client, as bytes."""

import socket
from contextlib import closing
from pathlib import Path

import pytest

import penstock
from penstock import operations
from penstock.operations import CreateQueue, FindQueue, LeaseItems, ProduceItems, ReadStats
from penstock.rules.commands import Call
from penstock.server.http_server import HttpServer
from penstock.server.server_limits import ServerLimits
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.wire.messages import decode_answer
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown
from tests.server.conftest import serve
from tests.server.poster import Poster, address_of, wait_until, waiting_leases


def test_operations_are_answered(poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    assert poster.call(FindQueue(name="orders")).incarnation == queue
    assert poster.call(FindQueue(queue=queue)).name == "orders"
    poster.call(ProduceItems(queue=queue, batch=Batch([b"1", b"2"])))
    (part,) = poster.call(LeaseItems(queue=queue, count=5))
    assert part.items[0].batch.payloads == [b"1", b"2"]


def test_a_client_that_leaves_cancels_its_lease(server: HttpServer, poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    with closing(Poster(server).connection) as other:
        other.request("POST", CALL_PATH, operations.encode(LeaseItems(queue=queue, wait=60 * SECOND)), {VERSION_HEADER: VERSION})
        wait_until(lambda: waiting_leases(poster, queue) == 1)
    wait_until(lambda: waiting_leases(poster, queue) == 0)
    poster.call(ProduceItems(queue=queue, batch=Batch([b"1"])))
    assert poster.call(LeaseItems(queue=queue))


def test_a_repetition_takes_the_place_of_the_original_that_still_waits(server: HttpServer, poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    original = LeaseItems(queue=queue, wait=60 * SECOND, call=Call(b"s" * 16, 1))
    with closing(Poster(server).connection) as old, closing(Poster(server).connection) as new:
        old.request("POST", CALL_PATH, operations.encode(original), {VERSION_HEADER: VERSION})
        wait_until(lambda: waiting_leases(poster, queue) == 1)
        repetition = LeaseItems(queue=queue, wait=60 * SECOND, call=Call(b"s" * 16, 1, True, SECOND))
        new.request("POST", CALL_PATH, operations.encode(repetition), {VERSION_HEADER: VERSION})
        ended = old.getresponse()
        assert (ended.status, decode_error(ended.read()).code) == (503, "outcome_unknown")
        wait_until(lambda: waiting_leases(poster, queue) == 1)
        poster.call(ProduceItems(queue=queue, batch=Batch([b"1"])))
        (part,) = decode_answer(LeaseItems, new.getresponse().read())
        assert part.items[0].batch.payloads == [b"1"]
        # The original's bytes may arrive after the repetition: they change nothing.
        old.request("POST", CALL_PATH, operations.encode(original), {VERSION_HEADER: VERSION})
        with pytest.raises(OutcomeUnknown, match="was repeated meanwhile"):
            raise decode_error(old.getresponse().read())


def test_a_repeated_produce_adds_nothing(poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    (first,) = poster.call(ProduceItems(queue=queue, batch=Batch([b"1"]), call=Call(b"s" * 16, 1)))
    (again,) = poster.call(ProduceItems(queue=queue, batch=Batch([b"1"]), call=Call(b"s" * 16, 1, True, SECOND)))
    assert (again.stored.base, again.stored.repeated) == (first.stored.base, True)
    assert poster.call(ReadStats(queue=queue)).ready == 1


def test_a_large_batch_comes_whole(poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    payloads = [bytes([number % 251]) * 20_000 for number in range(200)]
    poster.call(ProduceItems(queue=queue, batch=Batch(payloads)))
    (part,) = poster.call(LeaseItems(queue=queue, count=2_000))
    assert [payload for items in part.items for payload in items.batch.payloads] == payloads


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"\xc1garbage", {VERSION_HEADER: VERSION}, 400, "the operation cannot be understood"),
        (b"", {VERSION_HEADER: VERSION}, 400, "the operation cannot be understood"),
        (b"", {}, 400, "use the same major version"),
        (b"", {VERSION_HEADER: "2.0"}, 400, "use the same major version"),
        (operations.encode(FindQueue(name="nobody")), {VERSION_HEADER: VERSION}, 404, "there is no queue 'nobody'"),
    ],
)
def test_a_wrong_call_is_refused_with_what_to_do(poster: Poster, body: bytes, headers: dict[str, str], status: int, message: str) -> None:
    found, kind, answer = poster.post(CALL_PATH, body, headers)
    assert (found, kind) == (status, ANSWER_TYPE)
    assert message in str(decode_error(answer))


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as broker, serve(broker.home, ServerLimits(body_bytes=1_000)) as server:
        with closing(socket.create_connection(address_of(server), 30)) as sock:
            sock.sendall(f"POST {CALL_PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
        with closing(socket.create_connection(address_of(server), 30)) as sock:
            sock.sendall(f"POST {CALL_PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            sock.sendall(b"3e8\r\n" + b"x" * 1_000 + b"\r\n1\r\nx\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
