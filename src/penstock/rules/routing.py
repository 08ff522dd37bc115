"""From a key to its slot, the same in Python and in Spark SQL.

Owns: the routing hash of DESIGN §4. `xxhash64(lit('penstock.slot'), key) & 16383` in stock Spark SQL gives the same slot.
The whole 64-bit hash also serves as the *key id* by which a partition tells keys apart without holding their bytes: two keys that
share an id (one pair in 2**64) are handled as one key, in order, one at a time: slower, never wrong. See docs/adr/0003.
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
    """The id of each key, NO_KEY where there is none."""
    digest, seed = xxhash.xxh64_intdigest, SLOT_SEED
    return [NO_KEY if key is None else digest(key, seed) or _STAND_IN_FOR_ZERO for key in keys]


def with_key_ids(batch: Batch) -> Batch:
    """The batch with the ids of its keys, where they are not given yet."""
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
    """A 16-byte name for ids given by callers (request ids; `dedup_digest` for dedup ids). Cryptographic: a collision loses an item."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(4, "little"))
        whole.update(part)
    return whole.digest()


def dedup_digest(key: bytes | None, dedup: bytes) -> bytes:
    """The name of a dedup id within its key, or without one. It begins with the slot that routes the item, and moves with it."""
    home = slot(dedup if key is None else key)
    scope = b"\0" if key is None else b"\1" + key
    return home.to_bytes(2, "big") + digest(b"penstock.dedup", scope, dedup)[:14]


def dedup_slot(digest: bytes) -> int:
    """The slot that a dedup_digest belongs to."""
    return int.from_bytes(digest[:2], "big")
