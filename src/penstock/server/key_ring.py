"""The API keys as a running server knows them.

Owns: `KeyRing`, which checks the key of every request, notices changes of the file within a second, ends what waits for
a key that is no longer valid, and saves when keys were last used.
- A broker for which no key was ever created is *open*: every request is allowed. That ends with the first key.
- When the file cannot be read, is damaged, or was removed while the server runs, every request is refused until the
  file is back: an error never opens the door.
- A key is found by its id and compared in constant time. For an unknown id, the same work is done.
A KeyRing belongs to one thread, that of the server's event loop. A check takes a few microseconds; nothing is cached
that a revocation would have to remove.
"""

import logging
from collections.abc import Callable
from hmac import compare_digest
from itertools import count

from penstock.operations import Cancel
from penstock.server.api_keys import ApiKey, KeyFile, StoredKey, hash_of, id_in
from penstock.words.clock import MINUTE, SECOND, Clock, Moment, SystemClock
from penstock.words.errors import BrokerLocked, CorruptLog, PenstockError, StorageFailed, Unauthenticated

_log = logging.getLogger("penstock")
LOOK_INTERVAL = SECOND
"""How often the file is looked at."""
USE_INTERVAL = MINUTE
"""How often the last use of a key is saved at most."""
SETTLED = 2 * SECOND
"""How old a file must be that its time stamp tells it from the next one: file systems count time in coarse steps."""
MAX_TEXT = 200
HOW_TO_SEND = "send one in the header 'Authorization: Bearer pk_…' (api_key=… in Python, or the variable PENSTOCK_API_KEY)"
_NO_SECRET = ((bytes(32), None),)
"""What the text of an unknown key is compared with. No text has this hash."""


