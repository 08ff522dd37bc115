"""The OpenAPI document, and whether the server obeys it: schemathesis sends what the document allows, and what it does
not allow, and checks the replies."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

import penstock
from penstock.server import openapi
from penstock.server.api_keys import KeyFile
from penstock.server.http_server import HttpServer
from penstock.server.json_api import ROUTES
from penstock.server.key_ring import KeyRing
from tests.server.conftest import serve

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = openapi.document()

# -- the document ------------------------------------------------------------------------------------


def test_the_document_is_served(server: HttpServer) -> None:
    with requests.get(f"{server.url}/openapi.json") as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        assert response.json() == DOCUMENT
    with requests.head(f"{server.url}/openapi.json") as head:
        assert (head.headers["content-length"], head.content) == (str(len(response.content)), b"")


def test_every_path_says_what_it_takes_gives_and_needs() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert set(DOCUMENT["paths"]) == {route.path for route in ROUTES}
    for path in DOCUMENT["paths"].values():
        assert path["post"]["summary"]
        assert re.search(r"An API key needs (any scope|the scope (look|read|produce|consume|admin))\.$", path["post"]["description"])
        assert {"200", "400", "401", "403", "406", "413", "415", "429", "503"} <= set(path["post"]["responses"])
    assert "needs the scope read." in DOCUMENT["paths"]["/v1/log.read"]["post"]["description"]
    assert "needs the scope admin." in DOCUMENT["paths"]["/v1/queue.redrive"]["post"]["description"]
    assert "410" in DOCUMENT["paths"]["/v1/queue.complete"]["post"]["responses"]
    assert "409" in DOCUMENT["paths"]["/v1/queues.create"]["post"]["responses"]


def test_fields_are_described_by_their_docstrings() -> None:
    shapes = DOCUMENT["components"]["schemas"]
    assert shapes["ProduceBody"]["properties"]["request_timeout"]["description"] == "How long to wait for room in a full queue."
    assert shapes["LeasedItem"]["properties"]["bytes"]["description"] == "The payload."  # a field of its base class
    assert shapes["ItemBody"]["additionalProperties"] is False


# -- the server obeys it -----------------------------------------------------------------------------


@contextmanager
def open_server() -> Iterator[tuple[HttpServer, str]]:
    """A server without keys, with a queue of the name that the document has as an example."""
    with penstock.open("memory://") as broker, serve(broker.home) as server:
        broker.create_queue("orders", partitions=2)
        yield server, ""


@contextmanager
def keyed_server(data: Path) -> Iterator[tuple[HttpServer, str]]:
    """A server with a key."""
    with penstock.open(data, durability="os") as broker:
        _, key = KeyFile(str(data)).create("tests", ["admin"], [])
        broker.create_queue("orders", partitions=2)
        with serve(broker.home, keys=KeyRing(str(data))) as server:
            yield server, key


def run_schemathesis(target: tuple[HttpServer, str], where: Path, *options: str, one_of: int = 1) -> str:
    """Run it with all checks but one, which tests/server/schemathesis_hooks.py does better; gives what it says.

    one_of: of the cases, every such one is sent.
    """
    server, key = target
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color", "--checks", "all"]
    command += ["--exclude-checks", "positive_data_acceptance", "--generation-database", "none", *options]
    if key:
        command += ["-H", f"Authorization: Bearer {key}"]
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    given = {**os.environ, "PYTHONPATH": paths, "SCHEMATHESIS_HOOKS": "tests.server.schemathesis_hooks", "PENSTOCK_ONE_OF": str(one_of)}
    ran = subprocess.run(command, cwd=where, env=given, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_server_obeys_the_document(tmp_path: Path) -> None:
    with keyed_server(tmp_path / "data") as target:
        said = run_schemathesis(target, tmp_path, "--phases", "coverage", one_of=8)
    assert f"Tested: {len(ROUTES)}" in said


@pytest.mark.long
@pytest.mark.parametrize("keyed", [False, True])
def test_the_server_obeys_the_document_for_long(keyed: bool, tmp_path: Path) -> None:
    with keyed_server(tmp_path / "data") if keyed else open_server() as target:
        run_schemathesis(target, tmp_path, "--max-examples", "60")
