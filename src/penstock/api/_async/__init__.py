"""The public API. There are two of them, and scripts/unasync.py makes the one that blocks from the one that awaits."""
