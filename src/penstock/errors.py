"""Every error that Penstock raises, under the name by which it is caught: `except penstock.errors.LeaseLost`."""

from penstock.words.errors import (
    AccessDenied,
    BrokerClosed,
    BrokerLocked,
    CorruptLog,
    InvalidRequest,
    LeaseLost,
    OutcomeUnknown,
    PenstockError,
    QueueBusy,
    QueueExists,
    QueueFull,
    QueueHeld,
    QueueNotFound,
    StorageFailed,
)

__all__ = [
    "AccessDenied",
    "BrokerClosed",
    "BrokerLocked",
    "CorruptLog",
    "InvalidRequest",
    "LeaseLost",
    "OutcomeUnknown",
    "PenstockError",
    "QueueBusy",
    "QueueExists",
    "QueueFull",
    "QueueHeld",
    "QueueNotFound",
    "StorageFailed",
]
