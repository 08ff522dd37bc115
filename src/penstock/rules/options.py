"""The options of a queue.

Owns: `Options`, `StorageOptions` (those of them that say how the log of a partition is written), `merged` (options with
changes, under the names that callers use), `changed_options` (differences as text), and the rule for queue names
(`check_name`).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import (
    MAX_COMPRESSION_LEVEL,
    MAX_COMPRESSION_MIN_BYTES,
    MAX_SEGMENT_AGE,
    MAX_SEGMENT_BYTES,
    MAX_SYNC_INTERVAL,
    MIN_SEGMENT_AGE,
    MIN_SEGMENT_BYTES,
    MIN_SYNC_INTERVAL,
    Policy,
    Retention,
    check_range,
)

MAX_QUEUE_NAME = 200
MOST = 1 << 60
DURABILITIES = ("", "fsync", "interval", "os")
COMPRESSIONS = ("", "on", "off")
_ALPHANUMERIC = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_IN_A_NAME = _ALPHANUMERIC | frozenset("._-")
_DURATIONS = ("lease_timeout", "ttl", "priority_aging", "dedup_window", "sync_interval", "segment_age")
_NONE_AT_ZERO = (
    *("ttl", "priority_aging", "max_items", "max_bytes"),
    *("sync_interval", "segment_bytes", "segment_age", "compression_level", "compression_min_bytes"),
)


def check_name(name: object) -> str:
    """Return the name of a queue. Raises InvalidRequest if it breaks the rule."""
    if not (isinstance(name, str) and 1 <= len(name) <= MAX_QUEUE_NAME and name[0] in _ALPHANUMERIC and _IN_A_NAME.issuperset(name)):
        rule = f"1 to {MAX_QUEUE_NAME} letters A-Z a-z, digits, '.', '_' or '-', a letter or digit first"
        raise InvalidRequest(f"{name!r:.250} is no name for a queue; use {rule}")
    return name


class StorageOptions(NamedTuple):
    """How the log of a partition is written. None: as the broker, or the default."""

    sync_interval: int | None = None
    """Microseconds."""
    segment_bytes: int | None = None
    segment_age: int | None = None
    """Microseconds."""
    compression: bool | None = None
    compression_level: int | None = None
    compression_min_bytes: int | None = None


class Options(msgspec.Struct, frozen=True, array_like=True):
    """The options of a queue, except its partitions. 0 and "" switch an option off.

    They are stored as an array: new fields go to the end, with a default.
    """

    policy: Policy = Policy()
    dead_queue: str = ""
    max_items: int = 0
    max_bytes: int = 0
    durability: Literal["", "fsync", "interval", "os"] = ""
    """"": the broker's durability."""
    sync_interval: int = 0
    """In durability mode "interval"; 0: the default. Microseconds, as `segment_age`."""
    segment_bytes: int = 0
    """0: the broker's."""
    segment_age: int = 0
    compression: Literal["", "on", "off"] = ""
    """"": the broker's."""
    compression_level: int = 0
    compression_min_bytes: int = 0

    @property
    def storage(self) -> StorageOptions:
        return StorageOptions(
            self.sync_interval or None,
            self.segment_bytes or None,
            self.segment_age or None,
            self.compression == "on" if self.compression else None,
            self.compression_level or None,
            self.compression_min_bytes or None,
        )

    def validate(self) -> "Options":
        """Return self. Raises InvalidRequest with the first invalid option."""
        self.policy.validate()
        if self.dead_queue != "":
            check_name(self.dead_queue)
        check_range("max_items", self.max_items, 0, MOST)
        check_range("max_bytes", self.max_bytes, 0, MOST)
        if self.durability not in DURABILITIES:
            raise InvalidRequest(f"durability is {self.durability!r}; use 'fsync', 'interval' or 'os', or leave it to the broker")
        self._validate_storage()
        return self

    def _validate_storage(self) -> None:
        if self.sync_interval and self.durability not in ("", "interval"):
            raise InvalidRequest(f"sync_interval has no effect with durability {self.durability!r}; leave it out, or use 'interval'")
        if self.compression not in COMPRESSIONS:
            raise InvalidRequest(f"compression is {self.compression!r}; use 'on' or 'off', or leave it to the broker")
        for name, low, high in _STORAGE_LIMITS:
            if getattr(self, name) != 0:
                check_range(name, getattr(self, name), low, high)


_STORAGE_LIMITS = (
    ("sync_interval", MIN_SYNC_INTERVAL, MAX_SYNC_INTERVAL),
    ("segment_bytes", MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES),
    ("segment_age", MIN_SEGMENT_AGE, MAX_SEGMENT_AGE),
    ("compression_level", 1, MAX_COMPRESSION_LEVEL),
    ("compression_min_bytes", 1, MAX_COMPRESSION_MIN_BYTES),
)
OPTION_NAMES = (*Policy.__struct_fields__, *(name for name in Options.__struct_fields__ if name != "policy"))
"""The names that callers use: those of the policy's fields are among the others."""


def merged(options: Options, changes: Mapping[str, object]) -> Options:
    """Options with changes by OPTION_NAMES. `retention` is a Retention or a mapping of some of its fields.
    Raises InvalidRequest."""
    unknown = [name for name in changes if name not in OPTION_NAMES]
    if unknown:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; the options are {', '.join(OPTION_NAMES)}")
    policy: dict[str, Any] = {name: value for name, value in changes.items() if name in Policy.__struct_fields__}
    others: dict[str, Any] = {name: value for name, value in changes.items() if name not in policy}
    if "retention" in policy:
        policy["retention"] = _retention(options.policy.retention, policy["retention"])
    return msgspec.structs.replace(options, policy=msgspec.structs.replace(options.policy, **policy), **others).validate()


def changed_options(before: Options, after: Options) -> list[str]:
    """What is different, for people: such as "max_attempts 3 → 5"."""
    old, new = _texts(before), _texts(after)
    return [f"{name} {old[name]} → {new[name]}" for name in new if new[name] != old[name]]


def _texts(options: Options) -> dict[str, str]:
    """The options as text; those of the retention by names such as "retention.max_age"."""
    fields = {**msgspec.structs.asdict(options), **msgspec.structs.asdict(options.policy)}
    kept = msgspec.structs.asdict(options.policy.retention)
    found = {name: _text(name, fields[name]) for name in OPTION_NAMES if name != "retention"}
    return found | {f"retention.{name}": f"{value / SECOND:g}s" if name == "max_age" else str(value) for name, value in kept.items()}


def _text(name: str, value: object) -> str:
    if value == "" or (value == 0 and name in _NONE_AT_ZERO):
        return "none"
    return f"{value / SECOND:g}s" if name in _DURATIONS and isinstance(value, int) else str(value)


def _retention(old: Retention, given: object) -> Retention:
    names = Retention.__struct_fields__
    if isinstance(given, Retention):
        return given
    if not isinstance(given, Mapping) or not set(given) <= set(names):
        raise InvalidRequest(f"retention is {given!r}; give a Retention, or a mapping with any of {', '.join(names)}")
    return msgspec.structs.replace(old, **given)
