"""Tells the service manager (systemd with Type=notify) what the server does.

Owns: `tell_service_manager`. It does nothing when the server was not started by a service manager.
"""

import logging
import os
import socket

VARIABLE = "NOTIFY_SOCKET"
_log = logging.getLogger("penstock")


def tell_service_manager(*states: str) -> None:
    """Send states such as "READY=1" or "STATUS=…"."""
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notice:
            notice.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            notice.send("\n".join(states).encode())
    except OSError as error:
        _log.warning("the service manager cannot be told %s (%s: %s)", states[0], address, error)
