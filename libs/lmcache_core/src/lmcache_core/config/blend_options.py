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
            "Which of the reused tokens are computed anew. deviation: those whose KV is furthest"
            " from the fresh on an early layer (CacheBlend). first_of_chunk: the first of each text"
            " (EPIC). none: none at all.",
            choices=BLEND_POLICIES,
        ),
    )
    blend_certificates: str | None = field(
        default=None,
        metadata=about(
            "Blending",
            "Folder of the certificates that `lmcachectl certify blend` makes. A model without one"
            " that it passed is not blended.",
            form=NON_EMPTY,
        ),
    )
