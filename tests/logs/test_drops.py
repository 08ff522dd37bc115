"""The inbox as a folder of files: what is in it is whole, whatever was cut off."""

import errno
from pathlib import Path

import msgspec
import pytest

from penstock.errors import CorruptLog, InvalidRequest, OutcomeUnknown
from penstock.logs.columns import Columns
from penstock.logs.files import staging
from penstock.logs.files.drops import MANIFEST, Drops, Manifest, Part, Waiting, drop_file, write_name
from penstock.logs.files.system import Files, SystemFiles
from penstock.testing import SimulatedFiles
from tests.broker.inbox import ROOT, Outsider, ended_in
from tests.broker.rig import batch_of

QUEUE, OTHER = 0x0A, 0x0B


@pytest.fixture(params=["simulated", "real"])
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Outsider:
    """Somebody with an inbox, on each kind of disk."""
    if request.param == "real":
        return Outsider(SystemFiles(), str(tmp_path / "data"))
    return Outsider(SimulatedFiles())


def texts(drops: Drops, files: Files, drop: Waiting) -> list[str]:
    """All that a drop holds, read as its owner reads it."""
    found = []
    for part in drops.manifest(drop).parts:
        for frame in staging.frames(files, drops.part(drop, part), drop.incarnation):
            found += [payload.decode() for payload in Columns(frame).batch().payloads]
    return found


def only(drops: Drops) -> Waiting:
    (found,) = drops.waiting()
    return found


# -- publishing ----------------------------------------------------------------------------------------


def test_what_is_published_waits_for_its_owner(one: Outsider) -> None:
    assert not one.drops.pending(QUEUE, "s", 1)
    assert one.publish(QUEUE, batch_of("a", "b"), batch_of("c"), parts=2)
    drop = only(one.drops)
    assert (drop.incarnation, drop.is_errand) == (QUEUE, False)
    assert texts(one.drops, one.files, drop) == ["a", "b", "c"]
    assert [part.items for part in one.drops.manifest(drop).parts] == [2, 1]
    assert one.drops.pending(QUEUE, "s", 1)
    assert not one.drops.pending(QUEUE, "s", 2) and not one.drops.pending(OTHER, "s", 1)
    one.drops.done(drop)
    assert not one.drops.pending(QUEUE, "s", 1) and one.left() == []


def test_what_is_staged_is_nobodys_yet(one: Outsider) -> None:
    one.stage(QUEUE, [[batch_of("a")]])
    assert one.drops.waiting() == []


def test_the_same_one_is_in_the_inbox_once(one: Outsider) -> None:
    assert one.publish(QUEUE, batch_of("first"))
    assert not one.publish(QUEUE, batch_of("second"))
    assert texts(one.drops, one.files, only(one.drops)) == ["first"]
    assert one.left() == [only(one.drops).file]
    assert one.publish(QUEUE, batch_of("other number"), number=2)
    assert one.publish(QUEUE, batch_of("other source"), source="t")
    assert one.publish(OTHER, batch_of("other queue"))
    assert len(one.drops.waiting()) == 4


def test_a_write_may_be_begun_twice_and_given_up_twice(one: Outsider) -> None:
    write, _ = one.stage(QUEUE, [[batch_of("a")]])
    assert one.drops.begin(write) == one.drops.begin(write)
    one.drops.abandon(write)
    one.drops.abandon(write)
    assert one.left() == []


def test_a_write_of_nothing_is_a_drop_all_the_same(one: Outsider) -> None:
    assert one.publish(QUEUE, parts=1)
    assert one.drops.manifest(only(one.drops)).parts == [Part("part-0.frames", 0, 0)]


@pytest.mark.parametrize("wrong", [Manifest([], "s", 0), Manifest([], "s", -1), Manifest([], "", 1), Manifest([], "s", 1 << 63)])
def test_what_the_ledger_could_not_hold_is_not_published(one: Outsider, wrong: Manifest) -> None:
    with pytest.raises(InvalidRequest, match="a number from 1 on"):
        one.drops.publish(write_name(1), QUEUE, wrong)
    assert one.left() == []


@pytest.mark.parametrize("name", ["", "a/b", "..\\x", "ü", "a" * 151, "a b"])
def test_what_cannot_be_a_file_name_is_refused(one: Outsider, name: str) -> None:
    if name:
        with pytest.raises(InvalidRequest, match="file name"):
            one.drops.begin(name)
        with pytest.raises(InvalidRequest, match="file name"):
            one.drops.errand(QUEUE, name, b"")
    assert one.left() == []


def test_it_is_known_when_a_write_began(one: Outsider) -> None:
    one.publish(QUEUE, batch_of("a"), write=write_name(1234))
    assert one.drops.manifest(only(one.drops)).began == 1234


# -- cut off -------------------------------------------------------------------------------------------


