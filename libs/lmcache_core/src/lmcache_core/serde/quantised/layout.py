"""How a quantised tensor is cut into planes, groups of channels and sections. All of it follows
from its shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lmcache_core.errors import SerdeError
from lmcache_core.serde.blob import next_power_of_two
from lmcache_core.serde.cachegen import MAX_LAYERS
from lmcache_core.serde.quantised.values import BFLOAT16, FLOAT16, FLOAT32

KINDS = MappingProxyType({"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32})
MAX_TOKENS = 1 << 15
MAX_CHANNELS = 1 << 20
MAX_PLANES = 1 << 16
SECTION_CHANNELS = 128
SECTION_TOKENS = 128
"""A section has `SECTION_CHANNELS` channels, or more where it has fewer than `SECTION_TOKENS`
tokens.
"""
GROUP_SYMBOLS = 64
"""Channels share a table where they have fewer symbols than this."""


@dataclass(frozen=True)
class PlaneLayout:
    """The shape of a quantised tensor `[sides, layers, tokens, channels]`; a plane is one layer of
    one side.

    Attributes:
        planes: Number of planes.
        tokens: Rows of a plane.
        channels: Values of a row.
    """

    planes: int
    tokens: int
    channels: int

    def __post_init__(self) -> None:
        if not (
            0 < self.planes <= MAX_PLANES
            and 0 < self.tokens <= MAX_TOKENS
            and 0 < self.channels <= MAX_CHANNELS
        ):
            raise SerdeError(
                f"{self.planes} planes of {self.tokens} tokens of {self.channels} channels cannot"
                " be quantised"
            )

    @property
    def group(self) -> int:
        """Channels that share shift and table."""
        return next_power_of_two(-(-GROUP_SYMBOLS // self.tokens))

    @property
    def groups(self) -> int:
        """Groups of a plane."""
        return -(-self.channels // self.group)

    @property
    def section(self) -> int:
        """Channels of a section; the last section of a plane may have fewer."""
        return min(
            self.channels, SECTION_CHANNELS * next_power_of_two(-(-SECTION_TOKENS // self.tokens))
        )

    @property
    def sections(self) -> int:
        """Sections of a plane."""
        return -(-self.channels // self.section)

    @property
    def widths(self) -> list[int]:
        """Channels of each section of a plane."""
        return [
            min(self.section, self.channels - first)
            for first in range(0, self.channels, self.section)
        ]


def can_be_quantised(dtype: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is KV `[sides, layers, tokens, channels]` of a floating-point dtype wide
    enough to quantise.
    """
    if dtype not in KINDS or len(shape) != 4:
        return False
    sides, layers, tokens, channels = shape
    return (
        0 < sides * layers <= MAX_PLANES
        and layers <= MAX_LAYERS
        and 0 < tokens <= MAX_TOKENS
        and 0 < channels <= MAX_CHANNELS
        and math.prod(shape) < 1 << 31
    )
