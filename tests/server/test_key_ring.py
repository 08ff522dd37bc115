"""The API keys of a running server: checks, changes that it follows, waiting requests, last uses."""

import logging
import os
from pathlib import Path

import pytest

from penstock.errors import CorruptLog, StorageFailed, Unauthenticated
from penstock.server import key_ring
from penstock.server.api_keys import KeyFile
from penstock.server.key_ring import HOW_TO_SEND, KeyRing
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import HOUR, MINUTE, SECOND, SystemClock


@pytest.fixture
def clock() -> MicrosecondClock:
    return MicrosecondClock()


@pytest.fixture
def keys(tmp_path: Path, clock: MicrosecondClock) -> KeyFile:
    return KeyFile(str(tmp_path), clock=clock)


@pytest.fixture
def ring(keys: KeyFile, tmp_path: Path, clock: MicrosecondClock) -> KeyRing:
    """The ring of a broker with one key."""
    keys.create("ops", ["admin"])
    return KeyRing(str(tmp_path), clock=clock)


# -- checks ------------------------------------------------------------------------------------------


def test_a_key_gives_what_it_allows(ring: KeyRing, keys: KeyFile) -> None:
    key, text = keys.create("web", ["read"], ["orders-"])
    found = ring.check(text)
    assert found is not None
    assert (found.id, found.name, found.scopes, found.prefixes) == (key.id, "web", frozenset({"read", "look"}), ("orders-",))
    assert ring.authenticate(text) == found
    assert ring.is_valid(found)


def test_other_texts_are_refused(ring: KeyRing, keys: KeyFile) -> None:
    key, text = keys.create("web", ["read"])
    other, other_text = keys.create("app", ["read"])
    secret, other_secret = text.split("_")[2], other_text.split("_")[2]
    wrong = [
        "", "pk", "pk__", f"pk_{key.id}_", f"pk_{key.id}_{other_secret}", f"pk_{other.id}_{secret}", f"pk_nobody_{secret}", secret,
        text[:-1], text + "0", text.upper(), f" {text}", f"{text}\n", text * 1_000, "pk_\udcff_x", f"pk_{key.id}_{'ß' * 64}",
    ]  # fmt: skip
    assert [given for given in wrong if ring.check(given) is not None] == []
    assert ring.check(text) is not None


