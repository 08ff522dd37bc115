"""The inbox: how those who do not own a broker's directory hand something to whoever does.

Owns: `Drops`, the folders `inbox/` and `answers/` of a broker's first root. Everything in the inbox is whole or not there: it is made
under another name, synced, and renamed.
    <write>.staged/                          a write under way: its tasks' parts
    <incarnation>-<name>.drop/               a published write: parts and a manifest, to be adopted
    <incarnation>-<name>.errand              a question or a word for the owner; its answer is answers/<incarnation>-<name>
    <incarnation>-<name>.done                an errand that is done, or one that came in its place just then and is to be done, too
    <anything>.gone/                         adopted or given up, being removed
A drop is named by its source and number, so that the same one cannot be in the inbox twice. That one which was adopted before is not
adopted again, and which comes first, is the owner's business (broker/adopting.py).
Errors are the system's; callers say what they were about.
"""

import errno
import os
from collections.abc import Container
from typing import Annotated, NamedTuple

import msgspec

from penstock.logs.files.marker import ANSWERS, INBOX
from penstock.logs.files.system import Files
from penstock.logs.files.writing import TEMPORARY, keep_names, read_file, replace_file, write_file
from penstock.rules.routing import digest
from penstock.words.errors import CorruptLog, InvalidRequest, OutcomeUnknown

STAGED, DROP, ERRAND, DONE, GONE = ".staged", ".drop", ".errand", ".done", ".gone"
MANIFEST = "drop.json"
KEPT_SWEEPS = 30
"""So many sweeps (days) a grant is kept that nothing has become of: its stream may come back."""
VERSION = 1
_IN_A_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class Part(msgspec.Struct, frozen=True):
    """A file of whole frames."""

    name: str
    frames: int
    items: int


class Manifest(msgspec.Struct, frozen=True):
    """What a drop holds, and what it is known by: of one source each number is adopted once, and none below one adopted before."""

    parts: list[Part]
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]
    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
    version: int = VERSION
    began: int = 0
    """When the write began, by the calendar (0: not known): what wrote earlier is adopted earlier, as far as can be told."""
    once: bool = False
    """The source is this very write: nothing comes of it again."""


class Waiting(NamedTuple):
    """Something in the inbox for the owner."""

    incarnation: int
    name: str
    file: str
    is_errand: bool


