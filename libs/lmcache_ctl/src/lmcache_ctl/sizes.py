"""Numbers of bytes, as people write them."""

from __future__ import annotations

import re
from typing import Final

from lmcache_ctl.errors import UsageError

UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """`512MiB` in bytes.

    Raises:
        UsageError: It is no such number, or less than one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    if (
        found is None
        or found[2] not in UNITS
        or not (size := int(float(found[1]) * UNITS[found[2]]))
    ):
        raise UsageError(
            f"{text!r} is no size: write a number and one of"
            f" {', '.join(unit for unit in UNITS if unit)}, such as 512MiB"
        )
    return size
