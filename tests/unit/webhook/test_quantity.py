"""Amounts as Kubernetes writes them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from lmcache_webhook.injection.pod import amount_of, is_same


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        *((1, "1"), (0.5, "0.5"), ("1000m", "1"), ("100n", "0.0000001"), (".5", "0.5")),
        *(("1e3", "1000"), ("1E3", "1000"), ("1E", "1000000000000000000"), ("1k", "1000")),
        *(("1.5Gi", "1610612736"), ("2Ei", "2305843009213693952")),
    ],
)
def test_read(text: Any, amount: str) -> None:
    assert amount_of(text) == Decimal(amount)


@pytest.mark.parametrize(
    "text", ["", "m", "1 ", "1ki", "1e", "1e999", "NaN", "0x1", True, None, "1" * 200]
)
def test_what_is_no_quantity(text: Any) -> None:
    assert amount_of(text) is None
    assert not is_same(text, text)
