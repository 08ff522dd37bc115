"""Routing: the test vectors of the design, an even spread of keys, and dedup digests that never change."""

import re
from collections import Counter
from pathlib import Path

import pytest
import xxhash

from penstock.rules import routing, slots

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


DEDUPS = {
    (None, b"order-1"): "01cc63f563854ad6c6398965fb8c390d",
    (b"customer-42", b"order-1"): "077cec63443cf14a7ba36c9e19833ceb",
    (b"", b""): "0d72ab589cdbdf7beb8592f00087798e",
    ("kākāriki".encode(), "🦀".encode()): "33a6af4a389050eaab3978fef70f1823",
}


@pytest.mark.parametrize(("given", "digest"), DEDUPS.items())
def test_the_digest_of_a_dedup_id_never_changes(given: tuple[bytes | None, bytes], digest: str) -> None:
    assert routing.dedup_digest(*given).hex() == digest


@pytest.mark.parametrize("key", VECTORS)
def test_a_dedup_digest_names_the_slot_that_routes_its_item(key: bytes) -> None:
    assert routing.dedup_slot(routing.dedup_digest(key, b"order-1")) == routing.slot(key)
    assert routing.dedup_slot(routing.dedup_digest(None, key)) == routing.slot(key)


def test_a_dedup_digest_tells_its_key_and_id_apart() -> None:
    given = [(None, b"a"), (b"", b"a"), (b"a", b""), (None, b""), (b"a", b"a"), (b"\0", b"a"), (b"a", b"ab"), (b"aa", b"b")]
    assert len({routing.dedup_digest(key, dedup)[2:] for key, dedup in given}) == len(given)
    assert {len(routing.dedup_digest(key, dedup)) for key, dedup in given} == {16}


def test_a_digest_tells_its_parts_apart() -> None:
    digests = {routing.digest(*parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [])}
    assert len(digests) == 5
    assert {len(digest) for digest in digests} == {16}


def test_the_vectors_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text("utf-8")
    rows = re.findall(r"^\| `([0-9a-f]+|–)`( × 1000)? \| .* \| `([0-9a-f]{16})` \| ([0-9]+) \| ([0-9]) \|$", page, re.MULTILINE)
    assert len(rows) == len(VECTORS)
    owners = slots.first_map(range(8)).owners
    for text, repeated, key_id, slot, partition in rows:
        key = (b"" if text == "–" else bytes.fromhex(text)) * (1000 if repeated else 1)
        assert VECTORS[key] == routing.slot(key) == int(slot)
        assert routing.key_id(key) == int(key_id, 16)
        assert owners[int(slot)] == int(partition)
    for n in (1, 3, 8, 1000):  # the sentence about blocks
        blocks = [16384 * (i + 1) // n - 16384 * i // n for i in range(n)]
        assert list(slots.first_map(range(n)).owners) == [i for i, size in enumerate(blocks) for _ in range(size)]
