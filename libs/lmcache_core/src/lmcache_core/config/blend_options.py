"""This library's own options of blending; what it does is in docs/blend.md."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from lmcache_core.config.options import NON_EMPTY, about

BLEND_POLICIES: Final = ("deviation", "first_of_chunk", "none")


@dataclass(frozen=True, repr=False)
class BlendOptions:
    """Which tokens are computed anew, and who may be blended at all."""

    _: KW_ONLY
    blend_policy: str = field(
        default="deviation",
        metadata=about(
            "Blending",
            "Which reused tokens are recomputed. deviation: those whose KV differs most on "
            "an early layer (CacheBlend). first_of_chunk: each text's first (EPIC). none: "
            "none.",
            choices=BLEND_POLICIES,
        ),
    )
    blend_certificates: str | None = field(
        default=None,
        metadata=about(
            "Blending",
            "Folder written by `lmcachectl certify blend`.",
            form=NON_EMPTY,
        ),
    )
