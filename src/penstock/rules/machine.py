"""The partition as a state machine: commands give records, and records change the state.

Owns: the two tables that give each command and each record its function.
    decide(state, command, now, blocks) → records, answer     reads the state, changes nothing
    apply(state, record, now)                                 changes the state; nothing else does, live and in recovery
"""

from collections.abc import Callable
from typing import Any

from penstock.rules import admin, commands, lease, outbox, produce, records, resize, restore, retention, settle, timers, waiting_items
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
    commands.CompleteUnleased: settle.decide_complete_unleased,
    commands.ExtendLease: settle.decide_extend,
    commands.SetProgress: settle.decide_set_progress,
    commands.Configure: admin.decide_configure,
    commands.Pause: admin.decide_pause,
    commands.Clear: admin.decide_clear,
    commands.Seek: admin.decide_seek,
    commands.Redrive: admin.decide_redrive,
    commands.Drop: retention.decide_drop,
    commands.Restore: restore.decide_restore,
    commands.PutCursor: retention.decide_put_cursor,
    commands.ForgetCursor: retention.decide_forget_cursor,
    commands.Send: outbox.decide_send,
    commands.ConfirmTransfer: outbox.decide_confirm_transfer,
    commands.AddFences: resize.decide_add_fences,
    commands.NarrowFence: resize.decide_narrow_fence,
    commands.LiftFence: resize.decide_lift_fence,
    commands.ReleaseParkedKey: admin.decide_release_parked_key,
    commands.RememberCall: settle.decide_remember_call,
    commands.CancelWaiting: waiting_items.decide_cancel,
    commands.SkipWaiting: waiting_items.decide_skip,
    commands.RescheduleWaiting: waiting_items.decide_reschedule,
}

_APPLY: dict[type, Callable[[State, Any, Moment], None]] = {
    records.Produced: produce.apply_produced,
    records.Leased: lease.apply_leased,
    records.PassedOver: lease.apply_passed_over,
    records.Completed: settle.apply_completed,
    records.CompletedUnleased: settle.apply_completed_unleased,
    records.Retried: settle.apply_retried,
    records.Extended: settle.apply_extended,
    records.ProgressSet: settle.apply_progress_set,
    records.Buried: settle.apply_buried,
    records.RequestAnswered: settle.apply_request_answered,
    records.CallAnswered: settle.apply_call_answered,
    records.LeaseExpired: timers.apply_lease_expired,
    records.Due: timers.apply_due,
    records.TtlChecked: timers.apply_ttl_checked,
    records.Opened: admin.apply_opened,
    records.Configured: admin.apply_configured,
    records.Paused: admin.apply_paused,
    records.Cleared: admin.apply_cleared,
    records.Sought: admin.apply_sought,
    records.RedrivenInPlace: admin.apply_redriven,
    records.Lost: admin.apply_lost,
    records.Dropped: retention.apply_dropped,
    records.Restored: restore.apply_restored,
    records.CursorMoved: retention.apply_cursor_moved,
    records.CursorReleased: retention.apply_cursor_released,
    records.Sent: outbox.apply_sent,
    records.FollowUpSent: outbox.apply_follow_up_sent,
    records.Delivered: outbox.apply_delivered,
    records.FencesAdded: resize.apply_fences_added,
    records.FenceNarrowed: resize.apply_fence_narrowed,
    records.FenceLifted: resize.apply_fence_lifted,
    records.ParkedKeyReleased: admin.apply_parked_key_released,
    records.Cancelled: waiting_items.apply_cancelled,
    records.Skipped: waiting_items.apply_skipped,
    records.Rescheduled: waiting_items.apply_rescheduled,
}


def decide(state: State, command: commands.Command, now: Moment, blocks: BlockSource) -> tuple[list[records.Record], commands.Answer]:
    """Records and answer of a command. Raises MissingBlocks (fetch, decide again) or a PenstockError (refused)."""
    rule = _DECIDE.get(type(command))
    if rule is None:
        raise InvalidRequest(f"{type(command).__name__} is not a command; use one of penstock.rules.commands")
    return rule(state, command, now, blocks)


def apply(state: State, record: records.Record, now: Moment) -> None:
    """Apply a record to the state."""
    _APPLY[type(record)](state, record, now)
    if any(state.keys.free_heads):
        state.keys.drop_stale_heads()
    state.moment = now


__all__ = ["apply", "decide", "decide_due"]
