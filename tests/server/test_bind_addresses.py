"""Addresses to listen on, and who can reach them."""

import os
import socket
import stat
from contextlib import closing
from pathlib import Path

import pytest

from penstock.server.bind_addresses import BindAddress, check_exposure, close_listeners, listen, url_of
from penstock.words.errors import InvalidRequest

LOCAL = [BindAddress.parse(text) for text in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/x.sock")]
OPEN = [BindAddress.parse(text) for text in ("0.0.0.0:1", "[::]:1", "192.0.2.7:1")]


@pytest.mark.parametrize("text", ["", "2319", ":2319", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", "127.0.0.1:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is no address to listen on; give HOST:PORT"):
        BindAddress.parse(text)


@pytest.mark.parametrize("text", ["::1:2319", "[127.0.0.1]:2319", "[::1:2319", "unix:", "unix:relative.sock", "127.0.0.1:²"])
def test_what_is_no_address_either(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is no address to listen on; give"):
        BindAddress.parse(text)


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(InvalidRequest, match=r"'nowhere.invalid:1' is no address of this machine"):
        BindAddress.parse("nowhere.invalid:1").resolve()


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:0"])
def test_port_0_is_a_free_port(text: str) -> None:
    (bound,) = BindAddress.parse(text).bind()
    with closing(bound):
        port = bound.getsockname()[1]
        assert port
        assert url_of(bound, False) == f"http://{text.removesuffix(':0')}:{port}"
        assert url_of(bound, True) == f"https://{text.removesuffix(':0')}:{port}"


def test_an_address_in_use() -> None:
    with closing(listen("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use\); choose another address"):
            BindAddress.parse(f"127.0.0.1:{port}").bind()


def test_connections_are_checked_by_the_system() -> None:
    """A client whose machine is gone ends its connection, after a minute."""
    with (
        closing(listen("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        closing(listener.accept()[0]) as served,
    ):
        assert served.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        found = [
            served.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert found == [30, 10, 3]


# -- unix sockets ------------------------------------------------------------------------------------


def test_a_unix_socket_is_for_its_user_and_group_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    bound = BindAddress.parse(f"unix:{path}").bind()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert url_of(bound[0], True) == f"unix:{path}"
    close_listeners(bound)
    assert not path.exists()


def test_a_unix_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    close_listeners(BindAddress.parse(f"unix:{path}").bind())


def test_a_unix_socket_of_a_running_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    (running,) = BindAddress.parse(f"unix:{path}").bind()
    running.listen()
    with pytest.raises(OSError, match="another process listens there"):
        BindAddress.parse(f"unix:{path}").bind()
    assert path.exists()
    close_listeners([running])


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    path.write_text("mine")
    with pytest.raises(OSError, match="a file that is no socket is there"):
        BindAddress.parse(f"unix:{path}").bind()
    assert path.read_text() == "mine"
    with pytest.raises(OSError, match="cannot listen on"):
        BindAddress.parse(f"unix:{tmp_path}/{'x' * 200}.sock").bind()
    assert os.listdir(tmp_path) == ["x.sock"]


# -- who can reach it --------------------------------------------------------------------------------


def exposure(addresses: list[BindAddress], *, has_keys: bool = False, allowed: bool = False, has_tls: bool = False) -> list[str]:
    return check_exposure(addresses, has_keys=has_keys, allowed_without_keys=allowed, has_tls=has_tls)


def test_without_keys_a_server_is_for_this_machine() -> None:
    assert exposure(LOCAL) == exposure(LOCAL, has_keys=True) == []
    for address in OPEN:
        with pytest.raises(InvalidRequest) as caught:
            exposure([*LOCAL, address])
        assert str(caught.value).startswith(f"{address.text} can be reached from other machines, and there is no API key; create one with")


def test_the_operator_may_insist() -> None:
    (said,) = exposure(OPEN, allowed=True)
    assert said.startswith("everybody who can reach 0.0.0.0:1, [::]:1, 192.0.2.7:1 can read and change all queues")


def test_keys_without_tls_are_warned_about() -> None:
    assert exposure(OPEN, has_keys=True, has_tls=True) == []
    (said,) = exposure([*LOCAL, OPEN[0]], has_keys=True)
    assert said.startswith("keys are sent to 0.0.0.0:1 without encryption; set tls.cert")
