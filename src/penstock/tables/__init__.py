"""Queues as Arrow tables, straight from their logs: items, events, state and dead letters. Needs pyarrow, which is an extra."""
