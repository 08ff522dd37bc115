"""The settings of a server: flags, then environment variables, then a TOML file, then defaults.

Owns: `ServerSettings`, `load_settings` and `WrongSettings`. A setting has one name everywhere: `limits.connections` is
the entry `connections` of the table `limits` in the file, the variable PENSTOCK_SERVE_LIMITS_CONNECTIONS, and
`--set limits.connections=…` (some have a flag of their own). Durations and sizes may be numbers or text ("30s",
"64MiB"). An entry that does not exist is an error: a setting that is misspelled must not be without effect.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

import msgspec

from penstock.broker.targets import MIN_FREE_BYTES
from penstock.logs.log import SEGMENT_BYTES, Durability
from penstock.server.bind_addresses import DEFAULT_BIND, BindAddress
from penstock.server.declared_queues import DeclaredQueue, read_queues
from penstock.server.health import HealthSettings
from penstock.server.server_limits import ServerLimits
from penstock.server.tls import TlsFiles, check_tls
from penstock.words.errors import InvalidRequest
from penstock.words.quantities import parse_duration, parse_size

PREFIX = "PENSTOCK_SERVE_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
QUEUES = "queues"
LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class ServerLogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The log on stderr."""

    format: LogFormat = "text"
    level: LogLevel = "info"


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many time series there may be."""

    queues: int = 100
    """The most queues with time series of their own."""
    partitions: int = 16
    """The most partitions of a queue with time series of their own; 0: no label `partition`."""
    answer_seconds: float = 5.0
    """How long the broker may take to answer."""


class BrokerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the directory is opened; see `penstock.open`."""

    directory: str = ""
    """The directory, unless it is given on the command line."""
    create: bool = False
    """Whether the directory is created if it does not exist."""
    durability: Durability = "fsync"
    roots: tuple[str, ...] = ()
    min_free_bytes: int = MIN_FREE_BYTES
    segment_bytes: int = SEGMENT_BYTES
    compression: bool = True


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that an operator may set."""

    bind: tuple[str, ...] = (DEFAULT_BIND,)
    allow_without_keys: bool = False
    """Whether other machines may connect although there is no API key."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of proxies, whose X-Forwarded-For header is believed; "*": of all."""
    drain_seconds: float = 30.0
    """How long running requests may take when the server ends."""
    ready_file: str = ""
    """A file that gets the URLs of the server, one in each line, when it accepts connections."""
    audit_file: str = ""
    """A file to which the audit log is appended. Empty: it goes to the logger `penstock.audit` only."""
    tls: TlsFiles = TlsFiles()
    limits: ServerLimits = ServerLimits()
    broker: BrokerSettings = BrokerSettings()
    log: ServerLogSettings = ServerLogSettings()
    metrics: MetricsSettings = MetricsSettings()
    health: HealthSettings = HealthSettings()
    queues: tuple[DeclaredQueue, ...] = ()

    @property
    def addresses(self) -> list[BindAddress]:
        return [BindAddress.parse(text) for text in self.bind]


class WrongSettings(InvalidRequest):
    """Settings are unknown or have wrong values; the message names them and what is allowed."""

    def __init__(self, problems: Sequence[str]) -> None:
        more = f" (and {len(problems) - 1} more: penstock serve --check)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")
        self.problems = list(problems)


# -- the names of settings ---------------------------------------------------------------------------


class Setting(NamedTuple):
    """One setting."""

    name: str
    type: Any
    default: Any

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace(".", "_")

    @property
    def is_path(self) -> bool:
        """Whether it names files, which a TOML file may name relative to itself."""
        return self.name.startswith("tls.") or self.name in ("ready_file", "audit_file", "broker.directory", "broker.roots")

    @property
    def least(self) -> float:
        """The least number that makes sense."""
        if self.name in ("drain_seconds", "broker.min_free_bytes", "metrics.partitions", "health.failing_share"):
            return 0
        return 0.001 if self.type is float else 1

    @property
    def form(self) -> str:
        """How a number is written, for messages."""
        if self.type is int:
            return "a whole number"
        return "a duration, such as 30s" if self.name.endswith("_seconds") else "a number"


def _settings_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterable[Setting]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _settings_of(field.type, f"{prefix}{field.name}.")
        elif prefix or field.name != QUEUES:
            yield Setting(f"{prefix}{field.name}", field.type, field.default)


SETTINGS = {setting.name: setting for setting in _settings_of(ServerSettings)}
SECTIONS = [name for name in ServerSettings.__struct_fields__ if name not in SETTINGS and name != QUEUES]
"""Tables of the file, other than queues."""
_VARIABLES = {setting.variable: setting for setting in SETTINGS.values()}


# -- loading -----------------------------------------------------------------------------------------


