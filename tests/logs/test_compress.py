"""Compression pays where it can and keeps out of the way where it cannot."""

import random

from penstock.logs.compress import MAX_SKIPPED, Compressor, expand

TEXT = b'{"order": 1, "customer": "kakariki"}' * 400
NOISE = random.Random(1).randbytes(len(TEXT))


def attempts(compressor: Compressor, body: bytes, times: int) -> int:
    """How often a body that compresses was stored compressed."""
    return sum(compressor.shrink([body], len(body)) is not None for _ in range(times))


def test_what_shrinks_comes_back_as_it_was() -> None:
    packed = Compressor().shrink([TEXT[:100], TEXT[100:]], len(TEXT))
    assert packed is not None
    assert len(packed) < len(TEXT) // 10
    assert expand(memoryview(packed), len(TEXT)) == TEXT


def test_noise_is_stored_as_it_is_and_soon_not_even_looked_at() -> None:
    compressor = Compressor()
    assert attempts(compressor, NOISE, 5_000) == 0
    # It is skipping now: even text is stored as it is, until the next look, after which it is compressed every time.
    results = [compressor.shrink([TEXT], len(TEXT)) is not None for _ in range(MAX_SKIPPED + 1)]
    assert results.count(False) > MAX_SKIPPED // 4
    assert results == sorted(results)
    assert attempts(compressor, TEXT, 10) == 10


def test_a_saving_below_five_percent_is_not_taken() -> None:
    mostly_noise = NOISE[:980] + bytes(20)
    assert Compressor().shrink([mostly_noise], 1000) is None
    assert Compressor().shrink([NOISE[:900] + bytes(100)], 1000) is not None


def test_what_expands_to_another_size_is_refused() -> None:
    packed = Compressor().shrink([bytes(1 << 20)], 1 << 20)
    assert packed is not None
    assert expand(memoryview(packed), 1000) is None
    assert expand(memoryview(packed), (1 << 20) + 1) is None
    assert expand(memoryview(packed + b"more"), 1 << 20) is None
    assert expand(memoryview(packed[:-1]), 1 << 20) is None
    assert expand(memoryview(b"not zstd at all"), 10) is None
