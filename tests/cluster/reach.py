"""Print as JSON which of the addresses given accept a connection. Standard library only: it runs
inside pods.

Usage: python reach.py HOST:PORT …
"""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_S = 3.0


def is_open(address: str) -> bool:
    """Return whether a connection is accepted in time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), TIMEOUT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as threads:
        answers = threads.map(is_open, sys.argv[1:])
        print(json.dumps([where for where, yes in zip(sys.argv[1:], answers, strict=True) if yes]))
