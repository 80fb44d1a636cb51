"""Amounts as Kubernetes writes them: `1`, `1000m` and `1e0` are one amount."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

_QUANTITY: Final = re.compile(
    r"([+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40}))(n|u|m|k|[MGTPE]i?|Ki|[eE][+-]?\d{1,2})?"
)
_DECIMAL: Final = {
    "n": -9,
    "u": -6,
    "m": -3,
    "": 0,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
    "P": 15,
    "E": 18,
}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def amount_of(quantity: Any) -> Decimal | None:
    """The number that a quantity stands for; None where it is none."""
    if isinstance(quantity, bool) or not isinstance(quantity, str | int | float):
        return None
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None:
        return None
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    return number.scaleb(_DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:]))


def is_same(one: Any, other: Any) -> bool:
    """Whether two quantities are one amount; what is no quantity is the same as nothing."""
    amount = amount_of(one)
    return amount is not None and amount == amount_of(other)
