"""The file of API keys: what is in it, its changes, damage, faults of the disk, and several processes."""

import errno
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import BrokerLocked, CorruptLog, InvalidRequest, StorageFailed
from penstock.server import api_keys
from penstock.server.api_keys import NEVER, SCOPES, ApiKey, KeyFile, StoredKey, find_key, hash_of, id_in, implied_scopes, is_key_text
from penstock.testing import Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import DAY, HOUR


@pytest.fixture
def clock() -> MicrosecondClock:
    return MicrosecondClock()


@pytest.fixture
def keys(tmp_path: Path, clock: MicrosecondClock) -> KeyFile:
    return KeyFile(str(tmp_path), clock=clock)


def read(file: KeyFile) -> list[StoredKey]:
    found = file.read()
    assert found is not None
    return found


def valid(file: KeyFile, text: str, clock: MicrosecondClock) -> list[ApiKey]:
    """The keys that a text proves and that have not ended."""
    callers = (caller for key in read(file) for caller in key.callers())
    return [key for known, key in callers if known == hash_of(text) and clock.read().wall < key.ends_at]


# -- keys --------------------------------------------------------------------------------------------


def test_the_text_of_a_key_has_its_id_and_256_random_bits(keys: KeyFile) -> None:
    key, text = keys.create("web", ["produce"])
    prefix, id, secret = text.split("_")
    assert (prefix, id, len(bytes.fromhex(secret))) == ("pk", key.id, 32)
    assert id_in(text) == key.id
    assert is_key_text(text)
    assert not is_key_text(text[:-1]) and not is_key_text("orders")
    assert len({keys.create(f"web {number}", ["produce"])[1].split("_")[2] for number in range(20)}) == 20


@pytest.mark.parametrize("text", ["", "pk", "orders", "xx_a_b", "PK_a_b"])
def test_a_text_that_is_none_of_a_key_has_no_id(text: str) -> None:
    assert id_in(text) == ""


def test_the_file_has_no_secret_and_only_its_user_can_read_it(keys: KeyFile) -> None:
    before = os.umask(0)
    try:
        _, text = keys.create("web", ["produce"])
        _, rotated = keys.rotate(read(keys)[0].id)
        keys.save_uses({read(keys)[0].id: 1}, [read(keys)[0].id])
    finally:
        os.umask(before)
    written = {path.name: path for path in Path(keys.folder).iterdir()}
    assert set(written) == {"keys.json", "used.json", "LOCK"}
    for path in written.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert text.split("_")[2].encode() not in path.read_bytes()
        assert rotated.split("_")[2].encode() not in path.read_bytes()


def test_a_key_file_that_others_could_read_is_private_after_a_change(keys: KeyFile) -> None:
    keys.create("web", ["produce"])
    os.chmod(keys.path, 0o644)
    Path(f"{keys.path}.tmp").touch(0o644)  # as a killed process of a careless copy could leave it
    keys.create("ops", ["admin"])
    assert stat.S_IMODE(os.stat(keys.path).st_mode) == 0o600


def test_a_key_as_it_was_created(keys: KeyFile, clock: MicrosecondClock) -> None:
    now = clock.read().wall
    key, text = keys.create("web", ["consume", "look", "consume"], ["orders-", "a", "a"], now + DAY)
    assert read(keys) == [key]
    assert (key.name, key.scopes, key.prefixes, key.created_at, key.expires_at) == (
        "web", ["look", "consume"], ["a", "orders-"], now, now + DAY,
    )  # fmt: skip
    assert (key.rotated_at, key.revoked_at, key.state(now), key.state(now + DAY)) == (None, None, "valid", "expired")
    ((known, caller),) = key.callers()
    assert known == hash_of(text)
    assert caller == ApiKey(key.id, "web", frozenset({"look", "consume"}), ("a", "orders-"), 1, now + DAY)


