"""Where the settings of a server come from, and what is said about wrong ones."""

from pathlib import Path
from typing import Any

import pytest

from penstock.server.server_settings import SETTINGS, ServerSettings, WrongSettings, load_settings
from penstock.words.limits import MIB

FILE = """
bind = ["127.0.0.1:1", "unix:/run/penstock.sock"]
drain_seconds = "1m"
trusted_proxies = ["10.0.0.1"]
audit_file = "audit.log"

[tls]
cert = "server.pem"
key = "/etc/server.key"

[limits]
body_bytes = "16MiB"
header_seconds = 5
connections = 100

[broker]
directory = "data"
roots = ["more", "/mnt/disk"]
durability = "interval"
compression = false

[log]
level = "debug"

[queues.orders]
partitions = 4
lease_timeout = "30s"
max_bytes = "1GiB"
ttl = "none"
dead_queue = "orders.dead"
retention = { max_age = "1d12h", max_bytes = "2GiB" }

[queues."orders.dead"]
"""


def write(folder: Path, text: str) -> str:
    path = folder / "penstock.toml"
    path.write_text(text)
    return str(path)


def problems(folder: Path, text: str = "", environment: dict[str, str] | None = None, **flags: tuple[str, Any]) -> list[str]:
    """What is wrong, with the path of the file left out."""
    path = write(folder, text)
    with pytest.raises(WrongSettings) as caught:
        load_settings(flags, environment or {}, path)
    return [problem.replace(path, "FILE") for problem in caught.value.problems]


def test_without_anything_the_defaults_count() -> None:
    found = load_settings()
    assert found == ServerSettings()
    assert [address.text for address in found.addresses] == ["127.0.0.1:2319"]


def test_a_file(tmp_path: Path) -> None:
    found = load_settings(config=write(tmp_path, FILE))
    assert (found.bind, found.drain_seconds, found.trusted_proxies) == (("127.0.0.1:1", "unix:/run/penstock.sock"), 60, ("10.0.0.1",))
    assert (found.limits.body_bytes, found.limits.header_seconds, found.limits.connections) == (16 * MIB, 5, 100)
    assert (found.broker.durability, found.broker.compression, found.log.level) == ("interval", False, "debug")
    orders, dead = found.queues
    assert (orders.name, orders.partitions, dead.name, dead.partitions, dead.options) == ("orders", 4, "orders.dead", None, {})
    assert orders.options == {
        "lease_timeout": 30,
        "max_bytes": 1 << 30,
        "ttl": None,
        "dead_queue": "orders.dead",
        "retention": {"max_age": 129_600, "max_bytes": 2 << 30},
    }


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    found = load_settings(config=write(tmp_path, FILE))
    assert (found.tls.cert, found.tls.key, found.audit_file) == (f"{tmp_path}/server.pem", "/etc/server.key", f"{tmp_path}/audit.log")
    assert (found.broker.directory, found.broker.roots) == (f"{tmp_path}/data", (f"{tmp_path}/more", "/mnt/disk"))
    assert found.tls.client_ca == ""


def test_flags_come_before_the_environment_and_the_environment_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "drain_seconds = 1\n[limits]\nconnections = 1\nwaiting_leases = 1\n[broker]\ncreate = false")
    environment = {
        "PENSTOCK_SERVE_CONFIG": path,
        "PENSTOCK_SERVE_LIMITS_CONNECTIONS": "2",
        "PENSTOCK_SERVE_LIMITS_WAITING_LEASES": "2",
        "PENSTOCK_SERVE_BIND": "127.0.0.1:1, [::1]:1",
        "PENSTOCK_SERVE_BROKER_CREATE": "true",
        "PENSTOCK_BROKER": "elsewhere",
    }
    found = load_settings({"limits.connections": ("--set limits.connections", "3")}, environment)
    assert (found.limits.connections, found.limits.waiting_leases, found.drain_seconds) == (3, 2, 1)
    assert (found.bind, found.broker.create) == (("127.0.0.1:1", "[::1]:1"), True)
    other = write(tmp_path / "..", "drain_seconds = 7")
    assert load_settings({}, environment, other).drain_seconds == 7


def test_every_setting_can_be_given_as_text() -> None:
    """As the environment and --set give it: the text of a default is the default."""
    for setting in SETTINGS.values():
        default = ",".join(setting.default) if isinstance(setting.default, tuple) else str(setting.default)
        found: Any = load_settings({}, {setting.variable: default})
        for part in setting.name.split("."):
            found = getattr(found, part)
        assert found == setting.default, setting.name


