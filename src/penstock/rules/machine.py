"""The partition as a machine: commands go in, records come out; records go in, the state changes.

Owns: the two tables that join commands and records to their rules, and nothing else.
    decide(state, command, now, peek) → records, answer     reads, changes nothing
    apply(state, record, now)                               the only thing that changes state, live and in recovery
"""

from collections.abc import Callable
from typing import Any

from penstock.rules import admin, commands, lease, outbox, produce, records, resize, retention, settle, timers
from penstock.rules.state import BlockSource, State
from penstock.rules.timers import decide_due
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest

_DECIDE: dict[type, Callable[[State, Any, Moment, BlockSource], tuple[list[records.Record], commands.Answer]]] = {
    commands.Produce: produce.decide_produce,
    commands.AcquireLease: lease.decide_lease,
    commands.CompleteLeased: settle.decide_complete,
    commands.RetryLeased: settle.decide_retry,
    commands.BuryLeased: settle.decide_bury,
    commands.CompleteUnleased: settle.decide_consume,
    commands.ExtendLease: settle.decide_extend,
    commands.SetProgress: settle.decide_note,
    commands.Configure: admin.decide_configure,
    commands.Pause: admin.decide_pause,
    commands.Clear: admin.decide_clear,
    commands.Seek: admin.decide_seek,
    commands.Redrive: admin.decide_redrive,
    commands.Drop: retention.decide_drop,
    commands.PutCursor: retention.decide_put_cursor,
    commands.ForgetCursor: retention.decide_forget_cursor,
    commands.Send: outbox.decide_send,
    commands.ConfirmTransfer: outbox.decide_confirm,
    commands.AddFences: resize.decide_fence,
    commands.NarrowFence: resize.decide_narrow,
    commands.LiftFence: resize.decide_lift,
    commands.ReleaseParkedKey: admin.decide_release_parked_key,
}

_APPLY: dict[type, Callable[[State, Any, Moment], None]] = {
    records.Produced: produce.apply_produced,
    records.Leased: lease.apply_leased,
    records.PassedOver: lease.apply_passed,
    records.Completed: settle.apply_completed,
    records.CompletedUnleased: settle.apply_consumed,
    records.Retried: settle.apply_retried,
    records.Extended: settle.apply_extended,
    records.ProgressSet: settle.apply_noted,
    records.Buried: settle.apply_buried,
    records.RequestAnswered: settle.apply_answered,
    records.LeaseExpired: timers.apply_expired,
    records.Due: timers.apply_due,
    records.TtlChecked: timers.apply_aged,
    records.Opened: admin.apply_opened,
    records.Configured: admin.apply_configured,
    records.Paused: admin.apply_paused,
    records.Cleared: admin.apply_cleared,
    records.Sought: admin.apply_sought,
    records.RedrivenInPlace: admin.apply_redriven,
    records.Lost: admin.apply_lost,
    records.Dropped: retention.apply_dropped,
    records.CursorMoved: retention.apply_cursor_moved,
    records.CursorReleased: retention.apply_cursor_released,
    records.Sent: outbox.apply_sent,
    records.FollowUpSent: outbox.apply_promised,
    records.Delivered: outbox.apply_delivered,
    records.FencesAdded: resize.apply_fenced,
    records.FenceNarrowed: resize.apply_narrowed,
    records.FenceLifted: resize.apply_lifted,
    records.ParkedKeyReleased: admin.apply_parked_key_released,
}


def decide(state: State, command: commands.Command, now: Moment, peek: BlockSource) -> tuple[list[records.Record], commands.Answer]:
    """What a command leads to. May raise Missing (fetch and ask again) or a PenstockError (refused)."""
    rule = _DECIDE.get(type(command))
    if rule is None:
        raise InvalidRequest(f"{type(command).__name__} is not a command; use one of penstock.rules.commands")
    return rule(state, command, now, peek)


def apply(state: State, record: records.Record, now: Moment) -> None:
    """What a record does."""
    _APPLY[type(record)](state, record, now)
    if any(state.keys.free_heads):
        state.keys.drop_stale_heads()
    state.moment = now


__all__ = ["apply", "decide", "decide_due"]
