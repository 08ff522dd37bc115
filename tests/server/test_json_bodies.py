"""Bodies of the JSON API: content types, compression, Arrow streams, sizes, and requests that are wrong."""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.server import arrow_streams, json_call, request_body
from penstock.server.arrow_streams import ARROW_TYPE
from penstock.server.http_server import HttpServer
from penstock.server.server_limits import ServerLimits
from penstock.words import errors
from penstock.words.limits import KIB, MIB
from tests.server.conftest import serve
from tests.server.json_client import Answer, JsonClient, json_client

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMIT = 2 * MIB


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[penstock.Broker, HttpServer]]:
    with penstock.open("memory://") as broker, serve(broker.home, ServerLimits(body_bytes=LIMIT)) as server:
        yield broker, server


@pytest.fixture
def broker(served: tuple[penstock.Broker, HttpServer]) -> penstock.Broker:
    return served[0]


@pytest.fixture
def client(served: tuple[penstock.Broker, HttpServer]) -> Iterator[JsonClient]:
    with json_client(served[1]) as client:
        yield client


@pytest.fixture
def queue(broker: penstock.Broker, request: pytest.FixtureRequest) -> penstock.Queue:
    return broker.create_queue(request.node.name.partition("[")[0], exist_ok=True)


def produce(queue: penstock.Queue, **item: Any) -> bytes:
    return json.dumps({"queue_name": queue.name, "items": [item]}).encode()


# -- what is wrong with a request --------------------------------------------------------------------


def test_a_path_that_does_not_exist_names_similar_ones(client: JsonClient) -> None:
    status, code, message = client.refused("queue.produced")
    assert (status, code) == (404, "unknown_path")
    assert message.startswith("there is nothing at '/v1/queue.produced'; did you mean /v1/queue.produce or ")
    assert client.send("/some/where/else", b"", "GET").json["message"] == "there is nothing at '/some/where/else'; see /openapi.json"


@pytest.mark.parametrize(("path", "method", "allowed"), [("/v1/queue.lease", "GET", "POST"), ("/openapi.json", "DELETE", "GET")])
def test_a_path_has_one_method(client: JsonClient, path: str, method: str, allowed: str) -> None:
    answer = client.send(path, b"", method)
    assert (answer.status, answer.json["code"], answer.headers["allow"]) == (405, "method_not_allowed", allowed)


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", ARROW_TYPE])
def test_a_body_must_be_json(client: JsonClient, kind: str | None) -> None:
    """Also so that a page in a browser cannot send it to another origin unasked."""
    answer = client.send("/v1/queues.list", b"{}", content_type=kind)
    assert (answer.status, answer.json["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(("path", "method"), [("/v1/queues.list", "POST"), ("/metrics", "GET")])
def test_a_server_without_keys_is_not_for_pages_in_browsers(client: JsonClient, path: str, method: str) -> None:
    """Their name may mean 127.0.0.1; then the browser takes the server for their own."""
    answer = client.send(path, b"{}", method, origin="http://evil.example:2319")
    assert (answer.status, answer.json["code"]) == (403, "access_denied")
    assert answer.json["message"] == (
        "a page in a browser sent this (its Origin is 'http://evil.example:2319'), and this server needs no API key; "
        "send it from a program, or create a key (penstock keys create)"
    )


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_the_content_type_may_have_parameters(client: JsonClient, kind: str) -> None:
    assert client.send("/v1/queues.list", b"{}", content_type=kind).status == 200


@pytest.mark.parametrize(
    ("accept", "status"),
    [(None, 200), ("*/*", 200), ("text/html, application/json;q=0.9", 200), ("application/*", 200), ("text/html", 406), (ARROW_TYPE, 406)],
)
def test_the_reply_is_json_if_the_client_takes_it(client: JsonClient, accept: str | None, status: int) -> None:
    answer = client.send("/v1/queues.list", b"{}", accept=accept)
    assert answer.status == status
    assert status == 200 or answer.json["code"] == "not_acceptable"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is empty; send a JSON object, {} for one without fields"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{", "truncated"),
        (b"{} {}", "trailing"),
        (b'{"limit": NaN}', "malformed"),
        (b'{"limit": "5"}', "Expected `int`, got `str` - at `$.limit`"),
        (b'{"limit": 1.5}', "Expected `int`, got `float` - at `$.limit`"),
        (b'{"limit": 10001}', "Expected `int` <= 10000 - at `$.limit`"),
        (b'{"colour": 1}', "unknown field `colour`"),
        (b'{"prefix": "\\ud800"}', "the body is not as it must be"),
        (b'{"prefix": "\xff"}', "the body is not as it must be"),
        (b'{"a":' * 100_000, "the body is not as it must be"),
    ],
    ids=range(12),
)
def test_a_body_that_is_wrong_is_refused_with_the_reason(client: JsonClient, body: bytes, why: str) -> None:
    answer = client.send("/v1/queues.list", body)
    assert (answer.status, answer.json["code"]) == (400, "invalid_request")
    assert why in answer.json["message"]


