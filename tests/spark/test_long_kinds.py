"""The other kinds of Spark, each in a process of its own: a cluster of processes with executors killed, Connect, no
Java of the system."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from penstock.spark import java

PROGRAM = Path(__file__).parent / "round_trip.py"
DEADLINE = 600.0
RIGHT = {"written": 24_000, "read": [], "streamed": 24_000, "again": [], "lake": [24_000, 24_000]}

pytestmark = pytest.mark.long


def round_trip(kind: str, place: Path, **environment: str) -> dict[str, Any]:
    """The output of the program; its stderr if it fails."""
    for name in ("first", "cwd"):
        (place / name).mkdir()
    command = [sys.executable, str(PROGRAM), kind, str(place / "first")]
    ran = subprocess.run(command, cwd=place / "cwd", env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-8000:]}"
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


def test_a_cluster_whose_executors_are_killed_at_every_step(tmp_path: Path) -> None:
    told = round_trip("cluster", tmp_path, SPARK_HOME=str(Path(pyspark.__file__).parent))
    assert told.items() >= RIGHT.items()
    assert told["killed"] == ["killed-reading", "killed-streaming", "killed-writing"]


def test_spark_connect(tmp_path: Path) -> None:
    told = round_trip("connect", tmp_path, PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    assert told.items() >= RIGHT.items()
    assert told["kind"].startswith("pyspark.sql.connect")


def test_without_a_java_of_the_system(tmp_path: Path) -> None:
    told = round_trip("packaged", tmp_path, PATH=path_without_java(tmp_path / "bin"), JAVA_HOME="")
    assert told.items() >= RIGHT.items()
    packaged = java.packaged_java()
    assert packaged is not None and Path(told["java"]).resolve() == packaged.parent.parent.resolve()


def path_without_java(place: Path) -> str:
    """A PATH with everything on this one except Java, which is often in the same directory as the shell."""
    place.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*"):
            if program.name != "java" and not (place / program.name).is_symlink():
                (place / program.name).symlink_to(program)
    return str(place)
