"""Routing: the vectors of the design, and that keys spread."""

from collections import Counter

import pytest
import xxhash

from penstock.rules import routing

VECTORS = {
    b"a": 5310,
    b"customer-42": 1916,
    b"customer-43": 879,
    b"": 3442,
    b"\x00": 1631,
    "kākāriki".encode(): 13222,
    "🦀🐍".encode(): 13027,
    b"x" * 1000: 4921,
}


@pytest.mark.parametrize(("key", "slot"), VECTORS.items())
def test_the_vectors_of_the_design(key: bytes, slot: int) -> None:
    assert routing.slot(key) == slot


def test_the_seed_is_the_hash_of_its_domain() -> None:
    assert xxhash.xxh64_intdigest(b"penstock.slot", 42) == routing.SLOT_SEED


def test_key_ids_are_those_of_each_key_and_none_for_none() -> None:
    assert routing.key_ids([b"a", None, b""]) == [routing.key_id(b"a"), routing.NO_KEY, routing.key_id(b"")]
    assert routing.key_id(b"") != routing.NO_KEY


def test_no_key_has_the_id_of_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh64_intdigest", lambda key, seed: 0)
    assert routing.key_id(b"unlucky") != routing.NO_KEY
    assert routing.key_ids([b"unlucky"]) == [routing.key_id(b"unlucky")]
    assert routing.slot(b"unlucky") == 0


@pytest.mark.parametrize("name", ["{}", "customer-{}", "{:032d}"])
def test_keys_spread_evenly_over_sixteen_partitions(name: str) -> None:
    found = Counter(routing.slot(name.format(number).encode()) % 16 for number in range(40_000))
    assert max(found.values()) / (40_000 / 16) <= 1.1


def test_a_digest_tells_its_parts_apart() -> None:
    digests = {routing.digest(*parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [])}
    assert len(digests) == 5
    assert {len(digest) for digest in digests} == {16}