def test_a_text_is_compared_in_constant_time_also_for_an_unknown_id(ring: KeyRing, keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return False

    key, _ = keys.create("web", ["read"])
    ring.refresh()
    monkeypatch.setattr(key_ring, "compare_digest", compare)
    counts = []
    for given in (f"pk_{key.id}_wrong", f"pk_{'0' * 12}_wrong", "nonsense"):
        compared.clear()
        assert ring.check(given) is None
        counts.append(len(compared))
        assert all(len(known) == len(one) == 32 for known, one in compared)
    assert len(set(counts)) == 1 and counts[0] >= 1


def test_why_a_request_is_refused(ring: KeyRing, keys: KeyFile, clock: MicrosecondClock) -> None:
    revoked, revoked_text = keys.create("web", ["read"])
    keys.revoke(revoked.id)
    expired, expired_text = keys.create("old", ["read"], expires_at=clock.read().wall + HOUR)
    clock.advance(HOUR)
    expected = {
        "": ("", f"no API key was given; {HOW_TO_SEND}"),
        f"pk_{revoked.id}_wrong": ("", "the API key is unknown; check its text, or ask for a new key"),
        revoked_text: (revoked.id, f"API key {revoked.id} was revoked; ask for a new one"),
        expired_text: (expired.id, f"API key {expired.id} has expired, or was replaced by a rotation; ask for a new one"),
    }
    for text, (id, said) in expected.items():
        with pytest.raises(Unauthenticated) as refused:
            ring.authenticate(text)
        assert (refused.value.key_id, str(refused.value)) == (id, said)


# -- changes of the file -----------------------------------------------------------------------------


def test_a_broker_without_keys_is_open_until_the_first_one(keys: KeyFile, tmp_path: Path, clock: MicrosecondClock) -> None:
    ring = KeyRing(str(tmp_path), clock=clock)
    assert ring.is_open and ring.is_valid(None)
    assert ring.authenticate("") is None
    assert ring.authenticate("anything") is None
    _, text = keys.create("web", ["read"])
    clock.advance(SECOND)
    assert not ring.is_open and not ring.is_valid(None)
    with pytest.raises(Unauthenticated):
        ring.authenticate("")
    assert ring.authenticate(text) is not None


def test_a_broker_whose_keys_are_all_revoked_is_not_open(keys: KeyFile, tmp_path: Path, clock: MicrosecondClock) -> None:
    key, _ = keys.create("web", ["read"])
    keys.revoke(key.id)
    assert not KeyRing(str(tmp_path), clock=clock).is_open


def test_a_new_key_and_a_rotated_one_are_accepted_at_once(ring: KeyRing, keys: KeyFile) -> None:
    key, text = keys.create("web", ["read"])
    assert ring.check(text) is not None
    _, rotated = keys.rotate(key.id)
    assert ring.check(rotated) is not None


@pytest.mark.parametrize("change", ["revoke", "rotate"])
def test_the_end_of_a_key_counts_after_a_second(ring: KeyRing, keys: KeyFile, clock: MicrosecondClock, change: str) -> None:
    key, text = keys.create("web", ["read"])
    found = ring.check(text)
    getattr(keys, change)(key.id)
    clock.advance(SECOND)
    assert not ring.is_valid(found)
    assert ring.check(text) is None


def test_a_key_expires_without_a_change_of_the_file(ring: KeyRing, keys: KeyFile, clock: MicrosecondClock) -> None:
    _, text = keys.create("web", ["read"], expires_at=clock.read().wall + SECOND // 2)
    found = ring.check(text)
    clock.advance(SECOND // 2 - 1)
    assert ring.check(text) is not None and ring.is_valid(found)
    clock.advance(1)
    assert ring.check(text) is None and not ring.is_valid(found)


def test_changes_by_another_process_count_within_a_second_of_real_time(keys: KeyFile, tmp_path: Path) -> None:
    others = KeyFile(str(tmp_path))
    key, text = others.create("web", ["read"])
    ring, clock = KeyRing(str(tmp_path)), SystemClock()
    assert ring.check(text) is not None
    others.revoke(key.id)
    deadline = clock.read().elapsed + SECOND + SECOND // 2
    while ring.check(text) is not None:
        assert clock.read().elapsed < deadline


def test_a_file_is_read_again_only_when_it_may_have_changed(keys: KeyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, text = keys.create("web", ["read"])
    clock = MicrosecondClock()
    clock.step_wall(SystemClock().read().wall - clock.read().wall)
    reads = []
    read = KeyFile.read
    monkeypatch.setattr(KeyFile, "read", lambda self: reads.append(1) or read(self))  # type: ignore[func-returns-value]
    ring = KeyRing(str(tmp_path), clock=clock)
    clock.advance(SECOND)
    ring.refresh()
    assert len(reads) == 2, "a file this new could be changed again without a new time stamp"
    clock.advance(MINUTE)
    for _ in range(5):
        clock.advance(SECOND)
        ring.refresh()
        assert ring.check("pk_nobody_x") is None
    assert len(reads) == 3
    keys.revoke(key.id)
    reads.clear()
    assert ring.check("pk_nobody_x") is None
    assert len(reads) == 1 and ring.check(text) is None


# -- trouble -----------------------------------------------------------------------------------------


def test_no_server_starts_with_damaged_keys(keys: KeyFile, tmp_path: Path, clock: MicrosecondClock) -> None:
    keys.create("web", ["read"])
    Path(keys.path).write_bytes(b"nonsense")
    with pytest.raises(CorruptLog, match=r"keys\.json is damaged"):
        KeyRing(str(tmp_path), clock=clock)


def spoil(keys: KeyFile, how: str) -> None:
    path = Path(keys.path)
    path.rename(f"{path}.kept")
    if how == "damaged":
        path.write_bytes(Path(f"{path}.kept").read_bytes()[:-2])
    elif how == "a directory":
        path.mkdir()


def heal(keys: KeyFile, how: str) -> None:
    path = Path(keys.path)
    if how == "a directory":
        path.rmdir()
    os.replace(f"{path}.kept", path)


@pytest.mark.parametrize("how", ["damaged", "a directory", "gone"])
def test_while_the_keys_cannot_be_read_everything_is_refused(
    ring: KeyRing, keys: KeyFile, clock: MicrosecondClock, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, text = keys.create("web", ["read"])
    found, ended = ring.check(text), []
    ring.watch(found, lambda: ended.append(1))
    spoil(keys, how)
    for _ in range(3):
        clock.advance(SECOND)
        ring.refresh()
        assert ring.check(text) is None
        assert not ring.is_open and not ring.is_valid(found) and not ring.is_valid(None)
        for given in ("", text, "pk_a_b"):
            with pytest.raises(StorageFailed, match="the server cannot read its API keys and refuses every request"):
                ring.authenticate(given)
    assert ended == [1]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and errors[0].startswith("no request is allowed until the API keys can be read: ")
    heal(keys, how)
    assert ring.check(text) is not None
    clock.advance(SECOND)
    assert not ring.is_open


def test_an_open_server_stays_closed_to_damaged_first_keys(keys: KeyFile, tmp_path: Path, clock: MicrosecondClock) -> None:
    ring = KeyRing(str(tmp_path), clock=clock)
    assert ring.is_open
    Path(keys.folder).mkdir()
    Path(keys.path).write_bytes(b"nonsense")
    clock.advance(SECOND)
    assert not ring.is_open
    with pytest.raises(StorageFailed):
        ring.authenticate("")


# -- waiting requests --------------------------------------------------------------------------------


def test_a_waiting_request_ends_with_its_key_and_with_no_other(ring: KeyRing, keys: KeyFile) -> None:
    first, text = keys.create("web", ["read"])
    _, other_text = keys.create("app", ["read"])
    ended: list[str] = []
    ring.watch(ring.check(text), lambda: ended.append("first"))
    ring.watch(ring.check(text), lambda: ended.append("second"))
    ring.watch(ring.check(text), lambda: ended.append("answered"))()
    ring.watch(ring.check(other_text), lambda: ended.append("other"))
    ring.refresh()
    assert ended == []
    keys.revoke(first.id)
    ring.refresh()
    ring.refresh()
    assert ended == ["first", "second"]


def test_a_cancel_after_the_end_does_nothing(ring: KeyRing, keys: KeyFile) -> None:
    key, text = keys.create("web", ["read"])
    cancel = ring.watch(ring.check(text), lambda: None)
    keys.revoke(key.id)
    ring.refresh()
    cancel()


def test_a_waiting_request_ends_when_its_key_expires(ring: KeyRing, keys: KeyFile, clock: MicrosecondClock) -> None:
    _, text = keys.create("web", ["read"], expires_at=clock.read().wall + HOUR)
    ended: list[int] = []
    ring.watch(ring.check(text), lambda: ended.append(1))
    ring.refresh()
    clock.advance(HOUR)
    ring.refresh()
    assert ended == [1]


def test_a_waiting_request_survives_a_rotation_until_the_grace_period_ends(ring: KeyRing, keys: KeyFile, clock: MicrosecondClock) -> None:
    key, old = keys.create("web", ["read"])
    ended: list[str] = []
    ring.watch(ring.check(old), lambda: ended.append("old"))
    _, new = keys.rotate(key.id, HOUR)
    ring.watch(ring.check(new), lambda: ended.append("new"))
    ring.refresh()
    assert ended == []
    clock.advance(HOUR)
    ring.refresh()
    assert ended == ["old"]


def test_requests_without_a_key_end_with_the_first_key(keys: KeyFile, tmp_path: Path, clock: MicrosecondClock) -> None:
    ring = KeyRing(str(tmp_path), clock=clock)
    ended: list[int] = []
    ring.watch(None, lambda: ended.append(1))
    ring.refresh()
    assert ended == []
    keys.create("web", ["read"])
    ring.refresh()
    assert ended == [1]


# -- last uses ---------------------------------------------------------------------------------------


def test_the_last_use_is_saved_once_a_minute_and_at_the_end(ring: KeyRing, keys: KeyFile, clock: MicrosecondClock) -> None:
    key, text = keys.create("web", ["read"])
    stamp, start = keys.stamp(), clock.read().wall
    ring.check(text)
    ring.refresh()
    assert keys.read_uses() == {key.id: start}
    clock.advance(MINUTE - 1)
    ring.check(text)
    ring.refresh()
    assert keys.read_uses() == {key.id: start}
    clock.advance(1)
    ring.check(text)
    ring.refresh()
    assert keys.read_uses() == {key.id: start + MINUTE}
    clock.advance(SECOND)
    ring.check(text)
    ring.close()
    assert keys.read_uses() == {key.id: start + MINUTE + SECOND}
    assert keys.stamp() == stamp, "uses must not touch the keys"


def test_a_refused_text_is_no_use(ring: KeyRing, keys: KeyFile) -> None:
    key, text = keys.create("web", ["read"])
    ring.check(f"pk_{key.id}_wrong")
    keys.revoke(key.id)
    ring.refresh()
    ring.check(text)
    ring.close()
    assert keys.read_uses() == {}


def test_two_servers_save_their_uses_side_by_side(ring: KeyRing, keys: KeyFile, tmp_path: Path, clock: MicrosecondClock) -> None:
    first, first_text = keys.create("web", ["read"])
    second, second_text = keys.create("app", ["read"])
    other = KeyRing(str(tmp_path), clock=clock)
    ring.check(first_text)
    other.check(second_text)
    ring.refresh()
    other.refresh()
    assert set(keys.read_uses()) == {first.id, second.id}


def test_uses_that_cannot_be_saved_are_logged_once_and_saved_later(
    ring: KeyRing, keys: KeyFile, clock: MicrosecondClock, caplog: pytest.LogCaptureFixture
) -> None:
    key, text = keys.create("web", ["read"])
    blocking = Path(keys.folder, "used.json")
    blocking.mkdir()
    for _ in range(3):
        ring.check(text)
        ring.refresh()
        clock.advance(SECOND)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["when API keys were last used is not saved"]
    blocking.rmdir()
    ring.refresh()
    assert set(keys.read_uses()) == {key.id}


def test_uses_wait_while_a_command_changes_the_keys(ring: KeyRing, keys: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    key, text = keys.create("web", ["read"])
    ring.check(text)
    with keys._locked():
        ring.refresh()
        assert keys.read_uses() == {}
    ring.refresh()
    assert set(keys.read_uses()) == {key.id}
    assert caplog.records == []
