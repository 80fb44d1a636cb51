"""Releases of other projects that this one is tested with."""

from __future__ import annotations

import re
from pathlib import Path

_MAKEFILE = (Path(__file__).resolve().parents[1] / "Makefile").read_text("utf-8")
[_LISTED] = re.findall(r"^VLLM_RELEASES := (.+)$", _MAKEFILE, re.MULTILINE)
VLLM_RELEASES: list[str] = _LISTED.split()
"""The newest first."""
NEWEST_VLLM = VLLM_RELEASES[0]
VLLM_AHEAD: list[str] = re.findall(r"^VLLM_AHEAD := (.+)$", _MAKEFILE, re.MULTILINE)
"""A newer one without a CPU build, if there is one: only its Python runs."""
