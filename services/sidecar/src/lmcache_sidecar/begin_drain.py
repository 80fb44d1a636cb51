"""`python -m lmcache_sidecar.begin_drain [SOCKET]`: the preStop hook of a terminating pod.

It sends SIGUSR1 to the process that listens on the sidecar's socket, which needs no token. The
kernel reports its process id; the sidecar is 1 only if each container has a process namespace of
its own. Uses only the standard library, since a hook must be fast.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from typing import Final

DEFAULT_SOCKET: Final = "/run/lmcache/socket/sidecar.sock"
TIMEOUT_S: Final = 5.0
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group: `struct ucred` of unix(7)."""


def listener_at(path: str) -> int:
    """Return the id, in our namespace, of the process that listens on a socket.

    Raises:
        OSError: No process listens on it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.connect(path)
        process, _, _ = _CREDENTIALS.unpack(
            asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    return int(process)


def main() -> int:
    """Begin the drain. Return 1 if there is no sidecar, or none in a visible process namespace."""
    path = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_SOCKET
    try:
        process = listener_at(path)
        if process <= 0:  # for kill(2), zero means our own process group
            raise ProcessLookupError(
                "the process that listens there is in a namespace that this one cannot see"
            )
        os.kill(process, signal.SIGUSR1)
    except OSError as exc:
        print(f"the drain cannot begin: {path}: {exc.strerror or exc}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