def test_scopes_include_others() -> None:
    assert implied_scopes(["admin"]) == set(SCOPES)
    assert implied_scopes(["read"]) == {"read", "look"}
    assert implied_scopes(["produce", "consume"]) == {"produce", "consume"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": ""}, "name is ''; give 1 to 100 printable characters"),
        ({"name": "a\nb"}, r"name is 'a\\nb'; give 1 to 100"),
        ({"name": "x" * 101}, "name is 'xxx"),
        ({"scopes": []}, "scopes is empty; give some of look, read, produce, consume, admin"),
        ({"scopes": ["look", "fly"]}, "scopes is look, fly; give some of look"),
        ({"prefixes": [""]}, "'' is no name for a queue"),
        ({"prefixes": ["a b"]}, "'a b' is no name for a queue"),
        ({"prefixes": ["a"] * 51}, "there are 51 prefixes; give at most 50, or none for all queues"),
        ({"expires_at": 5}, "expires_at is in the past; give a later time, or none"),
    ],
)
def test_a_wrong_key_is_not_created(keys: KeyFile, given: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        keys.create(**{"name": "web", "scopes": ["look"], **given})  # type: ignore[arg-type]
    assert keys.read() is None


def test_a_name_is_free_when_its_key_has_ended(keys: KeyFile) -> None:
    first, _ = keys.create("web", ["look"])
    with pytest.raises(InvalidRequest, match="there is an API key of the name 'web'; choose another name, or rotate or revoke that key"):
        keys.create("web", ["read"])
    keys.revoke(first.id)
    second, _ = keys.create("web", ["read"])
    assert [key.id for key in read(keys)] == [first.id, second.id]


def test_a_key_is_found_by_id_or_name(keys: KeyFile, clock: MicrosecondClock) -> None:
    first, _ = keys.create("web", ["look"])
    keys.revoke(first.id)
    second, _ = keys.create("web", ["look"])
    third, _ = keys.create(first.id, ["look"])  # named like the id of another one
    now = clock.read().wall
    found = [find_key(read(keys), named, now) for named in ("web", first.id, second.id, third.id, "nobody")]
    assert [key and key.id for key in found] == [second.id, first.id, second.id, third.id, None]


# -- rotation and revocation -------------------------------------------------------------------------


def test_a_rotation_replaces_the_secret_at_once(keys: KeyFile, clock: MicrosecondClock) -> None:
    key, old = keys.create("web", ["look"], ["a"])
    clock.advance(HOUR)
    rotated, new = keys.rotate(key.id)
    assert valid(keys, old, clock) == []
    assert [one.id for one in valid(keys, new, clock)] == [key.id]
    assert (rotated.id, rotated.scopes, rotated.prefixes, rotated.created_at) == (key.id, ["look"], ["a"], key.created_at)
    assert rotated.rotated_at == clock.read().wall


def test_the_old_secret_is_valid_for_the_grace_period(keys: KeyFile, clock: MicrosecondClock) -> None:
    key, first = keys.create("web", ["look"])
    _, second = keys.rotate(key.id, HOUR)
    assert [valid(keys, text, clock)[0].secret for text in (first, second)] == [1, 2]
    clock.advance(HOUR)
    assert valid(keys, first, clock) == []
    assert valid(keys, second, clock)[0].ends_at == NEVER


def test_a_second_rotation_ends_all_former_secrets_within_its_own_grace_period(keys: KeyFile, clock: MicrosecondClock) -> None:
    key, first = keys.create("web", ["look"])
    _, second = keys.rotate(key.id, DAY)
    _, third = keys.rotate(key.id, HOUR)
    assert len(read(keys)[0].secrets) == 3
    clock.advance(HOUR)
    assert [len(valid(keys, text, clock)) for text in (first, second, third)] == [0, 0, 1]
    _, fourth = keys.rotate(key.id)
    assert [len(valid(keys, text, clock)) for text in (third, fourth)] == [0, 1]
    assert len(read(keys)[0].secrets) == 1


def test_a_grace_period_does_not_outlast_the_key(keys: KeyFile, clock: MicrosecondClock) -> None:
    key, old = keys.create("web", ["look"], expires_at=clock.read().wall + HOUR)
    _, new = keys.rotate(key.id, DAY)
    clock.advance(HOUR)
    assert valid(keys, old, clock) == valid(keys, new, clock) == []


def test_a_revoked_key_has_ended_for_ever(keys: KeyFile, clock: MicrosecondClock) -> None:
    key, first = keys.create("web", ["look"])
    _, second = keys.rotate(key.id, DAY)
    revoked = keys.revoke(key.id)
    assert (revoked.revoked_at, revoked.state(clock.read().wall)) == (clock.read().wall, "revoked")
    clock.step_wall(-DAY)  # a clock that is set back gives no key its life back
    assert valid(keys, first, clock) == valid(keys, second, clock) == []
    assert keys.revoke(key.id) == revoked
    with pytest.raises(InvalidRequest, match=f"API key {key.id} is revoked; create a new one"):
        keys.rotate(key.id)


def test_an_expired_key_cannot_be_rotated(keys: KeyFile, clock: MicrosecondClock) -> None:
    key, _ = keys.create("web", ["look"], expires_at=clock.read().wall + HOUR)
    clock.advance(HOUR)
    with pytest.raises(InvalidRequest, match=f"API key {key.id} is expired; create a new one"):
        keys.rotate(key.id)


def test_unknown_keys_and_wrong_graces_are_refused(keys: KeyFile) -> None:
    key, _ = keys.create("web", ["look"])
    for change in (keys.rotate, keys.revoke):
        with pytest.raises(InvalidRequest, match="there is no API key 'nobody'; list the keys"):
            change("nobody")
    with pytest.raises(InvalidRequest, match="grace"):
        keys.rotate(key.id, -1)


def test_beyond_the_most_keys_the_one_that_ended_first_is_removed(
    keys: KeyFile, clock: MicrosecondClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "MAX_KEYS", 3)
    ids = [keys.create(name, ["look"])[0].id for name in "abc"]
    with pytest.raises(InvalidRequest, match="there are 3 valid API keys, which is the most; revoke one first"):
        keys.create("d", ["look"])
    for index in (2, 0):
        clock.advance(HOUR)
        keys.revoke(ids[index])
    new, _ = keys.create("d", ["look"])
    assert [key.id for key in read(keys)] == [ids[0], ids[1], new.id]


# -- damage ------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed(keys: KeyFile) -> None:
    keys.create("web", ["look"], ["orders-"])
    whole = Path(keys.path).read_bytes()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptLog, match=r"keys\.json (is damaged|has the newer version)"):
            api_keys._decode(bytes(damaged), keys.path)