def test_publishing_is_all_or_nothing() -> None:
    files = SimulatedFiles()
    Outsider(files).publish(QUEUE, batch_of("before"), number=1)

    def publish(disk: SimulatedFiles) -> None:
        Outsider(disk).publish(QUEUE, batch_of("a", "b"), batch_of("c"), number=2, parts=2)

    met = set()
    for disk, done in ended_in(files, publish):
        one = Outsider(disk)
        found = sorted(texts(one.drops, disk, drop) for drop in one.drops.waiting())
        assert found in ([["a", "b", "c"], ["before"]], [["before"]])
        assert len(found) == 2 or not done, "what was answered is there"
        met.add((len(found), done))
        one.publish(QUEUE, batch_of("a", "b"), batch_of("c"), number=2, parts=2, write="again")
        assert sorted(texts(one.drops, disk, drop) for drop in one.drops.waiting()) == [["a", "b", "c"], ["before"]]
        one.drops.sweep(1 << 62, {QUEUE})
        assert len(one.left()) == 2
    assert met == {(1, False), (2, False), (2, True)}


def test_a_drop_is_taken_out_at_one_stroke() -> None:
    files = SimulatedFiles()
    Outsider(files).publish(QUEUE, batch_of("a"), batch_of("b"), parts=2)

    def remove(disk: SimulatedFiles) -> None:
        drops = Drops(disk, ROOT)
        drops.done(only(drops))

    met = set()
    for disk, done in ended_in(files, remove):
        one = Outsider(disk)
        found = [texts(one.drops, disk, drop) for drop in one.drops.waiting()]
        assert found in ([], [["a", "b"]])
        assert not (found and done)
        met.add(len(found))
        one.drops.sweep(0, {QUEUE})
        assert one.left() == [drop.file for drop in one.drops.waiting()]
    assert met == {0, 1}


def test_an_errand_is_there_or_not() -> None:
    files = SimulatedFiles()
    Drops(files, ROOT).errand(QUEUE, "e", b"old word")
    for disk, done in ended_in(files, lambda disk: Drops(disk, ROOT).errand(QUEUE, "e", b"new word")):
        drops = Drops(disk, ROOT)
        body = drops.body(only(drops))
        assert body == b"new word" or (body == b"old word" and not done)


def test_a_name_that_may_not_stay_is_said_so() -> None:
    """The rename was done, so it is no failure; whether it lasts nobody knows."""

    class Forgetful(SimulatedFiles):
        def sync_directory(self, path: str) -> None:
            if path.endswith("/inbox") and any(name.endswith(".drop") for name in self.list(path)):
                raise OSError(errno.EIO, "Input/output error", path)
            super().sync_directory(path)

    one = Outsider(Forgetful())
    with pytest.raises(OutcomeUnknown, match="look whether its items come"):
        one.publish(QUEUE, batch_of("a"))
    assert texts(one.drops, one.files, only(one.drops)) == ["a"]


# -- removing ------------------------------------------------------------------------------------------


def test_a_drop_comes_again_whose_removal_failed_half_way(one: Outsider) -> None:
    one.publish(QUEUE, batch_of("a"))
    drop = only(one.drops)
    one.files.rename(f"{one.root}/inbox/{drop.file}", f"{one.root}/inbox/{drop.file}.gone")
    one.publish(QUEUE, batch_of("a"))
    one.drops.done(drop)
    assert one.left() == []


def test_what_was_left_behind_is_swept_away(one: Outsider) -> None:
    one.stage(QUEUE, [[batch_of("a")]], write_name(999))
    young, _ = one.stage(QUEUE, [[batch_of("b")]], write_name(1000))
    unnamed, _ = one.stage(QUEUE, [[batch_of("c")]], "by-hand")
    one.publish(QUEUE, batch_of("d"))
    one.drops.errand(QUEUE, "e", b"")
    one.drops.say(QUEUE, "known", b"")
    one.drops.say(OTHER, "of a queue that is no more".replace(" ", "-"), b"")
    one.drops.sweep(1000, {QUEUE})
    assert one.left() == sorted([f"{young}.staged", f"{unnamed}.staged", *(each.file for each in one.drops.waiting())])
    assert len(one.drops.waiting()) == 2
    assert one.answers() == [f"{QUEUE:016x}-known"]
    one.drops.sweep(1000, {QUEUE})


def test_an_inbox_that_is_not_there_is_empty(one: Outsider) -> None:
    assert one.drops.waiting() == []
    assert one.drops.said(QUEUE, "") == []
    assert one.drops.answer(QUEUE, "x") is None
    one.drops.forget(QUEUE, "x")
    one.drops.withdraw(QUEUE, "x")
    one.drops.sweep(1 << 62, ())


# -- errands and answers -------------------------------------------------------------------------------


def test_errands_come_before_drops_and_are_replaced(one: Outsider) -> None:
    one.publish(QUEUE, batch_of("a"))
    one.drops.errand(QUEUE, "zz", b"1")
    one.drops.errand(QUEUE, "zz", b"2")
    one.drops.errand(OTHER, "aa", b"3")
    assert [(each.is_errand, each.incarnation, each.name) for each in one.drops.waiting()][:2] == [(True, QUEUE, "zz"), (True, OTHER, "aa")]
    assert one.drops.body(one.drops.waiting()[0]) == b"2"
    one.drops.withdraw(QUEUE, "zz")
    assert [each.name for each in one.drops.waiting() if each.is_errand] == ["aa"]


