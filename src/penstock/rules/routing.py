"""The hashes of keys and ids: from a key to its key id and slot, the same in Python and in Spark SQL.

Owns: the hash that gives a key its slot. In Spark SQL a slot is `xxhash64(lit('penstock.slot'), key) & 16383`.
The whole 64-bit hash is the *key id*, by which a partition tells keys apart without storing their bytes. Two keys with
the same id (one pair in 2**64) are handled as one key: slower, but never wrong. See docs/adr/0003.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import xxhash

from penstock.words.batch import Batch
from penstock.words.errors import InvalidRequest

SLOTS = 16_384
SLOT_MASK = SLOTS - 1
SLOT_SEED = 0x927EEB32C6B0307C
"""XXH64("penstock.slot", seed=42)."""
NO_KEY = 0
_STAND_IN_FOR_ZERO = 1 << 63  # a key that hashes to NO_KEY; it keeps slot 0


def key_id(key: bytes) -> int:
    """The 64-bit id of a key; never NO_KEY."""
    return xxhash.xxh64_intdigest(key, SLOT_SEED) or _STAND_IN_FOR_ZERO


def key_ids(keys: Sequence[bytes | None]) -> list[int]:
    """The id of each key; NO_KEY for None."""
    digest, seed = xxhash.xxh64_intdigest, SLOT_SEED
    return [NO_KEY if key is None else digest(key, seed) or _STAND_IN_FOR_ZERO for key in keys]


def with_key_ids(batch: Batch) -> Batch:
    """The batch with key ids, if it has keys and no ids yet. Raises InvalidRequest if a key is not bytes."""
    if not isinstance(batch, Batch) or batch.keys is None or batch.key_ids is not None:
        return batch
    try:
        return msgspec.structs.replace(batch, key_ids=key_ids(batch.keys))
    except TypeError:
        raise InvalidRequest("a key is not bytes; give bytes, or None for no key") from None


def slot(key: bytes) -> int:
    """The slot of a key."""
    return key_id(key) & SLOT_MASK


def digest(*parts: bytes) -> bytes:
    """A 16-byte digest of a caller's id. It is cryptographic, because a collision would lose an item."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(4, "little"))
        whole.update(part)
    return whole.digest()


def dedup_digest(key: bytes | None, dedup: bytes) -> bytes:
    """The 16-byte digest of a dedup id within its key, if any. It begins with the item's slot."""
    own_slot = slot(dedup if key is None else key)
    scope = b"\0" if key is None else b"\1" + key
    return own_slot.to_bytes(2, "big") + digest(b"penstock.dedup", scope, dedup)[:14]


def dedup_slot(digest: bytes) -> int:
    """The slot of a `dedup_digest`."""
    return int.from_bytes(digest[:2], "big")
