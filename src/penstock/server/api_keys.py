"""API keys, and the file in a broker's directory that has them.

Owns: `ApiKey` (who makes a request, and what is allowed), `StoredKey` (a key as it is in the file) and `KeyFile`, which
reads the file and creates, rotates and revokes keys.
The text of a key is `pk_<id>_<secret>`. The file has only hashes of secrets, so it cannot be used to make a request.
Commands and any number of servers use the file at the same time, without the owner of the broker: a change takes a
lock, reads the file, and replaces it atomically and durably; readers take no lock. When keys were last used is in a
file of its own, which may lag behind or be deleted, so that a busy server never writes the file of the keys.
A revoked or expired key stays in the file, so that the list shows it; beyond MAX_KEYS the one that ended first is
removed. A file that is damaged, or of a newer version, is refused as a whole.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from threading import Event
from typing import Annotated, Any, get_args

import msgspec
from google_crc32c import value as crc32c

from penstock.logs.files.filesystem import Files, SystemFiles, read_file, replace_file, storage_failed
from penstock.logs.files.root import KEYS
from penstock.operations import Scope
from penstock.rules.options import check_name
from penstock.words.clock import DAY, Clock, SystemClock
from penstock.words.errors import BrokerLocked, CorruptLog, InvalidRequest
from penstock.words.limits import check_range

SCOPES: tuple[Scope, ...] = get_args(Scope)
NEVER = 1 << 62
"""The end of a secret that has none."""
MAX_KEYS = 1_000
MAX_PREFIXES = 50
MAX_KEY_NAME = 100
MAX_GRACE = 365 * DAY
SECRET_BYTES = 32
ID_BYTES = 6
VERSION = 1
KEY_FILE, USE_FILE, LOCK_FILE = "keys.json", "used.json", "LOCK"
LOCK_ATTEMPTS, LOCK_RETRY_SECONDS = 500, 0.01
TEXT_PREFIX = "pk"
_KEY_TEXT = re.compile(f"{TEXT_PREFIX}_[0-9a-f]{{{2 * ID_BYTES}}}_[0-9a-f]{{{2 * SECRET_BYTES}}}")


class ApiKey(msgspec.Struct, frozen=True):
    """The key of a request, as one of its secrets proves it."""

    id: str
    name: str
    scopes: frozenset[Scope]
    """What it allows, with everything that follows from it."""
    prefixes: tuple[str, ...]
    """How the names of its queues begin; none: all queues."""
    secret: int = 1
    """The number of the secret: a rotation adds one."""
    ends_at: int = NEVER
    """When the secret ends (wall); 0 when the key was revoked."""


class KeySecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A secret of a key: its hash, and when it ends after a rotation."""

    number: int
    hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    created_at: int
    ends_at: int | None = None


class StoredKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key as it is in the file. Times are wall microseconds."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")]
    name: str
    scopes: Sequence[Scope]
    prefixes: Sequence[str]
    created_at: int
    secrets: Annotated[Sequence[KeySecret], msgspec.Meta(min_length=1)]
    """The newest first. The others are valid for a grace period after a rotation."""
    expires_at: int | None = None
    revoked_at: int | None = None

    @property
    def rotated_at(self) -> int | None:
        newest = self.secrets[0]
        return newest.created_at if newest.number > 1 else None

    def ended_at(self, now: int) -> int | None:
        """When it was revoked or expired; None while it is valid."""
        expired = self.expires_at if self.expires_at is not None and self.expires_at <= now else None
        ends = [end for end in (self.revoked_at, expired) if end is not None]
        return min(ends) if ends else None

    def state(self, now: int) -> str:
        return "revoked" if self.revoked_at is not None else "expired" if self.ended_at(now) is not None else "valid"

    def callers(self) -> Iterator[tuple[bytes, ApiKey]]:
        """For each secret its hash, and what a request with it may do."""
        for secret in self.secrets:
            ends = min(NEVER if end is None else end for end in (self.expires_at, secret.ends_at))
            yield (
                bytes.fromhex(secret.hash),
                ApiKey(
                    self.id,
                    self.name,
                    implied_scopes(self.scopes),
                    tuple(self.prefixes),
                    secret.number,
                    ends if self.revoked_at is None else 0,
                ),
            )