class Drops:
    """The inbox of one broker."""

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._inbox = f"{root}/{INBOX}"
        self._answers = f"{root}/{ANSWERS}"
        self._seen: dict[str, int] = {}
        """For the owner: what may have been left behind, and how many sweeps ago it was first seen."""

    # -- for those who do not own it -----------------------------------------------------------------

    def begin(self, write: str) -> str:
        """Make the folder of a write, to be filled by its tasks, and give its path. Fine when it is there."""
        path = self._staged(write)
        self._files.make_directory(path)
        keep_names(self._files, path)
        return path

    def publish(self, write: str, incarnation: int, manifest: Manifest) -> bool:
        """Hand a write over, all of it at once. False when the same one is in the inbox already: then this one is removed."""
        body = msgspec.json.encode(msgspec.structs.replace(manifest, began=_started(write), once=manifest.source == write))
        try:
            msgspec.json.decode(body, type=Manifest)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"this cannot be published ({error}); give each write a source, and a number from 1 on") from error
        path = self.begin(write)
        write_file(self._files, f"{path}/{MANIFEST}", body)
        self._files.sync_directory(path)
        target = f"{self._inbox}/{drop_file(incarnation, manifest.source, manifest.number)}"
        try:
            if self._files.exists(target):
                raise FileExistsError(errno.EEXIST, "it is there", target)
            self._files.rename(path, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            self.abandon(write)
            return False
        try:
            self._files.sync_directory(self._inbox)
        except OSError as error:
            raise OutcomeUnknown(
                f"the write is in the inbox, but the disk does not say that it stays there ({error}); "
                "look whether its items come before you write them again"
            ) from error
        return True

    def abandon(self, write: str) -> None:
        """Remove a write that is not to be."""
        if self._files.exists(self._staged(write)):
            self._discard(f"{write}{STAGED}")

    def pending(self, incarnation: int, source: str, number: int) -> bool:
        """Whether a drop was published and is not adopted yet."""
        return self._files.exists(f"{self._inbox}/{drop_file(incarnation, source, number)}")

    def errand(self, incarnation: int, name: str, body: bytes) -> None:
        """Put a word for the owner; one of the same name is replaced."""
        self._make(self._inbox)
        replace_file(self._files, self._inbox, f"{_owned(incarnation, name)}{ERRAND}", body)

    def withdraw(self, incarnation: int, name: str) -> None:
        """Take an errand back, if the owner has not done it yet."""
        for ending in (ERRAND, DONE):
            self._remove(f"{self._inbox}/{_owned(incarnation, name)}{ending}")

    def answer(self, incarnation: int, name: str) -> bytes | None:
        """What the owner said, if it has."""
        return read_file(self._files, f"{self._answers}/{_owned(incarnation, name)}")

    def forget(self, incarnation: int, name: str) -> None:
        """An answer has been read."""
        self._remove(f"{self._answers}/{_owned(incarnation, name)}")

    # -- for the owner -------------------------------------------------------------------------------

    def waiting(self) -> list[Waiting]:
        """Everything there is to do; errands before drops."""
        if not self._files.exists(self._inbox):
            return []
        found = [one for one in map(_parse, self._files.list(self._inbox)) if one is not None]
        return sorted(found, key=lambda one: not one.is_errand)

    def manifest(self, drop: Waiting) -> Manifest:
        """What a drop says of itself; CorruptLog when that is not as it was published."""
        raw = read_file(self._files, f"{self._inbox}/{drop.file}/{MANIFEST}")
        try:
            found = msgspec.json.decode(raw or b"", type=Manifest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptLog(f"the manifest of the drop {drop.file} cannot be read ({error}); move it away and write it again") from error
        if found.version > VERSION:
            raise CorruptLog(f"the drop {drop.file} has version {found.version}, this Penstock knows {VERSION}; use a newer Penstock")
        unique = len({part.name for part in found.parts}) == len(found.parts)
        if drop_file(drop.incarnation, found.source, found.number) != drop.file or not unique:
            raise CorruptLog(f"the drop {drop.file} has a manifest that is not its own; move it away and write it again")
        return found

    def part(self, drop: Waiting, part: Part) -> str:
        """The path of a part; CorruptLog when it is not there."""
        path = f"{self._inbox}/{drop.file}/{_checked(part.name)}"
        if not self._files.exists(path):
            raise CorruptLog(f"the drop {drop.file} lacks its part {part.name}; move it away and write it again")
        return path

    def body(self, errand: Waiting) -> bytes | None:
        """What an errand says; None when it was taken back."""
        return read_file(self._files, f"{self._inbox}/{errand.file}")

    def say(self, incarnation: int, name: str, body: bytes) -> None:
        """Put an answer, or anything else that those who ask may read by its name."""
        self._make(self._answers)
        replace_file(self._files, self._answers, _owned(incarnation, name), body)

    def said(self, incarnation: int, prefix: str) -> list[str]:
        """The names of answers that begin so."""
        if not self._files.exists(self._answers):
            return []
        start = _owned(incarnation, "")
        names = [name.removeprefix(start) for name in self._files.list(self._answers) if name.startswith(start)]
        return [name for name in names if name.startswith(prefix) and not name.endswith(TEMPORARY)]

    def done(self, one: Waiting, body: bytes | None = None) -> None:
        """It is adopted or answered: take it out of the inbox, at one stroke. An errand only if this is what it says: another may have
        been put in its place, and waits on."""
        if not one.is_errand:
            self._discard(one.file)
            return
        path = aside = f"{self._inbox}/{one.file}"
        if path.endswith(ERRAND):
            aside = path.removesuffix(ERRAND) + DONE
            if not self._files.exists(path):  # taken back
                return
            self._files.rename(path, aside)
        if body is None or read_file(self._files, aside) == body:
            self._remove(aside)

    def sweep(self, started_before: int, queues: Container[int]) -> None:
        """Remove what was being removed; writes that began before a wall time and never came to an end (see `write_name`); answers about
        queues that are no more; and what was there already at the sweep before: errands half written, answers that nobody has read."""
        seen: set[str] = set()
        if self._files.exists(self._inbox):
            for name in self._files.list(self._inbox):
                stale = name.endswith(STAGED) and 0 < _started(name) < started_before
                if stale or name.endswith(GONE):
                    self._discard(name)
                elif name.endswith(TEMPORARY):
                    seen.add(f"{self._inbox}/{name}")
        if self._files.exists(self._answers):
            for name in self._files.list(self._answers):
                if _started(name) not in queues:
                    self._remove(f"{self._answers}/{name}")
                else:
                    seen.add(f"{self._answers}/{name}")
        kept_for = {path: KEPT_SWEEPS if "-grant." in path and not path.endswith(TEMPORARY) else 1 for path in seen}
        self._seen = {path: self._seen.get(path, -1) + 1 for path in seen}
        for path in [path for path, sweeps in self._seen.items() if sweeps >= kept_for[path]]:
            self._remove(path)
            del self._seen[path]

    # -- steps ---------------------------------------------------------------------------------------

    def _staged(self, write: str) -> str:
        return f"{self._inbox}/{_checked(write)}{STAGED}"

    def _make(self, folder: str) -> None:
        """A folder that lasts as what is put into it does."""
        if not self._files.exists(folder):
            self._files.make_directory(folder)
            keep_names(self._files, folder)

    def _discard(self, name: str) -> None:
        """Rename first: a folder that is half removed is none of those that anybody looks at."""
        gone = name if name.endswith(GONE) else f"{name}{GONE}"
        if gone != name:
            if self._files.exists(f"{self._inbox}/{gone}"):  # of an earlier one of this name, whose removal was cut off
                self._discard(gone)
            self._files.rename(f"{self._inbox}/{name}", f"{self._inbox}/{gone}")
            self._files.sync_directory(self._inbox)
        for file in self._files.list(f"{self._inbox}/{gone}"):
            self._remove(f"{self._inbox}/{gone}/{file}")
        self._files.remove_directory(f"{self._inbox}/{gone}")

    def _remove(self, path: str) -> None:
        if self._files.exists(path):
            self._files.remove(path)

    def __repr__(self) -> str:
        return f"Drops({self._inbox!r})"


def write_name(wall: int) -> str:
    """A name for a write: when it began, and something random."""
    return f"{wall:016x}-{os.urandom(8).hex()}"


def drop_file(incarnation: int, source: str, number: int) -> str:
    """Where a drop lies."""
    return f"{_owned(incarnation, digest(b'drop', source.encode(), str(number).encode()).hex())}{DROP}"


def _started(name: str) -> int:
    """The number that a name begins with: when its write began, or the incarnation that it is about."""
    try:
        return int(name.partition("-")[0], 16)
    except ValueError:
        return 0


def _owned(incarnation: int, name: str) -> str:
    return f"{incarnation:016x}-{_checked(name)}"


def _checked(name: str) -> str:
    if not _IN_A_NAME.issuperset(name) or len(name) > 150:
        raise InvalidRequest(f"{name!r:.200} cannot be part of a file name; use up to 150 letters, digits, '.', '_' and '-'")
    return name


def _parse(file: str) -> Waiting | None:
    for ending in (DROP, ERRAND, DONE):
        incarnation, dash, name = file.removesuffix(ending).partition("-")
        if file.endswith(ending) and dash:
            try:
                return Waiting(int(incarnation, 16), name, file, ending != DROP)
            except ValueError:
                return None
    return None
