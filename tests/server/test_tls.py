"""TLS with certificates that the test makes."""

import http.client
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

import penstock
from penstock.server.http_server import HttpServer
from penstock.server.server_limits import ServerLimits
from penstock.server.tls import TlsFiles, check_tls, tls_context
from penstock.words.errors import InvalidRequest
from tests.server.conftest import serve
from tests.server.poster import wait_until

AUTHORITY = trustme.CA()


def write_certificate(folder: Path, authority: trustme.CA = AUTHORITY, name: str = "server") -> TlsFiles:
    """Make a certificate for 127.0.0.1 in two files, which are replaced if they exist."""
    made = authority.issue_cert("127.0.0.1", "localhost")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    return TlsFiles(str(cert), str(key))


def client_context(authority: trustme.CA = AUTHORITY) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@contextmanager
def served(files: TlsFiles, **limits: Any) -> Iterator[HttpServer]:
    with penstock.open("memory://") as broker, serve(broker.home, ServerLimits(**limits), tls=files) as server:
        yield server


def address(server: HttpServer) -> tuple[str, int]:
    assert server.url.startswith("https://127.0.0.1:")
    return "127.0.0.1", int(server.url.rpartition(":")[2])


class TlsClient:
    """A connection that checks the server's certificate."""

    def __init__(self, server: HttpServer, context: ssl.SSLContext | None = None) -> None:
        self.connection = http.client.HTTPSConnection(*address(server), timeout=30, context=context or client_context())
        self.connection.connect()

    def status(self) -> int:
        self.connection.request("GET", "/nothing")
        with self.connection.getresponse() as response:
            response.read()
            return response.status

    @property
    def certificate(self) -> bytes:
        """The certificate that the server has shown."""
        assert isinstance(self.connection.sock, ssl.SSLSocket)
        return self.connection.sock.getpeercert(binary_form=True) or b""

    def close(self) -> None:
        self.connection.close()


def tls_client(server: HttpServer, context: ssl.SSLContext | None = None) -> "closing[TlsClient]":
    return closing(TlsClient(server, context))


def test_requests_are_answered_over_tls(tmp_path: Path) -> None:
    with served(write_certificate(tmp_path)) as server, tls_client(server) as client:
        assert client.status() == client.status() == 404
        assert isinstance(client.connection.sock, ssl.SSLSocket)
        assert client.connection.sock.version() == "TLSv1.3"


def test_tls_older_than_1_2_is_refused(tmp_path: Path) -> None:
    context = client_context()
    assert tls_context(write_certificate(tmp_path)).minimum_version == ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with served(write_certificate(tmp_path)) as server, tls_client(server, context) as client:
        assert client.status() == 404


def test_a_client_without_a_certificate_of_the_client_ca_is_refused(tmp_path: Path) -> None:
    clients, strangers = trustme.CA(), trustme.CA()
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    files = write_certificate(tmp_path)
    with served(TlsFiles(files.cert, files.key, str(tmp_path / "clients.pem"))) as server:
        known = client_context()
        clients.issue_cert("client@example.net").configure_cert(known)
        with tls_client(server, known) as client:
            assert client.status() == 404
        unknown = client_context()
        strangers.issue_cert("client@example.net").configure_cert(unknown)
        for context in (unknown, client_context()):
            with pytest.raises((ssl.SSLError, ConnectionError)), tls_client(server, context) as client:
                client.status()


# -- reload ------------------------------------------------------------------------------------------


def shown(server: HttpServer) -> bytes:
    """The certificate that a new connection sees."""
    with tls_client(server) as client:
        return client.certificate


def test_after_a_reload_new_connections_see_the_new_certificate_and_old_ones_go_on(tmp_path: Path) -> None:
    with served(write_certificate(tmp_path)) as server, tls_client(server) as old:
        first = old.certificate
        assert (old.status(), shown(server)) == (404, first)
        write_certificate(tmp_path)
        assert shown(server) == first  # the files count when they are reloaded
        server.reload()
        wait_until(lambda: shown(server) != first)
        assert (old.status(), old.certificate) == (404, first)
        with tls_client(server) as new:
            assert new.status() == 404
            server.reload()  # without a change
            assert new.status() == old.status() == 404


