"""Foreign errors of the storage beneath, put into our words.

Owns: the sentences for what a disk says. Every OSError that enters `penstock.logs` leaves it through here.
"""

import errno
import os

from penstock.words.errors import StorageFailed

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space, then send the request again",
    errno.EDQUOT: "the disk quota is used up; raise it or free some space, then send the request again",
    errno.EROFS: "the disk is read-only; mount it for writing, or open the broker read-only",
    errno.EACCES: "access is denied; give this user the right to read and write there",
    errno.EMFILE: "too many files are open; raise the limit of open files (ulimit -n)",
}


def storage_failed(error: OSError, doing: str, path: str) -> StorageFailed:
    """What to raise for a system error met while doing something to a path."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    advice = _ADVICE.get(number, f"{os.strerror(number)} ({name}); look at the disk, then send the request again")
    return StorageFailed(f"{doing} {path} failed: {advice}")
