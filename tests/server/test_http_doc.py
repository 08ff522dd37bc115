"""docs/http.md: its examples run and answer what it says, and its tables are those of the code."""

import gzip
import http.client
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import penstock
from penstock.api.arguments import MAX_WAIT
from penstock.server import http_protocol
from penstock.server.arrow_streams import MAX_ROWS
from penstock.server.http_server import HttpServer
from penstock.server.json_api import ROUTES
from penstock.server.request_body import MAX_VALUES
from penstock.server.server_limits import ServerLimits
from penstock.words.clock import HOUR, MINUTE, SECOND
from penstock.words.errors import ERRORS_BY_CODE
from penstock.words.limits import (
    KIB,
    MAX_BATCH_BYTES,
    MAX_BATCH_ITEMS,
    MAX_HEADERS_BYTES,
    MAX_KEY_BYTES,
    MAX_LEASE_TIMEOUT,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    MIB,
    MIN_LEASE_TIMEOUT,
    MIN_RESULT_MEMORY,
)
from tests.server.conftest import serve

PAGE = (Path(__file__).parent.parent.parent / "docs" / "http.md").read_text("utf-8")
ADDRESS = "localhost:2319"
REST = "…"


class Example(NamedTuple):
    command: str
    reply: str


def examples() -> list[Example]:
    return [Example(*found) for found in re.findall(r"^```sh\n(.*?)```\n```json\n(.*?)```$", PAGE, re.DOTALL | re.MULTILINE)]


class Curl(NamedTuple):
    """What a curl command would send."""

    path: str
    body: bytes
    headers: dict[str, str]


def parse(command: str) -> Curl:
    """A curl command, perhaps behind `echo … | gzip |`. Fails for an option that it does not know."""
    words = shlex.split(command.replace("\\\n", " "))
    body, headers, path = b"", {}, ""
    if words[0] == "echo":
        assert words[2:5] == ["|", "gzip", "|"]
        body, words = gzip.compress(words[1].encode()), words[5:]
    rest = iter(words)
    assert next(rest) == "curl"
    for word in rest:
        if word == "--json":
            body, headers["content-type"] = next(rest).encode(), "application/json"
        elif word == "--data-binary":
            assert next(rest) == "@-"
        elif word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name.lower()] = value
        else:
            assert word.startswith(ADDRESS), word
            path = word.removeprefix(ADDRESS)
    return Curl(path, body, headers)


def differs(told: Any, real: Any, where: str = "") -> str:
    """Where a reply differs from the one in the page, in which … stands for any value, and for any that follow."""
    if told in (REST, real):
        return ""
    if isinstance(told, dict) and isinstance(real, dict):
        missing = [name for name in told if name != REST and name not in real]
        extra = [] if REST in told else [name for name in real if name not in told]
        inner = (differs(told[name], real[name], f"{where}.{name}") for name in told if name in real)
        return f"{where}: {missing} missing, {extra} extra" if missing or extra else next(filter(None, inner), "")
    if isinstance(told, list) and isinstance(real, list):
        shown = told[:-1] if told[-1:] == [REST] else told
        if len(shown) == len(real) or (shown is not told and len(real) > len(shown)):
            return next(filter(None, (differs(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(zip(shown, real, strict=False)))), "")
    return f"{where}: {told} is {real}"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with penstock.open("memory://") as broker, serve(broker.home) as running:
        yield running


def test_the_examples_answer_what_the_page_says(server: HttpServer) -> None:
    found = examples()
    assert len(found) == PAGE.count("```sh") == PAGE.count("```json")
    assert {f"{ADDRESS}{route.path}" for route in ROUTES} <= {word for example in found for word in example.command.split()}
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    token = ""
    for example in found:
        sent = parse(example.command.replace("TOKEN", token))
        connection.request("POST", sent.path, sent.body, sent.headers)
        response = connection.getresponse()
        real = json.loads(response.read())
        told = json.loads(example.reply)
        assert differs(told, real) == "", example.command
        assert (response.status == 200) == ("code" not in told)
        for item in real.get("items", ()) if sent.path == "/v1/queue.lease" else ():
            token = item["lease_token"]
    connection.close()
    (program,) = re.findall(r"^```python\n(.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
    ran = subprocess.run([sys.executable, "-c", program.replace(f"http://{ADDRESS}", server.url)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    produced, leased = ran.stdout.splitlines()
    assert len(json.loads(produced[2:-1])["items"]) == 2
    assert int(leased.split()[0]) >= 2


def test_the_reader_of_the_page_finds_differences() -> None:
    assert differs({"a": 1, REST: REST}, {"a": 1, "b": 2}) == ""
    assert differs({"a": [1, REST]}, {"a": [1, 2]}) == ""
    assert differs({"a": 1}, {"a": 2}) and differs({"a": 1}, {"a": 1, "b": 2}) and differs({"a": 1, REST: REST}, {"b": 2})
    assert differs([1], [1, 2]) and differs([1, REST], [2, 3]) and differs([1, 2, REST], [1])


def test_the_table_of_errors_is_that_of_the_code() -> None:
    told, of_connections = (_errors_in(part) for part in PAGE.split("These answers end the connection"))
    assert sorted(told) == sorted((str(kind.http_status), code) for code, kind in ERRORS_BY_CODE.items())
    assert told == sorted(told, key=lambda row: row[0])
    refusals = {(str(one.status), one.code) for one in vars(http_protocol).values() if isinstance(one, http_protocol.Refusal)}
    assert of_connections == sorted(refusals, key=lambda row: (row[0], row[1] != "head_too_slow"))


def _errors_in(text: str) -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (\d{3}) \| (`\w+`(?:, `\w+`)*) \| ", text, re.MULTILINE)
    return [(status, code.strip("`")) for status, codes in rows for code in codes.split(", ")]


def test_the_limits_are_those_of_the_code() -> None:
    (section,) = re.findall(r"^## Limits\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    told = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE))
    batch = f"{MAX_BATCH_ITEMS:,} ({MAX_BATCH_BYTES // MIB} MiB of payloads)"
    assert told["items in one request"] == f"{batch}; {MAX_ROWS:,} rows of an Arrow stream"
    assert told["a payload"] == f"{MAX_PAYLOAD_BYTES // MIB} MiB"
    assert told["a body, also decompressed"] == f"`limits.body_bytes` of the server: {ServerLimits().body_bytes // MIB} MiB"
    assert told["values in a JSON body"] == f"{MAX_VALUES:,}"
    names = "key, kind, encoding, reference, dedup id, request id, client id"
    assert told[names] == f"{MAX_NAME_BYTES:,} bytes" == f"{MAX_KEY_BYTES:,} bytes"
    assert told["headers of an item"] == f"{MAX_HEADERS_BYTES // KIB} KiB"
    assert told["`request_timeout`, `wait`"] == f"{MAX_WAIT // MINUTE} minutes"
    assert told["`lease_timeout`"] == f"{MIN_LEASE_TIMEOUT // SECOND} second to {MAX_LEASE_TIMEOUT // HOUR} hours"
    assert told["`limit`, `batch_size`"] == f"1 to {MAX_BATCH_ITEMS:,}"
    assert told["how long request ids are remembered"] == f"{MIN_RESULT_MEMORY // MINUTE} minutes, or two lease timeouts if that is longer"
