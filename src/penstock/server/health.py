"""Whether the server lives, and whether it should get requests.

Owns: `Health`, `live` and `Readiness`. A server lives while it answers. It is ready while its broker answers in time,
most partitions work and the disk has room. It is not ready while it ends. Anyone may ask, so reasons name no queue and
no path, and many checks at a time ask the broker once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from penstock.reports import BrokerMetrics
from penstock.words.errors import PenstockError

CACHE_SECONDS = 0.5
_FAILING = ("failing", "slow")


class Health(msgspec.Struct, frozen=True):
    """An answer to a health check."""

    status: Literal["ok", "unavailable"]
    reasons: list[str] = []
    """Why it is unavailable."""

    @property
    def http_status(self) -> int:
        return 200 if self.status == "ok" else 503


class HealthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a server is not ready."""

    answer_seconds: float = 2.0
    """The broker takes longer to answer."""
    failing_share: float = 0.5
    """More than this share of all partitions are failing or slow."""
    full_disk: bool = True
    """Whether it is not ready when a disk is so full that produce is refused. Consumers can still work then."""


def live() -> Health:
    """The process answers: that is all this tells."""
    return Health("ok")


class Readiness:
    """Checks whether a server is ready."""

    def __init__(
        self, read: Callable[[], Awaitable[BrokerMetrics]], is_draining: Callable[[], bool], settings: HealthSettings | None = None
    ) -> None:
        """read: asks the broker, with `ReadMetrics`."""
        self._read = read
        self._is_draining = is_draining
        self._settings = settings or HealthSettings()
        self._known: Health | None = None
        self._known_until = 0.0
        self._asking: asyncio.Future[Health] | None = None

    async def check(self) -> Health:
        """Whether it is ready now, or was up to CACHE_SECONDS ago. Call it in one event loop."""
        if self._is_draining():
            return Health("unavailable", ["the server is ending"])
        if self._known is None or asyncio.get_running_loop().time() >= self._known_until:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._ask())
            return await asyncio.shield(self._asking)  # a caller who leaves does not end it for the others
        return self._known

    async def _ask(self) -> Health:
        try:
            reasons = await self._reasons()
            self._known = Health("unavailable", reasons) if reasons else Health("ok")
            self._known_until = asyncio.get_running_loop().time() + CACHE_SECONDS
            return self._known
        finally:
            self._asking = None

    async def _reasons(self) -> list[str]:
        seconds = self._settings.answer_seconds
        try:
            async with asyncio.timeout(seconds):
                found = await self._read()
        except TimeoutError:
            return [f"the broker has not answered within {seconds:g} s"]
        except PenstockError as error:
            return [f"the broker does not answer ({error.code})"]
        return [*self._failing(found), *self._full(found)]

    def _failing(self, found: BrokerMetrics) -> list[str]:
        statuses = [partition.status for queue in found.queues.values() for partition in queue.partitions]
        failing = sum(status in _FAILING for status in statuses)
        if not statuses or failing / len(statuses) <= self._settings.failing_share:
            return []
        return [f"{failing} of {len(statuses)} partitions are failing or slow"]

    def _full(self, found: BrokerMetrics) -> list[str]:
        if not self._settings.full_disk:
            return []
        full = {root: size for root, size in found.free_bytes.items() if size <= found.min_free_bytes}
        return [
            f"storage root {root} has {size:,} free bytes, and produce needs more than {found.min_free_bytes:,}"
            for root, size in full.items()
        ]
