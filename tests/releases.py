"""Releases of other projects that this one is tested with."""

from __future__ import annotations

import re
from pathlib import Path

_MAKEFILE = Path(__file__).resolve().parents[1] / "Makefile"
[_LISTED] = re.findall(r"^VLLM_RELEASES := (.+)$", _MAKEFILE.read_text("utf-8"), re.MULTILINE)
VLLM_RELEASES: list[str] = _LISTED.split()
"""The newest first."""
NEWEST_VLLM = VLLM_RELEASES[0]
