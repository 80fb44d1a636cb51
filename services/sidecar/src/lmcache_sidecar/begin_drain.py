"""`python -m lmcache_sidecar.begin_drain [SOCKET]`: the hook of a pod that is to end.

It sends SIGUSR1 to the process that listens on the sidecar's socket, which needs no token. The
kernel tells its process id: 1 is the sidecar only where each container has process ids of its own.
Needs the standard library alone, since a hook must be quick.
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
    """Return the id, in our namespace, of the process that listens at a socket.

    Raises:
        OSError: No process listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.connect(path)
        process, _, _ = _CREDENTIALS.unpack(
            asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    return int(process)


def main() -> int:
    """Begin the drain; 1 where no sidecar is there, or not one that we see."""
    path = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_SOCKET
    try:
        process = listener_at(path)
        if process <= 0:  # to kill(2) zero is our own process group
            raise ProcessLookupError(
                "the process that listens there is in a namespace that this one does not see"
            )
        os.kill(process, signal.SIGUSR1)
    except OSError as exc:
        print(f"the drain cannot begin: {path}: {exc.strerror or exc}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