# -- wrong settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bnid = 1", "FILE: bnid is unknown; use bind, allow_without_keys, "),
        ("[limits]\nconections = 1", "FILE: limits.conections is unknown; limits has body_bytes, header_bytes, "),
        ("limits = 1", "FILE: limits is a table; write [limits] with its entries"),
        ("[limits]\nconnections = 'many'", "FILE: limits.connections is 'many'; give a whole number"),
        ("[limits]\nconnections = 1.5", "FILE: limits.connections is 1.5; give a whole number"),
        ("[limits]\nconnections = true", "FILE: limits.connections is True; give a whole number"),
        ("[limits]\nconnections = 0", "FILE: limits.connections is 0; give at least 1"),
        ("[limits]\nbody_bytes = '3 parsecs'", "FILE: limits.body_bytes is '3 parsecs'; give bytes, or a number with KiB"),
        ("[limits]\nheader_seconds = 'soon'", "FILE: limits.header_seconds is 'soon'; give seconds"),
        ("[limits]\nheader_seconds = []", "FILE: limits.header_seconds is []; give a duration, such as 30s"),
        ("drain_seconds = -1", "FILE: drain_seconds is -1; give at least 0"),
        ("bind = 2319", "FILE: bind is 2319; give a list of texts"),
        ("bind = []", "bind is empty; give an address, such as 127.0.0.1:2319"),
        ("bind = ['2319']", "bind: '2319' is no address to listen on; give HOST:PORT"),
        ("[broker]\ncreate = 'maybe'", "FILE: broker.create is 'maybe'; give true or false"),
        ("[broker]\ndurability = 'maybe'", "FILE: broker.durability is 'maybe'; use fsync, interval, os"),
        ("[tls]\ncert = 1", "FILE: tls.cert is 1; give a text"),
        ("[tls]\nkey = 'server.key'", "tls.cert is missing; name the file"),
        ("queues = 1", "FILE: queues is 1; give a table for each queue"),
        ("[queues]\norders = 1", "FILE: queues.orders: it is 1; give a table, such as [queues.orders]"),
        ("[queues.orders]\npartitons = 1", "FILE: queues.orders: partitons is unknown; use any of partitions, resize, lease_timeout, "),
        (
            "[queues.orders.dead]\npartitions = 1",
            'FILE: queues.orders: dead is unknown (a name with dots is written [queues."orders.dead"])',
        ),
        ("[queues.orders]\npartitions = 0", "FILE: queues.orders: partitions is 0; give a whole number from 1 to 1024"),
        ("[queues.orders]\nlease_timeout = '13h'", "FILE: queues.orders: lease_timeout is 46800"),
        ("[queues.orders]\nttl = 'long'", "FILE: queues.orders: ttl is 'long'; give seconds"),
        ("[queues.orders]\nretention = { max_age = 'long' }", "FILE: queues.orders: retention.max_age is 'long'; give seconds"),
        ("[queues.orders]\nretention = { age = 1 }", "FILE: queues.orders: retention has no 'age'"),
        ("[queues.orders]\non_bury = 'explode'", "FILE: queues.orders: on_bury is 'explode'; use 'release' or 'park'"),
        ("[queues.'../evil']", "FILE: queues.../evil: '../evil' is no name for a queue"),
        ("bind = [", "FILE is no TOML file ("),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, text: str, said: str) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(said), found


def test_everything_that_is_wrong_is_found(tmp_path: Path) -> None:
    found = problems(
        tmp_path, "a = 1\nb = 2\n[queues.c]\nd = 1", {"PENSTOCK_SERVE_DRAIN_SECONDS": "x"}, **{"limits.x": ("--set limits.x", "1")}
    )
    assert [problem.split(" is ")[0] for problem in found] == [
        "FILE: a",
        "FILE: b",
        "FILE: queues.c: d",
        "PENSTOCK_SERVE_DRAIN_SECONDS",
        "--set limits.x: limits.x",
    ]
    with pytest.raises(WrongSettings, match=r"a is unknown.*\(and 1 more: penstock serve --check\)$"):
        load_settings(config=write(tmp_path, "a = 1\nb = 2"))


def test_a_variable_that_is_no_setting_is_wrong() -> None:
    for variable, said in [
        ("PENSTOCK_SERVE_LIMIT_CONNECTIONS", "did you mean PENSTOCK_SERVE_LIMITS_CONNECTIONS?"),
        ("PENSTOCK_SERVE_QQ", ""),
    ]:
        with pytest.raises(WrongSettings, match=rf"^{variable} is no setting; .*{said}"):
            load_settings({}, {variable: "1"})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WrongSettings, match=r"nowhere.toml cannot be read \(No such file or directory\); fix the path"):
        load_settings(config=str(tmp_path / "nowhere.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(WrongSettings, match=r"binary.toml is no TOML file"):
        load_settings(config=str(tmp_path / "binary.toml"))
