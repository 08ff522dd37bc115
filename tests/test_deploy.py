"""The files of `deploy/` and the page about the server say what the code does."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from penstock.cli import reference
from penstock.cli.app import app
from penstock.cli.failures import EXIT_CODES
from penstock.server import server_settings
from penstock.server.open_files import RESERVED
from penstock.server.pages import LIVE_PATH
from penstock.server.server_settings import SECTIONS, SETTINGS, ServerSettings, load_settings

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "server.md").read_text("utf-8")
UNIT = ROOT / "deploy" / "systemd" / "penstock.service"
COMMANDS = dict(reference.commands(typer.main.get_command(app)))
GLOBAL = {option for one in typer.main.get_command(app).params for option in one.opts}
INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


def check_command(words: list[str]) -> str:
    """The command of a command line (without "penstock"). Fails if it, or one of its options, does not exist."""
    while words and words[0].startswith("-"):
        assert words[0] in GLOBAL, words
        words = words[2:]
    path = next((f"penstock {' '.join(words[:n])}" for n in (3, 2, 1) if f"penstock {' '.join(words[:n])}" in COMMANDS), "")
    assert path, f"there is no command {words}"
    known = {option for one in COMMANDS[path].params for option in (*one.opts, *one.secondary_opts)}
    for word in words:
        assert not word.startswith("-") or word.partition("=")[0] in known, f"{path} has no {word}"
    return path


# -- the container -----------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text("utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], " ".join(line.split(None, 1)[1].split())) for line in lines if line.strip()]


def of_kind(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def test_the_container_file_is_one() -> None:
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    build, final = of_kind("FROM")
    assert build == "python:${PYTHON_VERSION}-slim AS build" and final == "python:${PYTHON_VERSION}-slim"
    (user,) = of_kind("USER")
    assert user.split(":")[0].isdigit() and int(user.split(":")[0]) > 0
    for copied in of_kind("COPY"):
        if not copied.startswith("--from="):
            for source in copied.split()[:-1]:
                assert (ROOT / source).exists(), source
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (version,) = [rest.partition("=")[2] for rest in of_kind("ARG")]
    assert f"Programming Language :: Python :: {version}" in versions["classifiers"]


def test_the_container_installs_pinned_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (install,) = [run for run in of_kind("RUN") if "pip install" in run]
    assert "-c constraints.txt" in install
    (named,) = re.findall(r"'\.\[([\w,]+)\]'", install)
    assert set(named.split(",")) == {"cli", "server"} <= set(extras)


def test_the_container_starts_what_there_is() -> None:
    (entry,), (command,) = of_kind("ENTRYPOINT"), of_kind("CMD")
    assert json.loads(entry) == ["penstock"]
    assert check_command(json.loads(command)) == "penstock serve"
    environment = dict(word.split("=", 1) for word in shlex.split(of_kind("ENV")[0]))
    settings = load_settings({}, {name: value for name, value in environment.items() if name.startswith(server_settings.PREFIX)})
    (volume,), (port,) = of_kind("VOLUME"), of_kind("EXPOSE")
    assert settings.broker.create and settings.bind == (f"0.0.0.0:{port}",)
    assert [environment["PENSTOCK_BROKER"]] == json.loads(volume)
    (check,) = of_kind("HEALTHCHECK")
    program, flag, code = json.loads(check.partition("CMD ")[2])
    compile(code, "healthcheck", "exec")
    assert (program, flag) == ("python", "-c") and f"http://127.0.0.1:{port}{LIVE_PATH}'" in code


# -- the service -------------------------------------------------------------------------------------


def unit() -> configparser.SectionProxy:
    found = configparser.ConfigParser(interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(UNIT)
    assert found.sections() == ["Unit", "Service", "Install"]
    return found["Service"]


def test_the_service_starts_what_there_is() -> None:
    service = unit()
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/penstock")
    assert check_command(words) == "penstock serve"
    assert words[1] == f"/var/lib/{service['StateDirectory']}"
    assert words[words.index("--config") + 1].startswith(f"/etc/{service['ConfigurationDirectory']}/")
    assert service["Type"] == "notify" and "-HUP" in service["ExecReload"]


def test_the_service_gives_what_the_server_needs_and_no_more() -> None:
    service, defaults = unit(), ServerSettings()
    assert int(service["LimitNOFILE"]) >= defaults.limits.connections + RESERVED
    assert int(service["TimeoutStopSec"]) > defaults.drain_seconds
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} <= set(EXIT_CODES)
    assert service["ProtectSystem"] == "strict" and service["CapabilityBoundingSet"] == "" and service["User"] != "root"


def test_systemd_understands_the_service(tmp_path: Path) -> None:
    """Where systemd is not installed, the tests above are all that is checked."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/penstock/bin/penstock", sys.executable))
    ran = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert [line for line in (ran.stdout + ran.stderr).splitlines() if UNIT.stem in line] == []


# -- the page ----------------------------------------------------------------------------------------


def table_of_settings() -> Iterator[tuple[str, str]]:
    for name, default in re.findall(r"^\| `([a-z_.]+)` \| (?:`([^`]*)`)? ?\| ", PAGE, re.MULTILINE):
        if name in SETTINGS or name.partition(".")[0] in (*SECTIONS, *ServerSettings.__struct_fields__):
            yield name, default


def test_the_table_of_settings_is_that_of_the_code() -> None:
    told = dict(table_of_settings())
    assert [*told] == [*SETTINGS]
    for name, default in told.items():
        given = load_settings({name: ("the table", default)}) if default else load_settings()
        assert given == ServerSettings(), name


def test_flags_in_the_table_exist() -> None:
    known = {option for one in COMMANDS["penstock serve"].params for option in one.opts}
    told = re.findall(r"[Ff]lag `(--[a-z-]+)`", PAGE)
    assert len(told) > 8
    assert set(told) <= known


def test_the_file_in_the_page_is_right(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "penstock.toml").write_text(text)
    found = load_settings(config=str(tmp_path / "penstock.toml"))
    assert [queue.name for queue in found.queues] == ["orders", "orders.dead"]


def test_the_proxy_in_the_page_waits_long_enough() -> None:
    limits = ServerSettings().limits
    (read_timeout,) = re.findall(r"proxy_read_timeout (\d+)s;", PAGE)
    (keepalive,) = re.findall(r"keepalive_timeout (\d+)s;", PAGE)
    (body,) = re.findall(r"client_max_body_size (\d+)m;", PAGE)
    assert int(read_timeout) > limits.request_seconds and int(keepalive) < limits.idle_seconds
    assert int(body) << 20 == limits.body_bytes


def test_exit_codes_of_the_page_exist() -> None:
    section = PAGE.partition("| exit code | meaning |")[2].partition("## ")[0]
    told = [int(code) for code in re.findall(r"^\| (\d+) \| ", section, re.MULTILINE)]
    assert len(told) > 5
    assert set(told) <= set(EXIT_CODES)


@pytest.mark.parametrize("line", re.findall(r"^    (?:podman run .* )?(penstock (?!build).*)$", PAGE, re.MULTILINE))
def test_commands_of_the_page_exist(line: str) -> None:
    words = shlex.split(line)[1:]
    if words:
        check_command(words)