def test_whole_numbers_may_be_written_as_floats(client: JsonClient, queue: penstock.Queue) -> None:
    body = b'{"queue_name": "%s", "batch_size": 2.0, "per_key": 1e0, "request_timeout": 0}' % queue.name.encode()
    assert client.send("/v1/queue.lease", body).status == 200
    body = b'{"queue_name": "%s", "offsets": {"0": 3.0}, "wait": 0.0}' % queue.name.encode()
    assert client.send("/v1/log.read", body).json["next_offsets"] == {"0": 3}
    body = (
        b'{"queue_name": "%s", "items": [{"bytes": "AAE=", "priority": 3.0, "enqueue_at": "2020-01-01T00:00:00Z"}]}' % queue.name.encode()
    )
    assert client.send("/v1/queue.produce", body).status == 200
    assert queue.lease()[0].item.payload == b"\x00\x01"


def test_a_name_that_is_no_name(client: JsonClient) -> None:
    for path in ("queue.stats", "queues.info", "queues.create"):
        assert client.refused(path, queue_name="a b")[:2] == (400, "invalid_request")
        assert client.refused(path, queue_name="")[:2] == (400, "invalid_request")
    assert client.refused("queue.stats", queue_name="none")[:2] == (404, "queue_not_found")


# -- sizes and compression ---------------------------------------------------------------------------


def test_large_bodies_are_decoded_and_answered(client: JsonClient, queue: penstock.Queue) -> None:
    text = "x" * (300 * KIB)
    client.ok("queue.produce", queue_name=queue.name, items=[{"utf8": text}])
    assert client.ok("queue.lease", queue_name=queue.name)["items"][0]["utf8"] == text


def test_a_body_that_is_too_large_is_refused(client: JsonClient, queue: penstock.Queue) -> None:
    answer = client.send("/v1/queue.produce", produce(queue, utf8="x" * LIMIT))
    assert (answer.status, answer.json["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "GZIP"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_body_may_be_compressed(client: JsonClient, queue: penstock.Queue, encoding: str, parts: int) -> None:
    compress = zstd.compress if encoding == "zstd" else gzip.compress
    body = produce(queue, utf8="x" * 1_000)
    packed = compress(body) if parts == 1 else compress(body[:100]) + compress(body[100:])
    assert client.send("/v1/queue.produce", packed, content_encoding=encoding).status == 200
    assert queue.lease(1)[0].item.value == "x" * 1_000


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_that_is_too_large_decompressed_is_refused(client: JsonClient, encoding: str) -> None:
    compress = zstd.compress if encoding == "zstd" else gzip.compress
    for packed in (compress(b" " * (LIMIT + 1)), compress(b" " * LIMIT) + compress(b" ")):
        answer = client.send("/v1/queues.list", packed, content_encoding=encoding)
        assert (answer.status, answer.json["code"]) == (413, "body_too_large")
    bomb = compress(b" " * (64 * MIB))
    assert len(bomb) < 100 * KIB
    assert client.send("/v1/queues.list", bomb, content_encoding=encoding).status == 413


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"{}", "br", 415),
        (gzip.compress(b"{}"), "gzip, gzip", 415),
        (b"{}", "gzip", 400),
        (b"{}", "zstd", 400),
        (b"", "gzip", 400),
        (gzip.compress(b"{}")[:-3], "gzip", 400),
        (zstd.compress(b"{}")[:-3], "zstd", 400),
        (zlib.compress(b"{}"), "gzip", 400),
        (b"{}", "identity", 200),
    ],
    ids=range(9),
)
def test_compression_that_is_wrong(client: JsonClient, body: bytes, encoding: str, status: int) -> None:
    assert client.send("/v1/queues.list", body, content_encoding=encoding).status == status


