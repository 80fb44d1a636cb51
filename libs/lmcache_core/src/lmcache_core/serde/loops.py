"""The machine code of all codecs, compiled once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Loop = Callable[..., Any]


@dataclass(frozen=True)
class Loops:
    """Compiled functions; each is documented where it is written, under the same name."""

    encode_sections: Loop
    decode_sections: Loop
    quantise_by_token: Loop
    quantise_by_plane: Loop
    restore: Loop
    choose: Loop
    split: Loop
    join: Loop
    count: Loop


@functools.cache
def load_loops() -> Loops:
    """Compile, or read what was compiled at install. Some seconds where nothing was; at once when
    called again.

    Raises:
        ConfigError: numba is not installed.
    """
    from lmcache_core.serde.entropy.compiled import compiled, require_numba

    require_numba()
    from lmcache_core.serde.entropy import rans
    from lmcache_core.serde.lossless import planes
    from lmcache_core.serde.quantised import symbols, values

    return Loops(
        encode_sections=compiled(rans.encode_sections, [rans.ENCODE_SIGNATURE]),
        decode_sections=compiled(rans.decode_sections, [rans.DECODE_SIGNATURE]),
        quantise_by_token=compiled(values.quantise_by_token, values.BY_TOKEN_SIGNATURES),
        quantise_by_plane=compiled(values.quantise_by_plane, values.BY_PLANE_SIGNATURES),
        restore=compiled(values.restore, values.RESTORE_SIGNATURES),
        choose=compiled(symbols.choose, [symbols.CHOOSE_SIGNATURE]),
        split=compiled(planes.split, [planes.SPLIT_SIGNATURE]),
        join=compiled(planes.join, [planes.JOIN_SIGNATURE]),
        count=compiled(planes.count, [planes.COUNT_SIGNATURE]),
    )
