"""Calls of a simulated disk that are interrupted, as by Ctrl-C."""

import random

import pytest

from penstock.testing.disk import SimulatedFiles

SEEDS = range(60)


def disk(seed: int) -> SimulatedFiles:
    files = SimulatedFiles(random.Random(seed))
    files.put_file("/d/old", b"old")
    return files


def test_an_interrupted_call_has_its_effect_or_not_and_later_calls_work() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        handle = files.open("/d/log", "append")
        files.fail(files.calls + 1, "interrupt")
        with pytest.raises(KeyboardInterrupt):
            files.write(handle, [b"012"])
        files.fail(files.calls + 1, "interrupt")
        with pytest.raises(KeyboardInterrupt):
            files.rename("/d/old", "/d/new")
        files.write(handle, [b"."])
        files.sync(handle)
        files.sync_directory("/d")
        files.crash()
        ends.add((files.content("/d/log"), *files.list("/d")))
    assert {written for written, *_ in ends} == {b".", b"0.", b"01.", b"012."}
    assert {tuple(names) for _, *names in ends} == {("log", "new"), ("log", "old")}


def test_an_interrupted_sync_loses_nothing() -> None:
    for seed in SEEDS:
        files = disk(seed)
        handle = files.open("/d/log", "append")
        files.sync_directory("/d")
        files.write(handle, [b"0123"])
        files.fail(files.calls + 1, "interrupt")
        with pytest.raises(KeyboardInterrupt):
            files.sync(handle)
        files.sync(handle)
        files.crash()
        assert files.content("/d/log") == b"0123"
