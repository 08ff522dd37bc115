"""How many files, and so connections, the process may have open.

Owns: `allow_open_files`.
"""

import resource

RESERVED = 1_000
"""Open files that are no connections: logs of partitions, mostly."""


def allow_open_files(connections: int) -> str:
    """Raise the limit of this process, so that it can have so many connections; gives a warning if it may not."""
    needed = connections + RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= needed:
        return ""
    return (
        f"the process may have {allowed:,} files open, and limits.connections is {connections:,}; "
        f"raise the limit of open files to {needed:,} (LimitNOFILE in systemd), or lower limits.connections"
    )