def implied_scopes(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """These scopes and those that they include: "admin" every other one, "read" also "look"."""
    given = frozenset(scopes)
    if "admin" in given:
        return frozenset(SCOPES)
    return given | {"look"} if "read" in given else given


def hash_of(text: str) -> bytes:
    """The hash of a key's text.

    One round of SHA-256 is right here: a slow hash defends short passwords, which can be guessed, but nobody tries 2²⁵⁶
    secrets, and a slow one would be paid for by every request.
    """
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def id_in(text: str) -> str:
    """The id that a key's text names; empty when it is not the text of a key."""
    prefix, _, rest = text.partition("_")
    return rest.partition("_")[0] if prefix == TEXT_PREFIX else ""


def is_key_text(text: str) -> bool:
    """Whether a text could be that of a key, and so must not be written anywhere."""
    return _KEY_TEXT.fullmatch(text) is not None


def find_key(keys: Iterable[StoredKey], named: str, now: int) -> StoredKey | None:
    """The key with this id, or else the valid one with this name."""
    found = [*keys]
    by_name = (key for key in found if key.name == named and key.ended_at(now) is None)
    return next((key for key in found if key.id == named), None) or next(by_name, None)


class KeyFile:
    """The file of the API keys of one broker."""

    def __init__(
        self,
        directory: str,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """directory: the first directory of the broker."""
        self.folder = f"{directory}/{KEYS}"
        self.path = f"{self.folder}/{KEY_FILE}"
        self._files = files or SystemFiles()
        self._clock = clock or SystemClock()
        self._entropy = entropy

    def read(self) -> list[StoredKey] | None:
        """All keys, in the order of their creation; None if there is no file. Raises CorruptLog, StorageFailed."""
        try:
            raw = read_file(self._files, self.path)
        except OSError as error:
            raise storage_failed(error, "reading", self.path) from error
        return None if raw is None else _decode(raw, self.path)

    def stamp(self) -> tuple[int, ...] | None:
        """Differs after a change of the file; None if there is no file."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_failed(error, "reading", self.path) from error
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    # -- changes -------------------------------------------------------------------------------------

    def create(
        self, name: str, scopes: Sequence[Scope], prefixes: Sequence[str] = (), expires_at: int | None = None
    ) -> tuple[StoredKey, str]:
        """Create a key; gives it with its text, which is nowhere else. expires_at: wall microseconds."""
        now = self._clock.read().wall
        _check_new(name, scopes, prefixes, expires_at, now)
        with self._changing() as keys:
            if any(key.name == name and key.ended_at(now) is None for key in keys):
                raise InvalidRequest(f"there is an API key of the name {name!r}; choose another name, or rotate or revoke that key")
            if len(keys) >= MAX_KEYS:
                keys.remove(_first_ended(keys, now))
            id = self._new_id(keys)
            text, secret = self._new_secret(id, 1, now)
            ordered = [scope for scope in SCOPES if scope in scopes]
            key = StoredKey(id, name, ordered, sorted({*prefixes}), now, [secret], expires_at)
            keys.append(key)
        return key, text

    def rotate(self, id: str, grace: int = 0) -> tuple[StoredKey, str]:
        """Make a new secret for a key; gives the key with its new text. Former secrets stay valid for `grace` µs."""
        check_range("grace", grace, 0, MAX_GRACE)
        now = self._clock.read().wall
        with self._changing() as keys:
            old = _known(keys, id)
            if old.ended_at(now) is not None:
                raise InvalidRequest(f"API key {id} is {old.state(now)}; create a new one")
            text, secret = self._new_secret(id, old.secrets[0].number + 1, now)
            former = [
                msgspec.structs.replace(one, ends_at=now + grace if one.ends_at is None else min(one.ends_at, now + grace))
                for one in old.secrets
            ]
            kept = [one for one in former if one.ends_at is not None and one.ends_at > now]
            key = msgspec.structs.replace(old, secrets=[secret, *kept])
            keys[keys.index(old)] = key
        return key, text

    def revoke(self, id: str) -> StoredKey:
        """End a key for ever. A key that was revoked before is not changed."""
        now = self._clock.read().wall
        with self._changing() as keys:
            old = _known(keys, id)
            key = old if old.revoked_at is not None else msgspec.structs.replace(old, revoked_at=now)
            keys[keys.index(old)] = key
        return key

    def _new_id(self, keys: Iterable[StoredKey]) -> str:
        taken = {key.id for key in keys}
        while (id := self._entropy(ID_BYTES).hex()) in taken:
            pass
        return id

    def _new_secret(self, id: str, number: int, now: int) -> tuple[str, KeySecret]:
        text = f"{TEXT_PREFIX}_{id}_{self._entropy(SECRET_BYTES).hex()}"
        return text, KeySecret(number, hash_of(text).hex(), now)

    @contextmanager
    def _changing(self) -> Iterator[list[StoredKey]]:
        """The keys, to be changed. They are written at the end, unless there was an error; no other process can change
        them meanwhile.
        """
        try:
            self._files.make_directory(self.folder)
            self._files.sync_directory(os.path.dirname(self.folder))
            with self._locked():
                before = self.read()
                keys = [*(before or ())]
                yield keys
                if keys != before:
                    replace_file(self._files, self.folder, KEY_FILE, _encode(keys), "private")
        except OSError as error:
            raise storage_failed(error, "writing", self.path) from error

    @contextmanager
    def _locked(self, attempts: int = LOCK_ATTEMPTS) -> Iterator[None]:
        path = f"{self.folder}/{LOCK_FILE}"
        handle = self._files.lock(path)
        while handle is None and (attempts := attempts - 1) > 0:
            Event().wait(LOCK_RETRY_SECONDS)
            handle = self._files.lock(path)
        if handle is None:
            raise BrokerLocked(f"another process is changing {self.path}; run this again when it has ended")
        try:
            yield
        finally:
            self._files.unlock(handle)

    # -- last uses -----------------------------------------------------------------------------------

    def read_uses(self) -> dict[str, int]:
        """When each key was last used (wall), by its id. A file that cannot be read counts as empty."""
        try:
            raw = read_file(self._files, f"{self.folder}/{USE_FILE}")
            return {} if raw is None else msgspec.json.decode(raw, type=dict[str, int])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def save_uses(self, uses: Mapping[str, int], known: Iterable[str]) -> None:
        """Add these uses to the file, which then has those of the known keys. Raises BrokerLocked, StorageFailed.

        It is not synced: that would hold up a server for information that it gets again.
        """
        path = f"{self.folder}/{USE_FILE}"
        try:
            with self._locked(attempts=1):
                saved = self.read_uses()
                newest = {id: max(saved.get(id, 0), uses.get(id, 0)) for id in known}
                raw = msgspec.json.encode({id: at for id, at in newest.items() if at})
                replace_file(self._files, self.folder, USE_FILE, raw, "private", sync=False)
        except OSError as error:
            raise storage_failed(error, "writing", path) from error


def _check_new(name: str, scopes: Sequence[Scope], prefixes: Sequence[str], expires_at: int | None, now: int) -> None:
    if not (1 <= len(name) <= MAX_KEY_NAME and name.isprintable() and name == name.strip()):
        raise InvalidRequest(f"name is {name!r:.250}; give 1 to {MAX_KEY_NAME} printable characters, such as the program that uses the key")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise InvalidRequest(f"scopes is {', '.join(scopes) or 'empty'}; give some of {', '.join(SCOPES)}")
    if len(prefixes) > MAX_PREFIXES:
        raise InvalidRequest(f"there are {len(prefixes)} prefixes; give at most {MAX_PREFIXES}, or none for all queues")
    for prefix in prefixes:
        check_name(prefix)
    if expires_at is not None and expires_at <= now:
        raise InvalidRequest("expires_at is in the past; give a later time, or none")


def _first_ended(keys: Iterable[StoredKey], now: int) -> StoredKey:
    ended = [(end, number, key) for number, key in enumerate(keys) if (end := key.ended_at(now)) is not None]
    if not ended:
        raise InvalidRequest(f"there are {MAX_KEYS} valid API keys, which is the most; revoke one first")
    return min(ended)[2]


def _known(keys: Iterable[StoredKey], id: str) -> StoredKey:
    found = next((key for key in keys if key.id == id), None)
    if found is None:
        raise InvalidRequest(f"there is no API key {id!r:.100}; list the keys, and give the id of one")
    return found


# -- the bytes of the file -----------------------------------------------------------------------------


class _Document(msgspec.Struct):
    """The content of the file; a newer version may have other fields."""

    version: int
    checksum: int
    """CRC-32C of the bytes of `keys`."""
    keys: msgspec.Raw


_KEYS_DECODER = msgspec.json.Decoder(list[StoredKey])


def _encode(keys: Sequence[StoredKey]) -> bytes:
    raw = msgspec.json.encode(keys)
    checksum: int = crc32c(raw)
    return msgspec.json.encode(_Document(VERSION, checksum, msgspec.Raw(raw)))


def _decode(raw: bytes, path: str) -> list[StoredKey]:
    try:
        document = msgspec.json.decode(raw, type=_Document)
        if document.version > VERSION:
            raise CorruptLog(f"{path} has the newer version {document.version}; upgrade Penstock, nothing was changed")
        if document.version != VERSION or crc32c(bytes(document.keys)) != document.checksum:
            raise _damaged(path, "its version or checksum is wrong")
        keys = _KEYS_DECODER.decode(document.keys)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error
    if len({key.id for key in keys}) < len(keys):
        raise _damaged(path, "an id occurs twice")
    return keys


def _damaged(path: str, why: Any) -> CorruptLog:
    return CorruptLog(f"{path} is damaged ({why}); put back a copy of it, or remove it while no server runs and create new keys")
