"""A queue as Arrow tables, read from its logs: items, events, state and dead letters. Needs pyarrow, an extra."""
