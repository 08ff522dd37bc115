"""TLS: whom a client trusts, and how it shows who it is. The certificates are made by the test."""

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

import penstock
from penstock.errors import BrokerClosed, InvalidRequest
from tests.broker.broker_under_test import wait_until
from tests.server.conftest import serve
from tests.server.poster import address_of
from tests.wire.tcp_proxy import TcpProxy

MakeProxy = Callable[..., TcpProxy]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


@pytest.fixture
def proxy(authority: trustme.CA, tmp_path: Path) -> Iterator[MakeProxy]:
    """Makes a proxy that speaks TLS, before a server that does not."""
    made: list[TcpProxy] = []
    with penstock.open(tmp_path / "data") as broker, serve(broker.home) as server:

        def make(name: str = "127.0.0.1", client_certificates: bool = False) -> TcpProxy:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert(name).configure_cert(context)
            if client_certificates:
                context.verify_mode = ssl.CERT_REQUIRED
                authority.configure_trust(context)
            made.append(TcpProxy(address_of(server), context))
            return made[-1]

        yield make
        for one in made:
            one.close()


def test_a_server_whose_authority_is_given_is_trusted(proxy: MakeProxy, ca_file: str) -> None:
    secure = proxy()
    with penstock.open(secure.url, ca_file=ca_file) as broker:
        queue = broker.create_queue("orders")
        for cut in (0, 100):
            secure.cut_after("response", cut)
            queue.produce("x")
        assert [lease.item.value for lease in queue.lease(5)] == ["x", "x"]


def test_a_cancelled_lease_is_seen_through_tls(proxy: MakeProxy, ca_file: str) -> None:
    """Closing a broker cancels its leases."""
    secure = proxy()
    with penstock.open(secure.url, ca_file=ca_file) as broker:
        queue = broker.create_queue("orders")
        with penstock.open(secure.url, ca_file=ca_file) as other:
            other.home.submit(penstock.operations.LeaseItems(queue=int(queue.incarnation), wait=60_000_000))
            wait_until(lambda: queue.stats().waiting_consumers == 1)
        wait_until(lambda: queue.stats().waiting_consumers == 0)


def test_a_certificate_that_is_not_trusted_is_refused_at_once(proxy: MakeProxy, ca_file: str) -> None:
    url = proxy().url
    with pytest.raises(InvalidRequest, match=rf"the certificate of {url} is not trusted \(.*\); give the file of its authority as ca_file"):
        penstock.open(url, wait=60)


def test_a_certificate_for_another_name_is_refused(proxy: MakeProxy, ca_file: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not trusted \(.*mismatch.*\).*the host name that is in it"):
        penstock.open(proxy("other.example").url, ca_file=ca_file)


def test_a_server_without_tls_is_told_apart(tmp_path: Path) -> None:
    message = r"does not speak TLS .*; give the address as http://"
    with penstock.open(tmp_path / "data") as broker, serve(broker.home) as server, pytest.raises(InvalidRequest, match=message):
        penstock.open(server.url.replace("http://", "https://"), wait=60)


def test_http_to_a_server_with_tls_gets_no_answer(proxy: MakeProxy) -> None:
    with pytest.raises((BrokerClosed, InvalidRequest), match=r"no Penstock server answers .*https:// if it has a certificate"):
        penstock.open(proxy().url.replace("https://", "http://"), wait=0)


def test_a_server_that_asks_for_a_certificate_gets_one(proxy: MakeProxy, authority: trustme.CA, ca_file: str, tmp_path: Path) -> None:
    certificate = authority.issue_cert("client.example")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    url = proxy(client_certificates=True).url
    with pytest.raises(BrokerClosed, match="no Penstock server answers"):
        penstock.open(url, ca_file=ca_file, wait=0)
    penstock.open(url, ca_file=ca_file, cert_file=tmp_path / "both.pem").close()
    penstock.open(url, ca_file=ca_file, cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem").close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ca_file": "missing.pem"}, r"ca_file '/.*missing.pem' cannot be used \(.*\); give a file of PEM certificates"),
        ({"cert_file": "missing.pem"}, r"cert_file '/.*missing.pem' with key_file '' cannot be used"),
        ({"key_file": "key.pem"}, "key_file is the key of cert_file, which is missing"),
    ],
)
def test_files_that_cannot_be_used_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        penstock.open("https://127.0.0.1:9", **options)  # type: ignore[arg-type]
