"""Names the settings of an engine that may change the KV: all but reviewed ones. Imports no
engine.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch

from lmcache_core.errors import LayoutError

MAX_DEPTH: Final = 32
_NOT_OF_THE_KV: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
"""Parts of a `transformers` configuration that name where it comes from, or are counted with the
model.
"""


class ReviewedSettings:
    """Which settings of an engine cannot change the KV. All others enter its name, also those of a
    release that is not reviewed yet: then engines share less, never wrongly.

    Args:
        classes: Classes none of whose settings can, with what they are for.
        fields: Of other classes, the fields that cannot, separated by spaces, by reason.
    """

    def __init__(self, classes: Mapping[str, str], fields: Mapping[str, Mapping[str, str]]) -> None:
        self.classes = classes
        self.fields = {
            name: frozenset(" ".join(reasons.values()).split()) for name, reasons in fields.items()
        }

    def fingerprint(self, settings: Any, name: str) -> str:
        """Return text that differs if one of these settings does that may change the KV.

        Raises:
            LayoutError: A setting has a value that no text can name.
        """
        return digest_of(self.named(settings, name))

    def named(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return JSON-compatible data that differs for another value; of settings, without those
        that cannot change the KV.

        Raises:
            LayoutError: No text can name the value.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if depth > MAX_DEPTH:
            raise LayoutError(f"{path}: nested more than {MAX_DEPTH} times, so it cannot be named")
        kind = type(value).__name__
        if kind in self.classes:
            return None
        if isinstance(value, enum.Enum):
            return _tagged(kind, value.name)
        if isinstance(value, torch.dtype | torch.device | Path):
            return _tagged(kind, str(value))
        if isinstance(value, bytes):
            return _tagged(kind, value.hex())
        if isinstance(value, Mapping):
            items = {repr(k): self.named(one, f"{path}.{k}", depth + 1) for k, one in value.items()}
            return _tagged("Mapping", items)
        if isinstance(value, Sequence):
            return [self.named(one, f"{path}[{i}]", depth + 1) for i, one in enumerate(value)]
        if isinstance(value, Set):
            parts = [json.dumps(self.named(one, path, depth + 1), sort_keys=True) for one in value]
            return _tagged("Set", sorted(parts))
        if isinstance(value, type | FunctionType) and "<" not in value.__qualname__:
            return _tagged("code", f"{value.__module__}.{value.__qualname__}")
        if hasattr(value, "to_dict"):  # a configuration of transformers
            return self.named(_without_names(value.to_dict()), path, depth)
        is_data = dataclasses.is_dataclass(value)
        if is_data or isinstance(value, SimpleNamespace):
            owner: Any = value
            known = [one.name for one in dataclasses.fields(owner)] if is_data else vars(owner)
            listed = self.fields.get(kind, frozenset())
            fields = {
                name: self.named(getattr(value, name, None), f"{path}.{name}", depth + 1)
                for name in sorted(known)
                if name not in listed
            }
            # A field that another release lacks counts as one that is not set.
            return _tagged(kind, {name: one for name, one in fields.items() if one is not None})
        try:
            # What a copy of the object would be made of: its class and its whole state.
            parts = value.__reduce_ex__(2)
        except TypeError as exc:
            raise LayoutError(f"{path}={value!r}: a value of type {kind} cannot be named") from exc
        return _tagged(kind, self.named(parts, path, depth + 1))


def digest_of(facts: Any) -> str:
    """Return a digest of JSON-compatible data."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {"": kind, "=": value}


def _without_names(options: Any) -> Any:
    if isinstance(options, Mapping):
        kept = {str(name): one for name, one in options.items() if name not in _NOT_OF_THE_KV}
        return {name: _without_names(one) for name, one in kept.items()}
    return options
