"""The shape of quantised KV, and the constants that the decoder shares with every other
implementation of the format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmcache_kernels.errors import KernelInputError

LANES = 32
"""Coders interleaved in a stream: one warp."""
PRECISION_BITS = 12
"""Frequencies of a table sum to 2^12."""
STATE_WORDS = 2
LOWEST_STATE = 1 << 15
"""Between symbols the state of a coder is in `LOWEST_STATE … 2^31 - 1`."""
DELTA_FLAG = 128
"""Flag in the byte of a group of channels, which also contains the number of its table."""
MAX_STEPS_IN_REGISTERS = 8
"""Steps per row whose previous values fit into one 64-bit register of each lane, one byte each."""
MAX_GROUP = 64
MAX_TOKENS = 1 << 15
MAX_CHANNELS = 1 << 20
MAX_LEVELS = 127
MAX_SECTION_SYMBOLS = 1 << 30


@dataclass(frozen=True)
class CodecShape:
    """KV `[planes, tokens, channels]` cut into groups of channels, which share shift and table, and
    into sections, which are streams.

    Attributes:
        planes: Layers times sides.
        tokens: Rows of a plane, at most `MAX_TOKENS`.
        channels: Values of a row, at most `MAX_CHANNELS`.
        group: Channels of a group, a power of two, at most `MAX_GROUP`; the last group of a plane
            may have fewer.
        section: Channels of a section, at most `channels`; the last section of a plane may have
        fewer.

    Raises:
        KernelInputError: A number is out of range.
    """

    planes: int
    tokens: int
    channels: int
    group: int
    section: int

    def __post_init__(self) -> None:
        if not (
            self.planes > 0 and 0 < self.tokens <= MAX_TOKENS and 0 < self.channels <= MAX_CHANNELS
        ):
            raise KernelInputError(
                f"{self.planes} planes of {self.tokens} tokens of {self.channels} channels cannot"
                " be encoded"
            )
        if (
            not 0 < self.group <= MAX_GROUP
            or self.group & (self.group - 1)
            or not 0 < self.section <= self.channels
        ):
            raise KernelInputError(
                f"groups of {self.group} and sections of {self.section} of {self.channels} channels"
                " are not possible"
            )
        if self.tokens * self.section > MAX_SECTION_SYMBOLS:
            raise KernelInputError(
                f"sections of {self.tokens} tokens of {self.section} channels; at most"
                f" {MAX_SECTION_SYMBOLS} symbols"
            )

    @property
    def groups(self) -> int:
        """Groups of a plane."""
        return -(-self.channels // self.group)

    @property
    def sections(self) -> int:
        """Sections of a plane."""
        return -(-self.channels // self.section)

    @property
    def is_direct(self) -> bool:
        """Whether the kernel needs no scratch: the width of every section is a multiple of `LANES`,
        and at most `MAX_STEPS_IN_REGISTERS` times that.
        """
        return (
            self.channels % LANES == 0
            and self.section % LANES == 0
            and self.section <= MAX_STEPS_IN_REGISTERS * LANES
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of the tensor: planes, tokens, channels."""
        return self.planes, self.tokens, self.channels


@dataclass(frozen=True, eq=False)
class EncodedPlanes:
    """Input of the decoder, apart from scales and levels. All on one device, contiguous.

    Attributes:
        shifts: int16 `[planes, groups]`: subtracted from every value of a group.
        shapes: uint8 `[planes, groups]`: number of a group's table, and `DELTA_FLAG`.
        lengths: int32 `[planes * sections]`: number of words of each stream.
        words: int16 `[sum of lengths]`: the bits of the streams' 16-bit words, section after
            section, plane after plane.
    """

    shifts: torch.Tensor
    shapes: torch.Tensor
    lengths: torch.Tensor
    words: torch.Tensor
