"""`penstock serve`: processes that the command line starts, and how a server ends."""

import http.client
import json
import signal
import socket
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import operations
from penstock.operations import FindQueue, LeaseItems, Operation, ProduceItems
from penstock.server.bind_addresses import BindAddress
from penstock.server.http_server import HttpServer
from penstock.server.server_limits import ServerLimits
from penstock.wire.http_calls import CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.wire.messages import decode_answer
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown
from tests.cli import programs
from tests.cli.conftest import CommandLine
from tests.cli.conftest import cli as cli
from tests.cli.conftest import orders_cli as orders_cli
from tests.server.conftest import serve
from tests.server.poster import address_of, wait_until
from tests.server.test_tls import client_context, write_certificate

HEADERS = {VERSION_HEADER: VERSION}


class Caller:
    """A connection to a server, by its URL."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None) -> None:
        self.connection: http.client.HTTPConnection
        if url.startswith("unix:"):
            self.connection = http.client.HTTPConnection("localhost", timeout=30)
            self.connection.sock = socket.socket(socket.AF_UNIX)
            self.connection.sock.connect(url.removeprefix("unix:"))
        else:
            host, _, port = url.partition("://")[2].rpartition(":")
            kind = http.client.HTTPSConnection if context is not None else http.client.HTTPConnection
            options: Any = {} if context is None else {"context": context}
            self.connection = kind(host.strip("[]"), int(port), timeout=30, **options)

    def send(self, operation: Operation[Any], headers: dict[str, str] = HEADERS) -> None:
        self.connection.request("POST", CALL_PATH, operations.encode(operation), headers)

    def answer(self, kind: type[Operation[Any]]) -> Any:
        with self.connection.getresponse() as response:
            body = response.read()
            if response.status != 200:
                raise decode_error(body)
            return decode_answer(kind, body)

    def call(self, operation: Operation[Any]) -> Any:
        self.send(operation)
        return self.answer(type(operation))

    def send_a_part(self) -> None:
        """Send a request without the last byte of its body."""
        self.connection.putrequest("POST", CALL_PATH)
        self.connection.putheader("content-length", "100")
        self.connection.endheaders()
        self.connection.send(b"x" * 99)

    def close(self) -> None:
        self.connection.close()


def caller(url: str, context: ssl.SSLContext | None = None) -> "closing[Caller]":
    return closing(Caller(url, context))


BROKER_LINES = (" is open, with ", " was created, with ", " is closed")


def next_note(program: programs.Program) -> str:
    """The next line of its log that the server itself wrote, not its broker."""
    return next(line for line in iter(program.note, "") if not any(text in line for text in BROKER_LINES))


def last_notes(err: str) -> list[str]:
    """The rest of what the server itself wrote."""
    return [line for line in err.splitlines() if not any(text in line for text in BROKER_LINES)]


def start(program: programs.Program) -> dict[str, Any]:
    """What a server that was started with --json says about itself."""
    line = program.line()
    assert line, program.end()
    found: dict[str, Any] = json.loads(line)
    return found


# -- processes ---------------------------------------------------------------------------------------


def test_it_serves_until_a_signal_and_drains(orders_cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, unix = tmp_path / "ready", tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        args = ["--bind", "127.0.0.1:0", "--bind", f"unix:{unix}", "--ready-file", str(ready)]
        with programs.penstock("serve", str(orders_cli.target), *args, "--set", "log.level=info") as program:
            line = program.line()
            tcp = ready.read_text().splitlines()[0]
            assert line == f"serving {orders_cli.target} on {tcp}, unix:{unix}: owner of the directory, keys off, TLS off"
            assert ready.read_text() == f"{tcp}\nunix:{unix}\n"
            assert manager.recv(1000).decode() == f"READY=1\nSTATUS=serving on {tcp}, unix:{unix}"
            with caller(tcp) as client, caller(f"unix:{unix}") as other, caller(tcp) as idle:
                queue = client.call(FindQueue(name="orders")).incarnation
                assert idle.call(FindQueue(name="orders")).incarnation == queue
                client.send(LeaseItems(queue=queue, wait=600 * SECOND))
                wait_until(lambda: orders_cli.json("stats", "orders")["waiting_consumers"] == 1)
                program.signal(signal.SIGTERM)
                assert client.answer(LeaseItems) == []
                assert manager.recv(1000).decode() == "STOPPING=1\nSTATUS=draining"
                code, out, err = program.end()
                assert (code, out) == (0, "")
                assert last_notes(err) == [
                    "penstock: draining: 1 request, 1 waiting lease; a second signal (Ctrl-C) ends at once",
                    "penstock: closed",
                ]
                assert idle.connection.sock.recv(1) == other.connection.sock.recv(1) == b""
    assert not ready.exists() and not unix.exists()
    assert orders_cli.json("stats")["owner"] is None


def test_a_second_signal_ends_at_once(orders_cli: CommandLine) -> None:
    args = ["--json", "--bind", "127.0.0.1:0", "--drain-timeout", "10m"]
    with programs.penstock("serve", str(orders_cli.target), *args) as program:
        found = start(program)
        assert {**found, "urls": ()} == {
            "urls": (), "directory": str(orders_cli.target), "owner": True, "keys": False, "tls": False, "pid": program.pid
        }  # fmt: skip
        with caller(found["urls"][0]) as client:
            client.send_a_part()
            program.signal(signal.SIGINT)
            assert next_note(program).startswith("penstock: draining: ")
            program.signal(signal.SIGINT)
            code, out, err = program.end()
            assert (code, out, last_notes(err)) == (1, "", ["penstock: 1 request ended unfinished", "penstock: closed"])
            with pytest.raises(OutcomeUnknown, match="the server ends; send the request again"):
                client.answer(FindQueue)


def test_it_serves_through_another_owner_and_takes_over(orders_cli: CommandLine) -> None:
    with (
        programs.python(programs.OPEN, orders_cli.target) as owner,
        programs.penstock("serve", str(orders_cli.target), "--bind", "127.0.0.1:0", "--json") as program,
    ):
        found = start(program)
        assert found["owner"] is False
        with caller(found["urls"][0]) as client:
            queue = client.call(FindQueue(name="orders")).incarnation
            client.call(ProduceItems(queue=queue, batch=Batch([b"1"])))
            owner.signal(signal.SIGKILL)
            wait_until(lambda: (orders_cli.json("stats")["owner"] or {}).get("pid") == program.pid)
            client.call(ProduceItems(queue=queue, batch=Batch([b"2"])))
            assert orders_cli.json("stats", "orders")["ready"] == 2


def test_sighup_reads_the_certificate_again(cli: CommandLine, tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    (tmp_path / "penstock.toml").write_text(
        f'bind = ["localhost:0"]\n[tls]\ncert = "server.pem"\nkey = "server.key"\n[broker]\ndirectory = "{cli.target}"\ncreate = true\n'
        "[queues.orders]\npartitions = 3\n"
    )
    with programs.penstock("serve", "--config", str(tmp_path / "penstock.toml"), "--json") as program:
        found = start(program)
        assert found["tls"] is True

        def shown() -> bytes:
            with caller(found["urls"][0], client_context()) as client:
                assert client.call(FindQueue(name="orders")).partitions == 3
                assert isinstance(client.connection.sock, ssl.SSLSocket)
                return client.connection.sock.getpeercert(binary_form=True) or b""

        first = shown()
        Path(files.key).write_text("nonsense")
        program.signal(signal.SIGHUP)
        assert next_note(program) == "penstock: queue orders: is created, with 3 partitions"
        assert next_note(program).startswith("penstock: the certificate is not replaced: the certificate ")
        assert shown() == first
        write_certificate(tmp_path)
        program.signal(signal.SIGHUP)
        assert next_note(program).startswith("penstock: new connections get the certificate in ")
        assert shown() != first


def test_with_keys_it_listens_everywhere_and_audits(orders_cli: CommandLine, tmp_path: Path) -> None:
    text = orders_cli.json("keys", "create", "web", "--scope", "look")["text"]
    audit = tmp_path / "audit.log"
    args = ["--bind", "0.0.0.0:0", "--audit-file", str(audit), "--json"]
    with programs.penstock("serve", str(orders_cli.target), *args) as program:
        found = start(program)
        assert found["keys"] is True
        assert next_note(program).startswith("penstock: keys are sent to 0.0.0.0:0 without encryption; ")
        with caller(found["urls"][0]) as client:
            client.send(FindQueue(name="orders"), {**HEADERS, "Authorization": f"Bearer {text}"})
            assert client.answer(FindQueue).name == "orders"
            client.send(FindQueue(name="orders"))
            with pytest.raises(penstock.errors.PenstockError, match="no API key was given"):
                client.answer(FindQueue)
    assert json.loads(audit.read_text())["outcome"] == "unauthenticated"


# -- the end of a server, in this process ------------------------------------------------------------


def test_requests_that_run_may_finish() -> None:
    """A request whose body was on its way when the server was stopped is answered; then its connection is closed."""
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders").incarnation
        with serve(broker.home) as server, caller(server.url) as client:
            body = operations.encode(FindQueue(queue=queue))
            client.connection.putrequest("POST", CALL_PATH)
            client.connection.putheader(VERSION_HEADER, VERSION)
            client.connection.putheader("content-length", str(len(body)))
            client.connection.endheaders()
            client.connection.send(body[:-1])
            wait_until(lambda: server.requests == 1)
            server.stop()
            wait_until(lambda: server.draining)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address_of(server), 30)
            client.connection.send(body[-1:])
            assert client.answer(FindQueue).name == "orders"
            wait_until(lambda: server.connections == 0)
        assert server.unfinished == 0


def test_after_the_drain_timeout_requests_are_ended() -> None:
    with penstock.open("memory://") as broker:
        with serve(broker.home, drain_seconds=0.01) as server, caller(server.url) as client:
            client.send_a_part()
            wait_until(lambda: server.requests == 1)
            server.stop()
            with pytest.raises(OutcomeUnknown, match="the server ends"):
                client.answer(FindQueue)
        assert server.unfinished == 1


def test_a_client_that_does_not_read_cannot_keep_the_server_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders")
        queue.produce_many([bytes(1 << 20)] * 16)
        with serve(broker.home, drain_seconds=0.01) as server, closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address_of(server))
            body = operations.encode(LeaseItems(queue=queue.incarnation, count=16))
            head = f"POST {CALL_PATH} HTTP/1.1\r\n{VERSION_HEADER}: {VERSION}\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_until(lambda: queue.stats().leased == 16)
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_a_lease_of_a_draining_server_does_not_wait() -> None:
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders")
        queue.produce("x")
        with serve(broker.home) as server, caller(server.url) as held, caller(server.url) as client:
            held.send_a_part()
            body = operations.encode(LeaseItems(queue=queue.incarnation, wait=600 * SECOND, count=2))
            client.connection.putrequest("POST", CALL_PATH)
            client.connection.putheader(VERSION_HEADER, VERSION)
            client.connection.putheader("content-length", str(len(body)))
            client.connection.endheaders()
            client.connection.send(body[:-1])
            wait_until(lambda: server.requests == 2)
            server.stop()
            wait_until(lambda: server.draining)
            client.connection.send(body[-1:])
            (part,) = client.answer(LeaseItems)
            assert len(part.items[0].batch.payloads) == 1
            server.stop()


def test_waiting_leases_of_a_draining_server_keep_no_items() -> None:
    """A lease that ends without items leaves those that come later to others."""
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders")
        with serve(broker.home) as server, caller(server.url) as client:
            client.send(LeaseItems(queue=queue.incarnation, wait=600 * SECOND))
            wait_until(lambda: queue.stats().waiting_consumers == 1)
            server.stop()
            assert client.answer(LeaseItems) == []
        queue.produce("x")
        assert len(queue.lease(1)) == 1


def test_a_server_may_be_stopped_before_it_has_started() -> None:
    with penstock.open("memory://") as broker:
        server = HttpServer(broker.home, BindAddress.parse("127.0.0.1:0").bind(), ServerLimits())  # type: ignore[arg-type]
        server.stop()
        server.run()
        assert server.draining