def test_every_cut_is_noticed(keys: KeyFile) -> None:
    keys.create("web", ["look"])
    whole = Path(keys.path).read_bytes()
    for size in range(len(whole)):
        with pytest.raises(CorruptLog, match=r"is damaged .*; put back a copy of it, or remove it while no server runs"):
            api_keys._decode(whole[:size], keys.path)


def test_a_damaged_file_is_not_changed(keys: KeyFile) -> None:
    key, _ = keys.create("web", ["look"])
    Path(keys.path).write_bytes(b"{}")
    for change in (lambda: keys.create("ops", ["admin"]), lambda: keys.rotate(key.id), lambda: keys.revoke(key.id)):
        with pytest.raises(CorruptLog):
            change()
    assert Path(keys.path).read_bytes() == b"{}"


def test_a_file_of_a_newer_version_is_refused(keys: KeyFile) -> None:
    keys.create("web", ["look"])
    path = Path(keys.path)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(CorruptLog, match="has the newer version 2; upgrade Penstock, nothing was changed"):
        keys.read()


# -- faults ------------------------------------------------------------------------------------------


def calls_of_a_revocation() -> int:
    disk, file, id = revocable(0)
    before = disk.calls
    file.revoke(id)
    return disk.calls - before


def revocable(seed: int) -> tuple[SimulatedFiles, KeyFile, str]:
    disk = SimulatedFiles(random.Random(seed))
    disk.make_directory("data")
    disk.sync_directory("")
    file = KeyFile("data", files=disk, clock=MicrosecondClock())
    return disk, file, file.create("web", ["look"])[0].id


