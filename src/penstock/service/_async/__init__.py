"""The public API, for asyncio and for threads. What is written by hand is the async one; scripts/unasync.py makes the other from it."""
