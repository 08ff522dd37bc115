"""Records to frames and back."""

from typing import get_args

import msgspec
import pytest

from penstock.logs import codec, columns
from penstock.logs.log import Frame, FrameType
from penstock.logs.memory import MemoryLog
from penstock.rules import base, machine
from penstock.rules.calls import CallName, RememberedAnswer
from penstock.rules.records import (
    Buried,
    CallAnswered,
    Cancelled,
    Cleared,
    Completed,
    CompletedUnleased,
    Configured,
    CursorMoved,
    CursorReleased,
    Delivered,
    Dropped,
    Due,
    Extended,
    FenceLifted,
    FenceNarrowed,
    FencesAdded,
    FenceSpec,
    FollowUpSent,
    LaneTake,
    Leased,
    LeaseExpired,
    LineTake,
    Lost,
    Opened,
    ParkedKeyReleased,
    PassedOver,
    Paused,
    Produced,
    ProgressSet,
    Record,
    RedrivenInPlace,
    RequestAnswered,
    Rescheduled,
    Restored,
    Retried,
    Sent,
    Skipped,
    Sought,
    StateRecord,
    TtlChecked,
    pack_keys,
    unpack_keys,
)
from penstock.rules.state import State
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog
from penstock.words.limits import Policy
from tests.full_history import write_every_record
from tests.logs.batches import framed
from tests.partition_under_test import MemoryPartitionBackend, PartitionUnderTest

NOW = Moment(5, 6)
KEYS = pack_keys([1, (1 << 64) - 1])
TAKE = LaneTake(5, 0, 9, [0, 2], KEYS, [3, 5], KEYS, [7, 8])
SAMPLES: list[Record] = [
    Opened(3, "boot", -7, True),
    Configured(Policy(1_000_000, 3, 5, 6, 7, "park")),
    Leased(1 << 40, 9, 8, "wörker", [TAKE, LaneTake(9, 3, 4)], [LineTake((1 << 64) - 1, 2, 5, 6)]),
    Leased(1, 2, 3, ""),
    PassedOver([TAKE]),
    Completed(1, [0, 2, 5, 6]),
    Completed(1),
    Retried(1, [0, 1], 7, "because", False, [1, 2]),
    Retried(1, [0, 1]),
    LeaseExpired(1),
    Extended(1, 1 << 60),
    Buried(1, [0, 2], "why", KEYS, [3, 4], True),
    Buried(0, [0, 1], ""),
    RequestAnswered(bytes(16), 2, 1 << 40, [1], [2], [3]),
    RequestAnswered(bytes(16)),
    CallAnswered([CallName(bytes(16), 3, b"content")], [RememberedAnswer(1, 2, [3], 4, [5], [6], [7, 8], 9, [10])]),
    Due(True, 9, 8, [0, 1, 2, 3], [5, 21]),
    TtlChecked(9, 8, [0, 1]),
    TtlChecked(9, 8),
    Paused(True, False),
    Cleared([0, 1], [2, 3], [4, 5], [6, 7]),
    Sought([0, 9]),
    Cancelled([0, 1, 5, 7], bytes(24)),
    Skipped([0, 2], bytes(16)),
    Restored(1 << 36, 1 << 40),
    Rescheduled([0, 2], bytes([5, 21]), bytes(16), 1_700_000_000_000_000, 90),
    RedrivenInPlace([0, 2], bytes([5, 21]), KEYS),
    Lost([0, 9]),
    Dropped([0, 9]),
    CursorMoved("audit", 1 << 60),
    CursorReleased("audit"),
    FencesAdded(3, [FenceSpec(1, 2, 1 << 40, 5, b"\x01\x00", KEYS), FenceSpec(2, 2, 0, 5, None)], [(bytes(16), 9, 1 << 60)]),
    FencesAdded(1, []),
    FenceNarrowed(1, KEYS),
    FenceLifted(1, KEYS),
    Sent(b"there", 1 << 40, [0, 2], KEYS),
    Sent(b"there", 1, [0, 2]),
    FollowUpSent(b"there", 2, b"items"),
    Delivered(b"there", 1, 7),
    Delivered(b"there", 1),
    ParkedKeyReleased((1 << 64) - 1),
    ProgressSet(3, 5, "half way"),
    CompletedUnleased([4, 6], "spark:c0ffee", pack_keys([0, 9])),
]


