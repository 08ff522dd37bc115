"""A forked child uses what its parent opened through a connection of its own, and its parent goes on undisturbed.

Also multiprocessing, which forks or starts processes, and pickled queues.
"""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import BrokerClosed, InvalidRequest
from tests.broker.owner_process import BrokerProcess
from tests.processes import forking_programs as programs
from tests.processes.forking_programs import run
from tests.server.conftest import serve


@pytest.fixture(params=["owner", "client", "http"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A directory that the forking process will own, or that another process owns; or the address of a server."""
    path = str(tmp_path / "data")
    if request.param == "owner":
        yield path
    elif request.param == "http":
        with penstock.open(path) as broker, serve(broker.home) as server:
            yield server.url
    else:
        with BrokerProcess(path):
            yield path


# -- what a child inherits -------------------------------------------------------------------------------


def test_a_child_uses_what_it_inherits_but_not_its_parents_leases(directory: str) -> None:
    found = run(programs.inherit, directory)
    child = found["child"]
    held = "LeaseLost: the lease of item {} is held by the process that this one was forked from"
    for name in ("complete", "extend", "block"):
        assert child[name].startswith(held.format("0-0")), name
    for name in ("complete all", "queue"):
        assert child[name].startswith("LeaseLost: the lease of items 0-0, 0-1 is held by the process"), name
    assert child["descriptors"] == [], "of the parent's"
    assert child["produce"] == "produced"
    assert child["token"] is None, "a token says which lease is meant, and any process can settle it"
    assert (found["first"], child["cursor"], found["cursor"]) == (["0", "1", "2"], ["3", "4", "5"], ["3", "4", "5"])
    assert child["own lease"] is None
    assert child["owner"] is False
    assert child["again"] is None
    assert child["closed"].startswith("BrokerClosed")
    assert found["grandchild"] == ["produced", "produced"]
    assert found["completed"] == 3
    assert found["values"] == ["0", "1", "2", "3", "4", "5", "child", "child", "grandchild"]


def test_an_async_broker_is_inherited_too(directory: str) -> None:
    found = run(programs.inherit_async, directory)
    produced, refused = found["child"]
    assert produced == "0-1"
    assert refused.startswith("the lease of item 0-0 is held by the process that this one was forked from")
    assert found["completed"] == 1


def test_a_read_only_broker_is_inherited_too(tmp_path: Path) -> None:
    assert run(programs.inherit_read_only, tmp_path / "data") == {"children": [[1, ["x"]]] * 5}


def test_a_child_that_changes_its_directory_finds_the_broker(tmp_path: Path) -> None:
    assert run(programs.change_directory, tmp_path / "home") == {"child": ["0-0"], "values": ["child"], "made": False}


def test_a_child_may_end_in_any_way(directory: str) -> None:
    assert run(programs.leave, directory) == {"values": ["child"] * 4 + ["parent"]}


# -- a parent at work ------------------------------------------------------------------------------------


def test_a_fork_while_threads_of_the_parent_are_at_work(directory: str) -> None:
    found = run(programs.fork_at_work, directory)
    assert found["children"] == [[[], True]] * 15
    assert found["stored"] == found["produced"]


@pytest.mark.parametrize("directory", ["client", "http"], indirect=True)
def test_a_fork_in_the_middle_of_a_call_of_a_client(directory: str) -> None:
    assert run(programs.fork_in_a_handler_of_a_signal, directory) == {"found": ["for the parent"], "status": 0}


# -- a parent that ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", ["before", "after", "never"])
def test_when_its_parent_is_killed_the_directory_is_free(tmp_path: Path, uses: str) -> None:
    """The child uses the broker before its parent's end, only after it, or never."""
    found = run(programs.orphan, tmp_path / "data", uses)
    assert found["orphan"] == ([] if uses == "never" else [found["orphan"][0], True])
    assert found["owner"] is (uses == "never")
    assert found["values"] == ["child"] * (uses == "before") + ["orphan"] * (uses != "never") + ["parent"]


@pytest.mark.parametrize("then", ["finished", "killed"])
def test_a_fork_during_a_take_over(tmp_path: Path, then: str) -> None:
    found = run(programs.fork_during_a_take_over, tmp_path / "data", then)
    produced, is_owner, _ = found["child"]
    assert (produced, is_owner) == ("0-1", then == "killed")
    assert found["values"] == ["child", "owner"]


def test_a_program_that_the_owner_starts_has_nothing_of_it_open(tmp_path: Path) -> None:
    assert run(programs.start_programs, tmp_path / "data") == {"found": ["[]", "[]"]}


def test_the_directory_of_a_closed_broker_is_free_though_a_child_lives(tmp_path: Path) -> None:
    code = (
        "import os, sys, penstock\n"
        "broker = penstock.open(sys.argv[1]); broker.create_queue('q')\n"
        "if not os.fork(): os.close(1); sys.stdin.read(); os._exit(0)\n"
        "broker.close(); print('closed', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "closed\n"
        penstock.open(tmp_path / "data", exclusive=True).close()
        process.stdin.close()


# -- workers and multiprocessing -------------------------------------------------------------------------


def test_a_worker_runs_in_the_parent_and_in_the_child(tmp_path: Path) -> None:
    assert run(programs.work_in_both, tmp_path / "data") == {"completed": 2, "consumers": 2, "exitcode": 0}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_of_processes_takes_queues_as_arguments(tmp_path: Path, method: str) -> None:
    found = run(programs.use_a_pool, tmp_path / "data", method)
    assert found == {"values": ["0", "1", "2", "3", "4", "5", "async"], "count": 7, "read": 7}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_broker_of_a_module_is_used_by_its_children(tmp_path: Path, method: str) -> None:
    (tmp_path / "program.py").write_text(
        "import multiprocessing\n"
        "import penstock\n"
        "broker = penstock.open('data')\n"
        "queue = broker.create_queue('q', exist_ok=True)\n"
        "def produce(value):\n"
        "    queue.produce(value)\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    with multiprocessing.Pool(2) as pool:\n"
        "        pool.map(produce, ['0', '1', '2'])\n"
        "    process = multiprocessing.Process(target=produce, args=('3',))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    print(*sorted(item.value for item in queue.items()))\n"
    )
    found = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout, found.stderr) == ("0 1 2 3\n", "")


def test_a_pickled_queue_uses_the_broker_that_is_open_here(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        copied: penstock.Queue = pickle.loads(pickle.dumps(queue))
        copied.produce("x")
        assert (copied.name, copied.incarnation, queue.stats().ready) == ("q", queue.incarnation, 1)
        with copy.deepcopy(broker) as other:
            assert other.queue("q").stats().ready == 1
        assert queue.stats().ready == 1, "closing a copy does not close the broker"
        data = pickle.dumps(queue)
    with pytest.raises(BrokerClosed):
        copied.stats()
    late: penstock.Queue = pickle.loads(data)
    assert late.stats().ready == 1, "opened at its first use"
    late.home.close()
    penstock.open(tmp_path / "data", exclusive=True).close()


def test_a_pickled_queue_makes_no_new_broker(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        data = pickle.dumps(broker.create_queue("q"))
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    queue: penstock.Queue = pickle.loads(data)
    with pytest.raises(BrokerClosed, match="is not here"):
        queue.stats()
    queue.home.close()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("options", [{"target": "memory://"}, {"exclusive": True}])
def test_what_only_one_process_can_use_is_not_pickled(tmp_path: Path, options: dict[str, str]) -> None:
    with penstock.open(**{"target": str(tmp_path / "data"), **options}) as broker:  # type: ignore[arg-type]
        queue = broker.create_queue("q")
        for one in (broker, queue):
            with pytest.raises(InvalidRequest, match="open one there"):
                pickle.dumps(one)


def test_a_lease_is_not_pickled_but_its_token_can_be_sent(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        queue.produce("x")
        batch = queue.lease(1)
        for one in (batch, batch[0]):
            with pytest.raises(InvalidRequest, match="token"):
                pickle.dumps(one)
        copied: penstock.Queue = pickle.loads(pickle.dumps(queue))
        copied.complete(batch[0].token)
        assert queue.stats().completed == 1
