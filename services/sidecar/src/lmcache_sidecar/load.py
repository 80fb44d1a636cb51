"""How busy this machine is, for the broker's choice of who serves."""

from __future__ import annotations

import os


def machine_load() -> float:
    """Processes that want to run, over the last minute, for each processor: 0 (idle) to 1 (all
    of them busy).
    """
    return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