class KeyRing:
    """Checks API keys."""

    def __init__(self, directory: str, *, clock: Clock | None = None) -> None:
        """directory: the first one of the broker. Raises CorruptLog or StorageFailed if its keys cannot be read."""
        self._clock = clock or SystemClock()
        self._file = KeyFile(directory, clock=self._clock)
        self._keys: list[StoredKey] | None = None
        self._callers: dict[str, tuple[tuple[bytes, ApiKey], ...]] = {}
        self._problem: PenstockError | None = None
        self._stamp: tuple[int, ...] | None = None
        self._looked_at = 0
        self._watches: dict[ApiKey | None, dict[int, Callable[[], None]]] = {}
        self._watch_numbers = count()
        self._used: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._save_failed = False
        self._look(self._clock.read())
        if self._problem is not None:
            raise self._problem

    # -- checks --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether no key was ever created, so that requests need none."""
        self._look_if_due(self._clock.read())
        return self._keys is None and self._problem is None

    def check(self, text: str) -> ApiKey | None:
        """The valid key with this text, or None."""
        now = self._clock.read()
        self._look_if_due(now)
        found = self._find(text)
        if found is None or found.ends_at <= now.wall:
            self._look(now)  # it may have been created or rotated a moment ago
            found = self._find(text)
            if found is None or found.ends_at <= now.wall:
                return None
        self._used[found.id] = now.wall
        return found

    def authenticate(self, text: str) -> ApiKey | None:
        """The key of a request that was sent with this text ("": with none); None if the server is open.

        Raises Unauthenticated, and StorageFailed while the keys cannot be read.
        """
        found = self.check(text) if text else None
        if found is not None or self.is_open:
            return found
        if self._problem is not None:
            raise StorageFailed("the server cannot read its API keys and refuses every request; its operator finds the reason in its log")
        raise self._refusal(text)

    def is_valid(self, key: ApiKey | None) -> bool:
        """Whether a key that was checked before is still valid. None: whether requests still need no key."""
        now = self._clock.read()
        self._look_if_due(now)
        return self._is_valid(key, now.wall)

    def _find(self, text: str) -> ApiKey | None:
        if len(text) > MAX_TEXT:
            return None
        given, found = hash_of(text), None
        for known, key in self._callers.get(id_in(text), _NO_SECRET):
            if compare_digest(known, given):
                found = key
        return found

    def _refusal(self, text: str) -> Unauthenticated:
        """Why a text is not accepted. Only who knows a secret learns more than that it is unknown."""
        if not text:
            return Unauthenticated(f"no API key was given; {HOW_TO_SEND}")
        found = self._find(text)
        if found is None:
            return Unauthenticated("the API key is unknown; check its text, or ask for a new key")
        ended = "was revoked" if not found.ends_at else "has expired, or was replaced by a rotation"
        error = Unauthenticated(f"API key {found.id} {ended}; ask for a new one")
        error.key_id = found.id
        return error

    def _is_valid(self, key: ApiKey | None, wall: int) -> bool:
        if key is None:
            return self._keys is None and self._problem is None
        now = next((now for _, now in self._callers.get(key.id, ()) if now.secret == key.secret), None)
        return now is not None and wall < now.ends_at and (now.scopes, now.prefixes) == (key.scopes, key.prefixes)

    # -- changes of the file -------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the file, end what waits for keys that are no longer valid, and save when keys were used.

        The server calls this every second, and when it gets SIGHUP.
        """
        now = self._clock.read()
        self._look(now)
        self._end_watches(now.wall)
        self._save_uses(USE_INTERVAL)

    def watch(self, key: ApiKey | None, on_end: Callable[[], None]) -> Cancel:
        """Call `on_end` once when the key of a waiting request is no longer valid; gives a function that stops that.

        None: when requests begin to need a key.
        """
        number = next(self._watch_numbers)
        self._watches.setdefault(key, {})[number] = on_end

        def cancel() -> None:
            watches = self._watches.get(key)
            if watches is not None and watches.pop(number, None) is not None and not watches:
                del self._watches[key]

        return cancel

    def close(self) -> None:
        """Save when keys were used."""
        self._save_uses(0)

    def _look_if_due(self, now: Moment) -> None:
        if now.elapsed - self._looked_at >= LOOK_INTERVAL:
            self._look(now)

    def _look(self, now: Moment) -> None:
        """Read the file if it has changed."""
        self._looked_at = now.elapsed
        try:
            stamp = self._file.stamp()
            if stamp == self._stamp and (stamp is not None or self._keys is None):
                return
            is_settled = stamp is not None and now.wall - stamp[2] // 1_000 > SETTLED
            self._stamp = stamp if is_settled else None
            keys = self._file.read()
            if keys is None and self._keys is not None:
                raise StorageFailed(f"{self._file.path} is gone; put back a copy of it, or restart the server to serve without keys")
        except PenstockError as error:
            self._refuse_everything(error, now.wall)
            return
        if self._problem is not None or keys != self._keys:
            self._take(keys)
            self._end_watches(now.wall)

    def _take(self, keys: list[StoredKey] | None) -> None:
        if self._keys is not None or self._problem is not None:
            _log.info("the API keys have changed: there are %d", len(keys or ()))
        self._keys, self._problem = keys, None
        self._callers = {key.id: tuple(key.callers()) for key in keys or ()}

    def _refuse_everything(self, error: PenstockError, wall: int) -> None:
        if str(error) != str(self._problem):
            _log.error("no request is allowed until the API keys can be read: %s", error)
        self._problem, self._callers = error, {}
        if not isinstance(error, CorruptLog):  # the same file may be readable later
            self._stamp = None
        self._keys = self._keys or []
        self._end_watches(wall)

    def _end_watches(self, wall: int) -> None:
        for key in [key for key in self._watches if not self._is_valid(key, wall)]:
            for on_end in self._watches.pop(key).values():
                on_end()

    # -- last uses -----------------------------------------------------------------------------------

    def _save_uses(self, interval: int) -> None:
        """Save the uses of keys for which that was last done so long ago."""
        due = {id: at for id, at in self._used.items() if at != (saved := self._saved.get(id, 0)) and not 0 < at - saved < interval}
        if not due or self._problem is not None:
            return
        try:
            self._file.save_uses(due, self._callers)
        except BrokerLocked:  # by a command, for a moment
            return
        except PenstockError as error:
            if not self._save_failed:
                _log.warning("when API keys were last used is not saved: %s", error)
            self._save_failed = True
            return
        self._saved.update(due)
        self._save_failed = False
