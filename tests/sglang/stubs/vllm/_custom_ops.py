"""Operators that SGLang imports from vLLM on a processor."""

from __future__ import annotations

from typing import Any


def _never_called(*_: Any, **__: Any) -> None:
    raise NotImplementedError("this operator is there to be imported")


awq_dequantize = fused_add_rms_norm = rms_norm = rotary_embedding = _never_called
