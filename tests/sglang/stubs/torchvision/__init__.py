"""In torchvision's place, whose builds need CUDA: SGLang imports it for pictures."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """What modules use when they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module of every name below this one."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let Python make it."""

    def exec_module(self, module: ModuleType) -> None:
        module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]


sys.meta_path.append(_Submodules())