def load_settings(
    flags: Mapping[str, tuple[str, Any]] = {}, environment: Mapping[str, str] = {}, config: str | None = None
) -> ServerSettings:
    """The settings by precedence. Raises WrongSettings with everything that is wrong.

    flags: name of a setting → the flag that gave it, and the value. config: the path of the TOML file; None: the one
    that the environment names, if any.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    path = config or environment.get(CONFIG_VARIABLE, "")
    queues = _load_file(path, values, problems) if path else []
    _load_environment(environment, values, problems)
    for name, (flag, value) in flags.items():
        _enter(values, problems, name, value, flag)
    if problems:
        raise WrongSettings(problems)
    settings: ServerSettings = _build(ServerSettings, {**values, QUEUES: tuple(queues)})
    problems = [*_cross_checks(settings)]
    if problems:
        raise WrongSettings(problems)
    return settings


def _load_file(path: str, values: dict[str, Any], problems: list[str]) -> list[DeclaredQueue]:
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        problems.append(f"{path} cannot be read ({error.strerror}); fix the path")
        return []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path} is no TOML file ({error}); fix it")
        return []
    tables = document.pop(QUEUES, {})
    for name, value in _flatten(document):
        setting = SETTINGS.get(name)
        if setting is None:
            problems.append(f"{path}: {_unknown(name)}")
        else:
            value = _beside(path, value) if setting.is_path else value
            _enter(values, problems, name, value, f"{path}: {name}")
    if not isinstance(tables, Mapping):
        problems.append(f"{path}: {QUEUES} is {tables!r}; give a table for each queue, such as [queues.orders]")
        return []
    queues, wrong = read_queues(tables)
    problems += [f"{path}: {problem}" for problem in wrong]
    return queues


def _flatten(document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{name}.{entry}", found) for entry, found in value.items())
        else:
            yield name, value


def _unknown(name: str) -> str:
    section, dot, _ = name.partition(".")
    if name in SECTIONS:
        return f"{name} is a table; write [{name}] with its entries"
    if dot:
        entries = [known.removeprefix(f"{section}.") for known in SETTINGS if known.startswith(f"{section}.")]
        return f"{name} is unknown; {section} has {', '.join(entries)}"
    entries = [known for known in SETTINGS if "." not in known]
    return f"{name} is unknown; use {', '.join(entries)}, or the tables {', '.join([*SECTIONS, QUEUES])}"


def _beside(path: str, value: Any) -> Any:
    """A path in a file is relative to the folder of the file."""
    folder = os.path.dirname(os.path.abspath(path))
    if isinstance(value, str) and value:
        return os.path.join(folder, os.path.expanduser(value))
    if isinstance(value, list):
        return [_beside(path, one) for one in value]
    return value


def _load_environment(environment: Mapping[str, str], values: dict[str, Any], problems: list[str]) -> None:
    for variable, value in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        setting = _VARIABLES.get(variable)
        if setting is None:
            close = get_close_matches(variable, _VARIABLES, 1)
            advice = f"did you mean {close[0]}?" if close else "docs/server.md lists the settings"
            problems.append(f"{variable} is no setting; {advice}")
        else:
            _enter(values, problems, setting.name, value, variable)


def _enter(values: dict[str, Any], problems: list[str], name: str, value: Any, source: str) -> None:
    setting = SETTINGS.get(name)
    if setting is None:
        problems.append(f"{source}: {_unknown(name)}")
        return
    try:
        values[name] = _convert(setting, value, source)
    except InvalidRequest as error:
        problems.append(str(error))


def _convert(setting: Setting, value: Any, source: str) -> Any:
    """The value in the type of the setting."""
    kind = setting.type
    if get_origin(kind) is tuple:
        parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise InvalidRequest(f"{source} is {value!r}; give a list of texts")
        return tuple(parts)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InvalidRequest(f"{source} is {value!r}; use {', '.join(map(str, get_args(kind)))}")
        return value
    if kind is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise InvalidRequest(f"{source} is {value!r}; give true or false")
        return value
    if kind is str:
        if not isinstance(value, str):
            raise InvalidRequest(f"{source} is {value!r}; give a text")
        return value
    return _convert_number(setting, value, source)


def _convert_number(setting: Setting, value: Any, source: str) -> float:
    found: Any = value
    if isinstance(value, str):
        if setting.name.endswith("_seconds"):
            found = parse_duration(value, source)
        elif setting.name.endswith("_bytes"):
            found = parse_size(value, source)
        else:
            with suppress(ValueError):
                found = setting.type(value)
    allowed = (int, float) if setting.type is float else (int,)
    if isinstance(found, bool) or not isinstance(found, allowed):
        raise InvalidRequest(f"{source} is {value!r}; give {setting.form}")
    if not setting.least <= found <= 1 << 60:
        raise InvalidRequest(f"{source} is {value!r}; give at least {setting.least:g}")
    return float(found) if setting.type is float else int(found)


def _build(struct: type[Any], values: Mapping[str, Any], prefix: str = "") -> Any:
    given: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        name = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            given[field.name] = _build(field.type, values, f"{name}.")
        elif name in values:
            given[field.name] = values[name]
    return struct(**given)


def _cross_checks(settings: ServerSettings) -> Iterable[str]:
    """What is wrong although each setting alone is right."""
    if not settings.bind:
        yield f"bind is empty; give an address, such as {DEFAULT_BIND}"
    for text in settings.bind:
        try:
            BindAddress.parse(text)
        except InvalidRequest as error:
            yield f"bind: {error}"
    try:
        check_tls(settings.tls)
    except InvalidRequest as error:
        yield str(error)