def produced(base: int, *payloads: bytes) -> Produced:
    return Produced(base, Batch(list(payloads)))


def encode_and_decode(records: list[Record]) -> list[Record]:
    return [record for draft in codec.encode_records(records, NOW, 100) for record in codec.decode_frame(framed(draft))]


def test_the_samples_have_every_type_of_record() -> None:
    assert {type(sample) for sample in SAMPLES} == set(get_args(StateRecord))


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_a_decoded_record_equals_the_encoded_one(record: Record) -> None:
    assert encode_and_decode([record]) == [record]


def test_decoding_keeps_the_order_of_records() -> None:
    mixed: list[Record] = [produced(0, b"a"), *SAMPLES[:5], produced(1, b"b"), produced(2, b"c", b"d"), *SAMPLES[5:], produced(4, b"e")]
    assert encode_and_decode(mixed) == mixed


def test_consecutive_records_share_a_frame_and_frames_have_the_right_offset() -> None:
    mixed: list[Record] = [SAMPLES[0], produced(7, b"a"), produced(8, b"b", b"c"), SAMPLES[1], SAMPLES[2]]
    frames = [(draft.type, draft.base_offset, draft.count) for draft in codec.encode_records(mixed, NOW, 10)]
    assert frames == [(FrameType.STATE, 7, 1), (FrameType.DATA, 7, 3), (FrameType.STATE, 10, 2)]


def test_key_ids_are_packed_eight_bytes_each() -> None:
    assert pack_keys([1, (1 << 64) - 1]) == b"\x01" + bytes(7) + b"\xff" * 8
    assert unpack_keys(KEYS) == [1, (1 << 64) - 1]


def history() -> tuple[State, list[Frame]]:
    partition = PartitionUnderTest(MemoryPartitionBackend())
    write_every_record(partition)
    log = partition.wrapped.log
    assert isinstance(log, MemoryLog)
    return partition.wrapped.state, log.kept


def test_replay_of_outlines_gives_the_same_state() -> None:
    live, frames = history()
    for outline in (False, True):
        state = State()
        for frame in frames:
            for record in codec.decode_frame(frame, outline=outline):
                machine.apply(state, record, Moment(frame.elapsed, frame.wall))
        assert base.dump(state) == base.dump(live)


def test_an_outline_leaves_payloads_keys_and_texts_unread() -> None:
    record = Produced(0, Batch([b"a"], [b"k"], [1], [b"h"], ["kind"], ttls=[5], origins=[b"o"]))
    [frame] = [framed(draft) for draft in codec.encode_records([record], NOW, 1)]
    [outline] = codec.decode_frame(frame, outline=True)
    assert isinstance(outline, Produced)
    batch = outline.batch
    assert (len(batch), list(batch.key_ids or []), list(batch.ttls or [])) == (1, [1], [5])
    assert (batch.headers, batch.kinds, batch.origins) == (None, None, [b"o"])
    assert b"a" not in batch.payloads


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([[99, 1]]), msgspec.msgpack.encode([["x"]])])
def test_a_frame_that_cannot_be_decoded_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptLog, match=r"^frame 4 is whole but cannot be understood .*; use a newer Penstock$"):
        codec.decode_frame(Frame(FrameType.STATE, 4, 0, 1, 0, 1, 1, memoryview(body)))


def test_a_column_from_a_newer_penstock_is_refused() -> None:
    [frame] = [framed(draft) for draft in codec.encode_records([produced(0, b"a")], NOW, 1)]
    with pytest.raises(CorruptLog, match="; use a newer Penstock"):
        codec.decode_frame(frame._replace(column_bits=columns.KNOWN + 1))


def test_a_field_added_at_the_end_by_a_newer_penstock_is_ignored() -> None:
    body = msgspec.msgpack.encode([[7, 42, "new"]])
    assert codec.decode_frame(Frame(FrameType.STATE, 4, 0, 1, 0, 1, 1, memoryview(body))) == [LeaseExpired(42)]


def test_a_base_is_a_frame_of_its_own() -> None:
    draft = codec.base_draft(b"state", NOW, 7)
    assert (draft.type, draft.base_offset, draft.count, draft.parts) == (FrameType.BASE, 7, 1, [b"state"])