def test_a_power_cut_leaves_all_or_nothing_of_a_change() -> None:
    outcomes = set()
    for seed in range(8):
        for call in range(1, calls_of_a_revocation() + 1):
            disk, file, id = revocable(seed)
            disk.fail(disk.calls + call, "halt")
            with pytest.raises(Halt):
                file.revoke(id)
            disk.crash()
            outcomes.add(read(file)[0].revoked_at is not None)
            file.revoke(id)
            disk.crash()
            assert read(file)[0].revoked_at is not None  # what was answered is durable
    assert outcomes == {True, False}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_failed_change_is_an_error_and_the_next_one_works(number: int) -> None:
    for call in range(1, calls_of_a_revocation() + 1):
        disk, file, id = revocable(call)
        disk.fail(disk.calls + call, number)
        with pytest.raises(StorageFailed, match=r"(writing|reading) data/keys/keys\.json failed"):
            file.revoke(id)
        assert len(read(file)) == 1
        assert file.revoke(id).revoked_at is not None


# -- several processes -------------------------------------------------------------------------------

CREATE = """
import sys
from penstock.server.api_keys import KeyFile
file = KeyFile(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(15):
    key, _ = file.create(f"{sys.argv[2]} {number}", ["look"])
    file.revoke(key.id) if number % 2 else file.rotate(key.id, 10**9)
"""


def test_processes_that_change_keys_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", CREATE, str(tmp_path), name] for name in ("a", "b")]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in running:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in running:
            process.communicate("go\n", timeout=60)
            assert process.returncode == 0
    finally:
        for process in running:
            process.kill()
            process.wait()
    found = read(KeyFile(str(tmp_path)))
    assert sorted(key.name for key in found) == sorted(f"{name} {number}" for name in "ab" for number in range(15))
    for key in found:
        is_odd = int(key.name.split()[1]) % 2
        assert (key.revoked_at is not None, len(key.secrets)) == ((True, 1) if is_odd else (False, 2))


def test_a_lock_that_is_never_released_is_an_error(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = keys.create("web", ["look"])
    monkeypatch.setattr(api_keys, "LOCK_RETRY_SECONDS", 0.0)
    with keys._locked(), pytest.raises(BrokerLocked, match=r"another process is changing .*; run this again when it has ended"):
        keys.revoke(key.id)
    assert keys.revoke(key.id).revoked_at is not None


# -- last uses ---------------------------------------------------------------------------------------


def test_last_uses_are_merged_and_forgotten_with_their_keys(keys: KeyFile) -> None:
    keys.create("web", ["look"])
    keys.save_uses({"a": 10, "b": 20}, "ab")
    keys.save_uses({"a": 5, "b": 30, "c": 40}, "abc")
    assert keys.read_uses() == {"a": 10, "b": 30, "c": 40}
    keys.save_uses({"a": 50}, "ab")
    assert keys.read_uses() == {"a": 50, "b": 30}


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"a": "b"}', b"\xff"])
def test_a_damaged_file_of_uses_counts_as_empty(keys: KeyFile, damaged: bytes) -> None:
    keys.create("web", ["look"])
    Path(keys.folder, "used.json").write_bytes(damaged)
    assert keys.read_uses() == {}
    keys.save_uses({"a": 1}, "a")
    assert keys.read_uses() == {"a": 1}
