"""Random appends, syncs, rotations, resets and new owners: each kind of log behaves as a list of groups of frames."""

import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from penstock.logs.log import Draft, FrameType
from tests.logs.backends import LOG_BACKENDS, ComparableFrame, base_draft, comparable, draft, expected, noise, state_draft
from tests.logs.scripted_owner import check_replay, groups_stored, next_offset, with_offsets

DRAFTS = st.one_of(
    st.builds(lambda count, size: draft(0, count, noise(size, size)), st.integers(1, 50), st.sampled_from([0, 1, 100, 3_000, 9_000])),
    st.builds(lambda size: state_draft(0, bytes(size)), st.sampled_from([0, 1, 600])),
)


class LogStateMachine(RuleBasedStateMachine):
    """A log, and the groups it should have: the synced ones, and those only appended."""

    backend: str

    @initialize()
    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.home = LOG_BACKENDS[self.backend](Path(self._folder.name))
        self.log = self.home.start()
        self.synced: list[Sequence[Draft]] = []
        self.appended: list[Sequence[Draft]] = []

    @rule(drafts=st.lists(DRAFTS, min_size=1, max_size=4))
    def append(self, drafts: list[Draft]) -> None:
        group = with_offsets(drafts, next_offset(self.groups))
        self.log.append(group)
        self.appended.append(group)

    @rule()
    def sync(self) -> None:
        self.log.sync()
        self._all_synced()

    @rule()
    def rotate(self) -> None:
        base = with_offsets([base_draft(0)], next_offset(self.groups))
        self.log.rotate(base[0])
        self.appended.append(base)
        self._all_synced()

    @rule()
    def reset(self) -> None:
        self.log.reset()
        self.appended = []
        self._recover()

    @rule()
    def new_owner(self) -> None:
        self.log = self.home.reopen(self.log)
        self._recover()

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        end = next_offset(self.groups)
        start = data.draw(st.integers(0, end))
        stop = data.draw(st.integers(start + 1, end + 10))
        wanted = [frame for frame in self.frames if frame.type is FrameType.DATA and frame.base < stop and frame.base + frame.count > start]
        assert comparable(self.log.read(start, stop)) == wanted

    @invariant()
    def holds_what_it_should(self) -> None:
        assert comparable(self.log.frames()) == self.frames
        assert self.log.unsynced == bool(self.appended)

    def teardown(self) -> None:
        self.log.close()
        self._folder.cleanup()

    @property
    def groups(self) -> list[Sequence[Draft]]:
        return self.synced + self.appended

    @property
    def frames(self) -> list[ComparableFrame]:
        return expected(chain(*self.groups))

    def _all_synced(self) -> None:
        self.synced, self.appended = self.groups, []

    def _recover(self) -> None:
        recovered = comparable(self.log.recover())
        self.synced, self.appended = groups_stored(comparable(self.log.frames()), self.synced, self.appended), []
        check_replay(recovered, self.frames)
        assert self.log.findings == []


@pytest.mark.parametrize("backend", LOG_BACKENDS)
def test_a_log_behaves_as_a_list_of_groups(backend: str) -> None:
    machine = type("Machine", (LogStateMachine,), {"backend": backend})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))
