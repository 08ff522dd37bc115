"""One of the processes of a campaign, as a client in any language would be: it posts JSON over plain connections.

    python -m tests.server.json_program URL JOURNAL ROLE SEED

Owns: the role "json". It has no sessions. A request without an id that gets no answer is not repeated: its outcome is
unknown. One with an id is repeated until its time is over.
"""

import http.client
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock import NewItem
from penstock.errors import OutcomeUnknown, PenstockError, QueueBusy
from penstock.words.errors import Refused
from tests.processes import program
from tests.processes.journal import Facts, Failed
from tests.processes.program import (
    CALL_SECONDS,
    LEASE_GRACE_SECONDS,
    LEASE_SECONDS,
    SECOND,
    WORK,
    Process,
    follow_up,
    lease_facts,
    new_item,
    run_threads,
)

PAUSE_SECONDS = 0.1
GRACE_SECONDS = 2.0
"""How much longer than the request's own timeout the client waits."""


class JsonClient:
    """One connection, opened again after each failure."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._connection: http.client.HTTPConnection | None = None

    def post(self, verb: str, seconds: float, **fields: Any) -> Facts:
        """The body of the reply; raises its error, or OutcomeUnknown. seconds: how long to wait for it."""
        end = time.monotonic() + seconds
        fields = {name: value for name, value in fields.items() if value is not None}
        may_be_done = False
        while True:
            left = end - time.monotonic()
            try:
                return self._post_once(verb, max(0.05, left), fields)
            except ConnectionRefusedError as error:  # it was not sent
                if left > PAUSE_SECONDS:
                    time.sleep(PAUSE_SECONDS)
                elif not may_be_done:
                    raise QueueBusy(f"the server takes no connections ({error})") from error
                else:
                    raise OutcomeUnknown(f"{verb} was sent and got no answer ({error})") from error
            except (OSError, http.client.HTTPException) as error:
                self.close()
                may_be_done = True
                if "request_id" not in fields or left <= PAUSE_SECONDS:
                    raise OutcomeUnknown(f"{verb} got no answer ({type(error).__name__}: {error})") from error
                time.sleep(PAUSE_SECONDS)

    def _post_once(self, verb: str, seconds: float, fields: Facts) -> Facts:
        if self._connection is None:
            connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=seconds)
            connection.connect()
            self._connection = connection
        assert self._connection.sock is not None
        self._connection.sock.settimeout(seconds)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/v1/{verb}", json.dumps(fields), headers)
        response = self._connection.getresponse()
        reply: Facts = json.loads(response.read())
        if response.will_close:
            self.close()
        if response.status != 200:
            raise _failed(reply)
        return reply

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _failed(reply: Facts) -> PenstockError:
    error = Refused(reply["code"], reply["message"]).error()
    if reply.get("items"):
        error.results = [Refused(**item["error"]).error() if item.get("error") else item["id"] for item in reply["items"]]
    return error


def item_body(item: NewItem) -> Facts:
    """An item as JSON."""
    assert isinstance(item.payload, str)
    found = {"utf8": item.payload, "key": item.key, "priority": item.priority, "dedup_id": item.dedup}
    if item.at is not None:
        found["enqueue_at"] = item.at.isoformat()
    return {name: value for name, value in found.items() if value is not None}


def request_name(rng: random.Random, share: float) -> str | None:
    return f"request-{rng.randrange(1 << 60)}" if rng.random() < share else None


class JsonProducer:
    """Produces one item or several at a time."""

    def __init__(self, process: Process, queue: str) -> None:
        self.process, self.queue = process, queue
        self.client = JsonClient(process.target)

    def act(self, rng: random.Random) -> None:
        timeout, request = rng.choice([1.0, 1.0, 2.0, 10.0]), request_name(rng, 0.6)
        made = [new_item(self.process, rng) for _ in range(1 if rng.random() < 0.6 else rng.randrange(2, 12))]
        facts: Facts = {"queue": self.queue, "items": [facts for _, facts in made], "request": request}
        items = [item_body(item) for item, _ in made]
        for _ in range(1 if request is None or rng.random() < 0.7 else 2):  # the second time adds nothing
            with self.process.journal.call("produce", timeout + GRACE_SECONDS, **facts) as outcome:
                outcome.answer = self._produce(items, timeout, request)

    def _produce(self, items: Sequence[Facts], timeout: float, request: str | None) -> list[str]:
        fields = {"queue_name": self.queue, "items": items, "request_timeout": f"{timeout}s", "request_id": request}
        reply = self.client.post("queue.produce", timeout + GRACE_SECONDS, **fields)
        errors = [Refused(**item["error"]).error() for item in reply["items"] if item.get("error")]
        if errors:
            errors[0].results = _failed({"code": errors[0].code, "message": "", "items": reply["items"]}).results
            raise errors[0]
        return [item["id"] for item in reply["items"]]


class JsonConsumer:
    """Leases items, and settles them in every way by their tokens."""

    def __init__(self, process: Process, queue: str) -> None:
        self.process, self.queue = process, queue
        self.client = JsonClient(process.target)

    def act(self, rng: random.Random) -> None:
        count, wait, timeout = rng.choice([1, 1, 3, 10]), rng.choice([0.0, 0.3, 1.0]), rng.choice([1.0, LEASE_SECONDS])
        fields = {"queue_name": self.queue, "batch_size": count, "client_id": self.process.name, "request_id": request_name(rng, 0.5)}
        seconds = wait + LEASE_GRACE_SECONDS
        with self.process.journal.call("lease", seconds, **lease_facts(self.queue, count, 1, timeout)) as outcome:
            reply = self.client.post("queue.lease", seconds, request_timeout=f"{wait}s", lease_timeout=f"{timeout}s", **fields)
            items: list[Facts] = reply["items"]
            outcome.answer = [
                {"payload": item["utf8"], "id": item["id"], "key": item.get("key"), "attempts": item["attempts"]} for item in items
            ]
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.01, 0.05, 0.3]))  # work on them
        if len(items) > 1 and rng.random() < 0.3:
            self._settle(rng, outcome.number, items, "complete")
            return
        for item in items:
            self._settle_one(rng, outcome.number, item, timeout)

    def _settle_one(self, rng: random.Random, number: int, item: Facts, timeout: float) -> None:
        chance, journal = rng.random(), self.process.journal
        try:
            if chance < 0.05:
                facts = {"lease": number, "payload": item["utf8"], "lease_timeout": timeout}
                with journal.call("extend", CALL_SECONDS, **facts):
                    fields = {"queue_name": self.queue, "lease_tokens": [item["lease_token"]], "lease_timeout": f"{timeout}s"}
                    self.client.post("queue.extend", CALL_SECONDS, **fields)
            if chance < 0.03:
                return  # forget it: its lease ends by itself
            action = "retry" if chance < 0.18 else "bury" if chance < 0.22 else "complete"
            self._settle(rng, number, [item], action, follow=rng.random() < 0.1)
        except Failed:
            pass

    def _settle(self, rng: random.Random, number: int, items: Sequence[Facts], action: str, *, follow: bool = False) -> None:
        tokens = [item["lease_token"] for item in items]
        fields: Facts = {"queue_name": self.queue, "request_id": request_name(rng, 0.6)}
        then: list[Facts] = []
        if action == "retry":
            delay = rng.choice([0.0, 0.0, 0.1, 0.5])
            fields |= {"items": [{"lease_token": token} for token in tokens], "delay": f"{delay}s", "reason": "a try"}
        else:
            fields["lease_tokens"] = tokens
        if action == "complete" and follow:
            made, facts = follow_up(self.process, rng)
            then = [facts]
            fields["then"] = [{"queue_name": facts["queue"], "items": [item_body(made)]}]
        about: Facts = {"lease": number, "action": action, "payloads": [item["utf8"] for item in items], "then": then}
        with self.process.journal.call("settle", CALL_SECONDS, **about) as outcome:
            try:
                results = self.client.post(f"queue.{action}", CALL_SECONDS, **fields)["items"]
            except PenstockError as error:
                outcome.answer = [
                    _state(action, one if isinstance(one, PenstockError) else error) for one in error.results or [error] * len(items)
                ]
                raise
            errors = [Refused(**one["error"]).error() if one.get("error") else None for one in results]
            outcome.answer = [_state(action, error) for error in errors]
            for found in errors:
                if found is not None:
                    raise found


def _state(action: str, error: PenstockError | None) -> str:
    """What became of an item, as the checker calls it."""
    if error is None:
        return {"complete": "completed", "retry": "retried", "bury": "buried"}[action]
    return "lost" if error.code == "lease_lost" else "unknown"


def run_json(process: Process) -> None:
    acts = [(JsonProducer(process, WORK).act, 0.06), (JsonConsumer(process, WORK).act, 0.01), (JsonConsumer(process, SECOND).act, 0.05)]
    run_threads(process, acts)


if __name__ == "__main__":
    program.ROLES["json"] = run_json
    program.main(*sys.argv[1:])
