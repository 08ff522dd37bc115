"""The public API for asyncio. Its sync twin in `_sync` is generated from these files by scripts/unasync.py."""
