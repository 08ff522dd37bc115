"""The options of a queue: one frozen type, validated once.

Owns: `Options`, `merged` (options as callers name them, put into others), and what a queue may be called (`check_name`).
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.words.errors import InvalidRequest
from penstock.words.limits import Policy, Retention, check_range

MAX_QUEUE_NAME = 200
MOST = 1 << 60
DURABILITIES = ("", "fsync", "interval", "os")
_ALPHANUMERIC = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_IN_A_NAME = _ALPHANUMERIC | frozenset("._-")


def check_name(name: object) -> str:
    """The name of a queue, or what is wrong with it."""
    if not (isinstance(name, str) and 1 <= len(name) <= MAX_QUEUE_NAME and name[0] in _ALPHANUMERIC and _IN_A_NAME.issuperset(name)):
        rule = f"1 to {MAX_QUEUE_NAME} letters A-Z a-z, digits, '.', '_' or '-', a letter or digit first"
        raise InvalidRequest(f"{name!r:.250} is no name for a queue; use {rule}")
    return name


class Options(msgspec.Struct, frozen=True, array_like=True):
    """What may be chosen for a queue besides its partitions. 0 and "" switch off."""

    policy: Policy = Policy()
    dead_queue: str = ""
    max_items: int = 0
    max_bytes: int = 0
    durability: Literal["", "fsync", "interval", "os"] = ""
    """"" is the broker's."""

    def validate(self) -> "Options":
        """Return self, or say which option is wrong."""
        self.policy.validate()
        if self.dead_queue != "":
            check_name(self.dead_queue)
        check_range("max_items", self.max_items, 0, MOST)
        check_range("max_bytes", self.max_bytes, 0, MOST)
        if self.durability not in DURABILITIES:
            raise InvalidRequest(f"durability is {self.durability!r}; use 'fsync', 'interval' or 'os', or leave it to the broker")
        return self


OPTION_NAMES = (*Policy.__struct_fields__, *(name for name in Options.__struct_fields__ if name != "policy"))
"""Options as callers name them, the policy's among the others."""


def merged(options: Options, changes: Mapping[str, object]) -> Options:
    """Options with some of them changed, named as in OPTION_NAMES; `retention` a Retention, or only some fields of one."""
    unknown = [name for name in changes if name not in OPTION_NAMES]
    if unknown:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; the options are {', '.join(OPTION_NAMES)}")
    policy: dict[str, Any] = {name: value for name, value in changes.items() if name in Policy.__struct_fields__}
    others: dict[str, Any] = {name: value for name, value in changes.items() if name not in policy}
    if "retention" in policy:
        policy["retention"] = _retention(options.policy.retention, policy["retention"])
    return msgspec.structs.replace(options, policy=msgspec.structs.replace(options.policy, **policy), **others).validate()


def _retention(old: Retention, given: object) -> Retention:
    names = Retention.__struct_fields__
    if isinstance(given, Retention):
        return given
    if not isinstance(given, Mapping) or not set(given) <= set(names):
        raise InvalidRequest(f"retention is {given!r}; give a Retention, or a mapping with any of {', '.join(names)}")
    return msgspec.structs.replace(old, **given)
