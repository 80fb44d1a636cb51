"""Damage to encoded bytes, drawn by Hypothesis."""

from __future__ import annotations

import struct
from typing import NamedTuple

from hypothesis import strategies as st

FRONT_BYTES = 300
"""What is not content lies here: half of the overwritten places are."""


class Changes(NamedTuple):
    """What happens to bytes.

    Attributes:
        edits: Places, with bytes to insert and how many to delete there.
        words: Places, with a number to write there.
    """

    edits: list[tuple[int, bytes, int]]
    words: list[tuple[int, int]]


edits = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.binary(max_size=8), st.integers(0, 8)), max_size=4
)
words = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.sampled_from([0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]),
    ),
    max_size=4,
)
changes = st.one_of(
    st.builds(Changes, edits, st.just([])),
    st.builds(Changes, st.just([]), words),
    st.builds(Changes, edits, words),
)


def changed(data: bytes, changes: Changes) -> bytes:
    """Return damaged bytes."""
    for at, inserted, num_deleted in changes.edits:
        place = at % (len(data) + 1)
        data = data[:place] + inserted + data[place + num_deleted :]
    written = bytearray(data)
    for at, value in changes.words if len(data) > 4 else ():
        size = len(data) - 4
        place = at // 2 % (min(FRONT_BYTES, size) if at % 2 else size)
        form = "<I" if value > 0xFFFF else "<H" if value > 0xFF else "B"
        struct.pack_into(form, written, place, value)
    return bytes(written)
