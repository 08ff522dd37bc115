"""The public API, in two forms. The one that awaits is written by hand; scripts/unasync.py writes the blocking one."""
