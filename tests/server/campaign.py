"""A campaign over HTTP: processes are clients of a server, which is killed and frozen again and again.

Most of them connect through a proxy that loses requests and answers.
Owns: `ServerCampaign` and `run_server_campaign`. The processes, their journals and the checker are those of
tests/processes. To repeat one:
    python -m tests.server.campaign --seed 7 --kills 100 [--owner]
With --owner another process owns the directory, at first, and the server is its client; either is killed.
"""

import argparse
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from tests.processes.campaign import KINDS, TAKEOVER_SECONDS, Campaign, CampaignFailed, Slot, judge, report
from tests.server.lossy_proxy import LossyProxy
from tests.server.server_process import free_port, serve_command

SERVER, OWNER, JSON = "server", "owner", "json"
SERVING = (SERVER, OWNER)
LOCAL = "local-"
"""Begins the name of a role that uses the directory itself, beside the server."""
ROLES = ["producer", "both", "consumer", "units", "worker", "async", "operator", "reader", JSON]
FEW_ROLES = ["producer", "both", "worker", "async", "reader", JSON]
MIXED_ROLES = ["producer", "consumer", "worker", "async", "reader", JSON, "local-both", "local-operator"]


QUICK_KINDS = {"kill": 6, "kill two": 1, "end": 1}


class ServerCampaign(Campaign):
    """The driver of a server and its clients."""

    def __init__(self, folder: Path, seed: int, roles: list[str], *, owner: bool, quick: bool) -> None:
        self.port = free_port()
        self.proxy = LossyProxy(self.port, seed)
        self.kills = 0
        """How often the server was killed."""
        self.kinds = QUICK_KINDS if quick else KINDS
        super().__init__(folder, seed, [*([OWNER] if owner else []), SERVER, *roles])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url_of(self, slot: Slot) -> str:
        """What a client connects to: the proxy, or at every third slot the server itself."""
        return f"http://127.0.0.1:{self.proxy.port}" if slot.number % 3 else self.url

    def command(self, slot: Slot, journal: Path) -> list[str]:
        if slot.role == SERVER:
            return serve_command(self.directory, self.port)
        if slot.role == OWNER:
            return ["penstock.cli", "own", str(self.directory)]
        if slot.role == JSON:
            return ["tests.server.json_program", self.url_of(slot), str(journal), slot.role, str(self.seed)]
        target = str(self.directory) if slot.role.startswith(LOCAL) else self.url_of(slot)
        return ["tests.processes.program", target, str(journal), slot.role.removeprefix(LOCAL), str(self.seed)]

    def done(self) -> int:
        return self.kills

    def kill(self, slot: Slot) -> float:
        """Kill a process. Before the server is killed, the proxy often throws away the answers that it gives: clients
        then ask its successor for what was done already.
        """
        if slot.role != SERVER:
            return super().kill(slot)
        self.kills += 1
        self.proxy.swallows = self.rng.random() < 0.7
        if self.proxy.swallows:
            time.sleep(self.rng.choice([0.05, 0.2]))
        at = super().kill(slot)
        self.proxy.swallows = False
        return at

    def run(self, count: int) -> None:
        self.proxy.start()
        try:
            super().run(count)
        finally:
            self.proxy.stop()
        self.actions["cut connections"] = self.proxy.cut
        self.actions["lost answers"] = self.proxy.swallowed

    def victim(self) -> Slot:
        """The server, or at times the owner if that is another process."""
        owner = self.await_owner()
        return owner if self.rng.random() < 0.3 else self._await_server()

    def _await_server(self) -> Slot:
        """Wait until the server takes connections."""
        (slot,) = (slot for slot in self.slots if slot.role == SERVER)
        end = time.monotonic() + TAKEOVER_SECONDS
        while time.monotonic() < end:
            self.look_after()
            if self._takes_connections() and slot.process is not None:
                return slot
            time.sleep(0.01)
        raise CampaignFailed(f"the server takes no connections within {TAKEOVER_SECONDS:.0f} s: {self._last_words(slot)}")

    def _takes_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def may_start(self, slot: Slot) -> bool:
        """Clients wait for the server: on a busy machine it would be the last of many programs that start at once."""
        return slot.role in SERVING or slot.role.startswith(LOCAL) or self._takes_connections()

    def end(self) -> None:
        """End the clients, then the server."""
        self._await_server()
        self.end_together([slot for slot in self.slots if slot.role not in SERVING])
        self.end_together([slot for slot in self.slots if slot.role in SERVING])


def run_server_campaign(
    folder: Path, seed: int, kills: int, roles: list[str], *, owner: bool = False, quick: bool = False
) -> tuple[list[str], str]:
    """Run a campaign; as `judge`. quick: only such disturbances as take little time."""
    flags = f"{' --owner' if owner else ''}{' --quick' if quick else ''}"
    repeat = f"tests.server.campaign --seed {seed} --kills {kills} --roles {','.join(roles)}{flags}"
    campaign = ServerCampaign(folder, seed, roles, owner=owner, quick=quick)
    problems, done = judge(campaign, kills, repeat)
    return problems, f"{campaign.kills} kills of the server; {done}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--owner", action="store_true", help="the server is a client of another process, and either is killed")
    parser.add_argument("--quick", action="store_true", help="only such disturbances as take little time")
    parser.add_argument("--roles", default="", help="of the clients, with commas")
    parser.add_argument("--folder", type=Path, default=None, help="keep data and journals here")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="penstock-campaign-"))
    roles = given.roles.split(",") if given.roles else MIXED_ROLES if given.owner else ROLES
    problems, done = run_server_campaign(folder, given.seed, given.kills, roles, owner=given.owner, quick=given.quick)
    report(problems, done)
    if not problems and given.folder is None:
        shutil.rmtree(folder)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