def test_a_file_that_cannot_be_used_keeps_the_old_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write_certificate(tmp_path)
    with served(files) as server:
        first = shown(server)
        Path(files.cert).write_text("not a certificate")
        server.reload()
        wait_until(lambda: any("the certificate is not replaced" in record.getMessage() for record in caplog.records))
        assert shown(server) == first
        write_certificate(tmp_path)
        server.reload()
        wait_until(lambda: shown(server) != first)


def test_a_reload_replaces_the_client_ca(tmp_path: Path) -> None:
    """The clients of the former authority are not let in any more."""
    former, present = trustme.CA(), trustme.CA()
    authorities = tmp_path / "clients.pem"
    former.cert_pem.write_to_path(str(authorities))
    files = write_certificate(tmp_path)
    contexts = {}
    for authority in (former, present):
        contexts[authority] = client_context()
        authority.issue_cert("client@example.net").configure_cert(contexts[authority])
    with served(TlsFiles(files.cert, files.key, str(authorities))) as server:

        def is_let_in(authority: trustme.CA) -> bool:
            try:
                with tls_client(server, contexts[authority]) as client:
                    return client.status() == 404
            except (ssl.SSLError, ConnectionError):
                return False

        assert (is_let_in(former), is_let_in(present)) == (True, False)
        present.cert_pem.write_to_path(str(authorities))
        server.reload()
        wait_until(lambda: is_let_in(present))
        assert not is_let_in(former)


# -- what is not TLS ---------------------------------------------------------------------------------


def test_what_is_not_tls_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(write_certificate(tmp_path), header_seconds=0.05) as server:
        for data in [b"GET / HTTP/1.1\r\n\r\n"] * 5 + [b"\0" * 100_000, b""]:
            with socket.create_connection(address(server), 30) as client:
                client.sendall(data)
                try:
                    while client.recv(1 << 16):
                        pass
                except ConnectionResetError:
                    pass
        with tls_client(server) as other:
            assert other.status() == 404
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- files -------------------------------------------------------------------------------------------


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    good, other = write_certificate(tmp_path), write_certificate(tmp_path, name="other")
    missing, empty = str(tmp_path / "missing.pem"), tmp_path / "empty.pem"
    empty.write_text("")
    for files, said in [
        (TlsFiles(missing, good.key), "missing.pem' with its key .*no such file"),
        (TlsFiles(good.cert, missing), "no such file"),
        (TlsFiles(str(empty), good.key), "empty.pem"),
        (TlsFiles(good.cert, other.key), "key values mismatch"),
        (TlsFiles(good.cert), "its private key is not in that file"),
        (TlsFiles(good.cert, good.key, missing), "client CA .*missing.pem"),
        (TlsFiles(good.cert, good.key, str(empty)), "client CA .*empty.pem"),
    ]:
        with pytest.raises(InvalidRequest, match=rf"{said}.*; fix the file"):
            tls_context(files)


def test_a_certificate_and_its_key_may_be_in_one_file(tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    Path(files.cert).write_text(Path(files.key).read_text() + Path(files.cert).read_text())
    with served(TlsFiles(files.cert)) as server, tls_client(server) as client:
        assert client.status() == 404


def test_an_encrypted_key_is_refused_without_a_question(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    files = write_certificate(tmp_path)
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    Path(files.key).write_bytes(encrypted)
    with pytest.raises(InvalidRequest, match=r"the key is encrypted"):
        tls_context(files)


def test_a_key_without_a_certificate_is_refused() -> None:
    check_tls(TlsFiles())
    with pytest.raises(InvalidRequest, match=r"tls.cert is missing"):
        check_tls(TlsFiles(key="server.key"))
