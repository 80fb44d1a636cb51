"""Our linker, to whose sidecar something happens at an exact point."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_core.integrations.sglang.linker import LMCacheLinker

PLAN = "LMC_SABOTAGE"
"""Environment variable: a file with a phase, a signal and a process, which is read once."""
PHASES = ("lookup", "load", "start", "offload")


class SabotagedLinker(LMCacheLinker):
    """Sends the signal behind a lookup, in front of a load or its start, or of an offload."""

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        found = super().lookup(rid, transfers)
        if found:
            _happen("lookup")
        return found

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        _happen("load")
        return super().load(rid, transfers)

    def start_layer_wise_loading(self) -> int:
        _happen("start")
        return super().start_layer_wise_loading()

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        _happen("offload")
        return super().offload(transfers, session_id)


def _happen(phase: str) -> None:
    plan = Path(os.environ[PLAN])
    if not plan.exists():
        return
    when, number, pid = plan.read_text().split()
    if when == phase:
        plan.unlink()
        os.kill(int(pid), int(number))