def test_a_body_of_very_many_values_is_refused_before_it_is_decoded() -> None:
    request_body.check_value_count(b'{"items": [' + b"{}," * 900_000 + b"{}]}")
    with pytest.raises(errors.InvalidRequest, match="more than 1,000,000 values"):
        request_body.check_value_count(b'{"items": [' + b"{}," * 1_000_001 + b"{}]}")
    text = json.dumps({"utf8": '",\\' * 1_000_001}).encode()
    assert request_body.check_value_count(text) is text  # commas in texts do not count


# -- Arrow streams -----------------------------------------------------------------------------------


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def send_stream(client: JsonClient, body: bytes, query: str, **headers: str | None) -> Answer:
    return client.send(f"/v1/queue.produce?{query}", body, "POST", content_type=ARROW_TYPE, **headers)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_an_arrow_stream_is_produced(client: JsonClient, queue: penstock.Queue, compression: str | None) -> None:
    keys = pa.array([f"k{number % 3}" for number in range(500)]).dictionary_encode()
    table = pa.table({"payload": [b"%d" % number for number in range(500)], "key": keys, "priority": [4] * 500})
    body, query = stream(table, compression=compression), f"queue_name={queue.name}&request_id={compression}"
    first = send_stream(client, body, query)
    assert first.status == 200
    assert len(first.json["items"]) == 500 and all(list(item) == ["id"] for item in first.json["items"])
    assert send_stream(client, body, query).json == first.json  # by its request id
    assert send_stream(client, body, f"queue_name={queue.name}", idempotency_key=str(compression)).json == first.json
    found = queue.lease(500, per_key=500)
    assert sorted(int(lease.item.payload) for lease in found) == [*range(500)]
    assert {lease.item.priority for lease in found} == {4}
    found.complete()


def test_leased_items_are_given_as_an_arrow_stream(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([penstock.NewItem(b"%d" % number, kind="k", headers={"a": "b"}) for number in range(50)])
    body = json.dumps({"queue_name": queue.name, "batch_size": 100}).encode()
    answer = client.send("/v1/queue.lease", body, accept=ARROW_TYPE)
    assert (answer.status, answer.headers["content-type"]) == (200, ARROW_TYPE)
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table["payload"].to_pylist() == [b"%d" % number for number in range(50)]
    assert table["headers"].to_pylist()[0] == [("a", b"b")]
    assert str(table.schema.field("lease_deadline").type) == "timestamp[us, tz=UTC]"
    client.ok("queue.complete", queue_name=queue.name, lease_tokens=table["lease_token"].to_pylist())
    assert queue.stats().completed == 50
    empty = client.send("/v1/queue.lease", body, accept=ARROW_TYPE)
    assert pa.ipc.open_stream(empty.content).read_all().num_rows == 0


def test_the_log_is_given_as_an_arrow_stream(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b", b"c"])
    body = json.dumps({"queue_name": queue.name, "limit": 2}).encode()
    table = pa.ipc.open_stream(client.send("/v1/log.read", body, accept=ARROW_TYPE).content).read_all()
    assert table["payload"].to_pylist() == [b"a", b"b"]
    assert json.loads(table.schema.metadata[b"next_offsets"]) == {"0": 2}


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("", "has no queue_name"),
        ("queue_name=none", "no queue 'none'"),
        ("queue_name=q&color=red", "has an unknown field 'color'"),
        ("queue_name=q&request_timeout=soon", "request_timeout is 'soon'"),
        ("queue_name=%ff", "the query string cannot be understood"),
    ],
    ids=range(5),
)
def test_the_query_string_of_an_arrow_stream(client: JsonClient, query: str, why: str) -> None:
    answer = send_stream(client, stream(pa.table({"payload": [b"a"]})), query)
    assert answer.status in (400, 404)
    assert why in answer.json["message"]