def test_an_errand_taken_back_says_nothing(one: Outsider) -> None:
    one.drops.errand(QUEUE, "e", b"1")
    errand = only(one.drops)
    one.drops.withdraw(QUEUE, "e")
    assert one.drops.body(errand) is None
    one.drops.done(errand)


def test_answers_are_read_by_name_and_forgotten(one: Outsider) -> None:
    one.drops.say(QUEUE, "grant.s.1", b"first")
    one.drops.say(QUEUE, "grant.s.1", b"again")
    one.drops.say(QUEUE, "grant.t.1", b"")
    one.drops.say(OTHER, "grant.s.1", b"")
    assert one.drops.answer(QUEUE, "grant.s.1") == b"again"
    assert one.drops.said(QUEUE, "grant.s.") == ["grant.s.1"]
    one.drops.forget(QUEUE, "grant.s.1")
    assert one.drops.answer(QUEUE, "grant.s.1") is None
    assert one.drops.said(QUEUE, "grant.") == ["grant.t.1"]


@pytest.mark.parametrize("name", ["nonsense", "x-y.drop", "0a.drop", "-x.errand", "000000000000000a-x.errand.tmp", "LOCK"])
def test_what_is_not_ours_is_passed_over(one: Outsider, name: str) -> None:
    one.files.make_directory(f"{one.root}/inbox")
    one.files.close(one.files.open(f"{one.root}/inbox/{name}", "append"))
    assert one.drops.waiting() == []
    one.drops.sweep(1 << 62, ())
    assert one.left() == [name]


# -- a manifest that is not right ------------------------------------------------------------------------


def test_a_manifest_cut_anywhere_or_with_a_flipped_bit_is_not_taken_for_another() -> None:
    files = SimulatedFiles()
    one = Outsider(files)
    one.publish(QUEUE, batch_of("a", "b"), batch_of("c"), parts=2)
    drop = only(one.drops)
    path = f"{ROOT}/inbox/{drop.file}/{MANIFEST}"
    good, whole = files.content(path), one.drops.manifest(drop)
    for size in range(len(good)):
        files.plant(path, good[:size])
        with pytest.raises(CorruptLog, match="cannot be read"):
            one.drops.manifest(drop)
    for bit in range(8 * len(good)):
        files.plant(path, good)
        files.flip(path, bit)
        try:
            found = one.drops.manifest(drop)
        except CorruptLog:
            continue
        assert (found.source, found.number) == (whole.source, whole.number)  # what is left shows when the parts are read


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "another"},
        {"number": 2},
        {"number": 0},
        {"number": 1 << 63},
        {"source": ""},
        {"version": 2},
        {"parts": [["p", 1]]},
        {"parts": [{"name": "p", "frames": 1, "items": 1}] * 2},
        {"parts": None},
    ],
    ids=str,
)
def test_a_manifest_that_is_not_that_of_its_drop_is_refused(changes: dict[str, object]) -> None:
    files = SimulatedFiles()
    one = Outsider(files)
    one.publish(QUEUE, batch_of("a"))
    drop = only(one.drops)
    path = f"{ROOT}/inbox/{drop.file}/{MANIFEST}"
    files.plant(path, msgspec.json.encode({**msgspec.json.decode(files.content(path)), **changes}))
    with pytest.raises(CorruptLog, match=r"write it again|newer Penstock"):
        one.drops.manifest(drop)


def test_a_part_is_looked_for_in_its_drop_alone(one: Outsider) -> None:
    one.publish(QUEUE, batch_of("a"))
    drop = only(one.drops)
    with pytest.raises(InvalidRequest, match="file name"):
        one.drops.part(drop, Part("../../penstock.json", 1, 1))
    with pytest.raises(CorruptLog, match="lacks its part"):
        one.drops.part(drop, Part("another.frames", 1, 1))


def test_a_target_that_appears_meanwhile_is_not_overwritten() -> None:
    """Between the look and the rename of one publisher another may have published the same."""

    class Late(SimulatedFiles):
        def exists(self, path: str) -> bool:
            return super().exists(path) and not path.endswith(".drop")

    one = Outsider(Late())
    one.publish(QUEUE, batch_of("first"))
    assert not one.publish(QUEUE, batch_of("second"))
    assert one.left() == [drop_file(QUEUE, "s", 1)]
    assert texts(one.drops, one.files, only(one.drops)) == ["first"]


def test_any_other_failure_of_the_rename_is_told() -> None:
    files = SimulatedFiles()
    one = Outsider(files)
    write, said = one.stage(QUEUE, [[batch_of("a")]])
    twin = files.copy()
    Outsider(twin).drops.publish(write, QUEUE, Manifest(said, "s", 1))
    rename = next(int(line.split()[0]) for line in twin.trace if " rename " in line)
    files.fail(rename, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        one.drops.publish(write, QUEUE, Manifest(said, "s", 1))
    assert one.drops.waiting() == []
    assert one.drops.publish(write, QUEUE, Manifest(said, "s", 1))
