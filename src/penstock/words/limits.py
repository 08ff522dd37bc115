"""The limits and defaults of requests and items, and the policy of a partition.

Owns: every number that bounds a request; `Policy` and `Retention`, which are frozen and validated once.
"""

from typing import Literal

import msgspec

from penstock.words.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND
from penstock.words.errors import InvalidRequest

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_PAYLOAD_BYTES = 16 * MIB
MAX_HEADERS_BYTES = 64 * KIB
MAX_KEY_BYTES = 1 * KIB
MAX_NAME_BYTES = 1 * KIB
"""Greatest length of a kind, encoding, reference, consumer or dedup id."""
MAX_REASON_BYTES = 1 * KIB
"""Longer reasons are cut, not refused: they come from exceptions, and the retry that has the reason must not fail."""
MAX_GRANT = 10_000_000
"""The most items in one grant to a consuming stream."""
MAX_BATCH_ITEMS = 10_000
MAX_BATCH_BYTES = 64 * MIB
MAX_ATTEMPTS = 65_535
MAX_PARTITIONS = 1_024
MIN_LEASE_TIMEOUT = 1 * SECOND
MAX_LEASE_TIMEOUT = 12 * HOUR
MAX_DELAY = 10 * 365 * 24 * HOUR
MIN_SYNC_INTERVAL, MAX_SYNC_INTERVAL = 1 * MILLISECOND, 1 * HOUR
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 4 * KIB, 1024 * GIB
MIN_SEGMENT_AGE, MAX_SEGMENT_AGE = 1 * SECOND, 365 * DAY
MAX_COMPRESSION_LEVEL = 19
"""zstd has higher levels, which need hundreds of megabytes in every process that reads."""
MAX_COMPRESSION_MIN_BYTES = 1 * GIB
MAX_DEDUP_IDS = 10_000_000
"""The most dedup ids that a partition remembers. Beyond it a produce with a dedup id is refused."""
IMMEDIATE = 100 * MILLISECOND
"""An `at` at most this far in the future counts as now."""
MIN_RESULT_MEMORY = 15 * MINUTE
"""Results of requests are kept at least this long, or two lease timeouts if that is longer."""

FIRST_PRIORITY, DEFAULT_PRIORITY, LAST_PRIORITY = 0, 5, 9


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """How long completed and buried items are kept. The limit that is reached first counts; 0 means no limit.

    All numbers are per partition.
    """

    max_age: int = 1 * DAY
    max_bytes: int = 1 * GIB
    max_segments: int = 0
    min_segments: int = 1
    """This many of the newest segments are kept even beyond the limits."""

    def validate(self) -> "Retention":
        check_range("max_age", self.max_age, 0, MAX_DELAY)
        check_range("max_bytes", self.max_bytes, 0, 1 << 60)
        check_range("max_segments", self.max_segments, 0, 1 << 30)
        check_range("min_segments", self.min_segments, 1, 1 << 30)
        return self


class Policy(msgspec.Struct, frozen=True, array_like=True):
    """How a partition treats its items. Durations are microseconds; a duration or count of 0 means off."""

    lease_timeout: int = 60 * SECOND
    max_attempts: int = 10
    ttl: int = 0
    priority_aging: int = 60 * SECOND
    dedup_window: int = 5 * MINUTE
    on_bury: Literal["release", "park"] = "release"
    retention: Retention = Retention()

    @property
    def result_memory(self) -> int:
        """How long the results of requests are kept."""
        return max(MIN_RESULT_MEMORY, 2 * self.lease_timeout)

    def validate(self) -> "Policy":
        """Return self; InvalidRequest when an option is out of bounds."""
        check_lease_timeout(self.lease_timeout)
        check_range("max_attempts", self.max_attempts, 0, MAX_ATTEMPTS)
        check_range("ttl", self.ttl, 0, MAX_DELAY)
        check_range("priority_aging", self.priority_aging, 0, MAX_DELAY)
        check_range("dedup_window", self.dedup_window, 1, MAX_DELAY)
        self.retention.validate()
        if self.on_bury not in ("release", "park"):
            raise InvalidRequest(f"on_bury is {self.on_bury!r}; use 'release' or 'park'")
        return self


def check_range(name: str, value: int, low: int, high: int) -> int:
    """Return `value`; InvalidRequest unless it is an int (bool is refused) from `low` to `high`."""
    if type(value) is not int:
        raise InvalidRequest(f"{name} is {type(value).__name__}; give a whole number from {low} to {high}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; give a whole number from {low} to {high}")
    return value


def check_lease_timeout(value: int, name: str = "lease_timeout") -> int:
    """Return a lease timeout in microseconds; InvalidRequest when it is out of bounds."""
    return check_range(name, value, MIN_LEASE_TIMEOUT, MAX_LEASE_TIMEOUT)