def test_an_arrow_stream_that_is_wrong(client: JsonClient, queue: penstock.Queue) -> None:
    good = stream(pa.table({"payload": [b"a" * 100]}))
    query = f"queue_name={queue.name}"
    for body in (b"", b"{}", good[:40], good[:-60], good[:100] + b"\xff" * 60 + good[160:], b"\xff\xff\xff\xff\xff\xff\xff\x7f" + good):
        answer = send_stream(client, body, query)
        assert (answer.status, answer.json["code"]) == (400, "invalid_request"), body
    unknown = send_stream(client, stream(pa.table({"payload": [b"a"], "color": [1]})), query)
    assert unknown.json["message"].startswith("the column 'color' is not known")
    assert queue.stats().produced == 0


def test_an_arrow_stream_that_is_too_large_decoded_is_refused(client: JsonClient, queue: penstock.Queue) -> None:
    query = f"queue_name={queue.name}"
    zeros = stream(pa.table({"payload": [b"\0" * (LIMIT + 1)]}), compression="zstd")
    shared = stream(pa.table({"payload": pa.array([b"x" * (100 * KIB)] * 100).dictionary_encode()}))
    _, view, text = pa.array([b"x" * (100 * KIB)], pa.binary_view()).buffers()
    views = pa.Array.from_buffers(pa.binary_view(), 100, [None, pa.py_buffer(view.to_pybytes()[:16] * 100), text])
    for body in (zeros, shared, stream(pa.table({"payload": views}))):
        assert len(body) < LIMIT // 2
        answer = send_stream(client, body, query)
        assert (answer.status, answer.json["code"]) == (413, "body_too_large")
    answer = send_stream(client, stream(pa.table({"payload": pa.nulls(200_001, pa.binary()).fill_null(b"")})), query)
    assert "has 200001 rows; send at most 200000 at a time" in answer.json["message"]
    assert queue.stats().produced == 0


def test_rows_after_a_failure_are_refused_like_it(client: JsonClient, broker: penstock.Broker) -> None:
    queue = broker.create_queue("small", max_items=10_000)
    table = pa.table({"payload": [b""] * 20_001})
    answer = send_stream(client, stream(table), "queue_name=small&request_timeout=0s")
    assert answer.status == 200
    results = answer.json["items"]
    assert [("id" in one) for one in results] == [True] * 10_000 + [False] * 10_001
    assert {one["error"]["code"] for one in results[10_000:]} == {"queue_full"}
    answer = send_stream(client, stream(table), "queue_name=small&request_timeout=0s")
    assert (answer.status, answer.json["code"], len(answer.json["items"])) == (429, "queue_full", 20_001)
    assert queue.stats().ready == 10_000


def test_without_pyarrow_streams_are_refused(broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_streams, "find_spec", lambda name: None)  # as if it were not installed
    with serve(broker.home) as server, json_client(server) as client:
        answer = send_stream(client, stream(pa.table({"payload": [b"a"]})), "queue_name=q")
        assert (answer.status, answer.json["code"]) == (415, "unsupported_media_type")
        assert "install penstock[arrow] on the server" in answer.json["message"]
        answer = client.send("/v1/queue.lease", b'{"queue_name": "q"}', accept=ARROW_TYPE)
        assert (answer.status, answer.json["code"]) == (406, "not_acceptable")
        assert "install penstock[arrow] on the server" in answer.json["message"]


def test_many_items_are_handled_in_another_thread(client: JsonClient, queue: penstock.Queue) -> None:
    """Both ways give the same."""
    count = json_call.MANY + 1
    items = [{"utf8": str(number)} for number in range(count)]
    client.ok("queue.produce", queue_name=queue.name, items=items)
    found = client.ok("queue.lease", queue_name=queue.name, batch_size=count)["items"]
    assert [item["utf8"] for item in found] == [item["utf8"] for item in items]
