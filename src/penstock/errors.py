"""Every error that Penstock raises, as in `except penstock.errors.LeaseLost`."""

from penstock.words.errors import (
    AccessDenied,
    BodyTooLarge,
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
    Unauthenticated,
)

__all__ = [
    "AccessDenied",
    "BodyTooLarge",
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
    "Unauthenticated",
]
