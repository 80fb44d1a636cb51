"""The split of a quantised tensor into planes, groups of channels and sections, which follows from
its shape (docs/codec.md). No numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.errors import SerdeError
from lmcache_core.serde.blob import next_power_of_two

MAX_TOKENS = 1 << 15
MAX_CHANNELS = 1 << 20
MAX_PLANES = 1 << 16
SECTION_CHANNELS = 128
SECTION_TOKENS = 128
"""A section has `SECTION_CHANNELS` channels, or more if there are fewer than `SECTION_TOKENS`
tokens.
"""
GROUP_SYMBOLS = 64
"""Channels with fewer symbols than this share a table."""


@dataclass(frozen=True)
class PlaneLayout:
    """The shape of a quantised tensor `[sides, layers, tokens, channels]`; a plane is one layer of
    one side.

    Attributes:
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
