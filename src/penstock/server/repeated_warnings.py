"""Warnings about clients, which a client could repeat at will.

Owns: `RepeatedWarnings`. Each cause is logged at once when it occurs, then at most once in PERIOD_SECONDS, with how
often it has occurred: a client cannot fill the log.
"""

import logging

_log = logging.getLogger("penstock")
PERIOD_SECONDS = 60.0


class RepeatedWarnings:
    """Counts and logs warnings by their cause."""

    def __init__(self) -> None:
        self._causes: dict[str, _Cause] = {}

    def warn(self, cause: str, client: str, now: float) -> None:
        """Log or count a warning. now: the time of the event loop."""
        known = self._causes.get(cause)
        if known is None:
            self._causes[cause] = _Cause(now + PERIOD_SECONDS)
            _log.warning("%s (client %s)", cause, client)
        else:
            known.count += 1
            known.last_client = client

    def log_counted(self, now: float) -> None:
        """Log the causes that were counted for PERIOD_SECONDS."""
        for cause, known in [(cause, known) for cause, known in self._causes.items() if now >= known.until]:
            if not known.count:
                del self._causes[cause]  # the next one is logged at once
                continue
            _log.warning("%s: %d times more in %.0f s (last client %s)", cause, known.count, PERIOD_SECONDS, known.last_client)
            self._causes[cause] = _Cause(now + PERIOD_SECONDS)


class _Cause:
    def __init__(self, until: float) -> None:
        self.until = until
        self.count = 0
        self.last_client = ""
