"""Which LoRA weights the KV of a request comes from, as far as requests and files tell. Imports
nothing of vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.weights import (
    FileVersions,
    adapter_fingerprint,
    adapter_version,
    downloaded_folder,
)

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 1024

_Key = tuple[int, str, str]


@dataclass(frozen=True)
class _Known:
    """An adapter: which files it had when it was seen, and its name; None while nothing tells
    which weights vLLM computes with.
    """

    version: FileVersions | None
    name: str | None


class Adapters:
    """Names adapters by name and content.

    vLLM reads an adapter again where that was asked for (`load_inplace`), and otherwise only when
    it had to drop it meanwhile; it knows adapters by their numbers alone.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}
        self._loaded: dict[int, str] = {}
        """What vLLM has under each number, as the last request with it has told."""

    def name_of(self, lora: Any) -> str | None:
        """What names a request's adapter, "" where it has none; None when its weights cannot be
        told: the request is then not cached.
        """
        if lora is None:
            return ""
        key, is_reread = _key_of(lora), bool(getattr(lora, "load_inplace", False))
        folder = adapter_folder(key[2])
        version = None if folder is None else adapter_version(folder)
        known = self._known.get(key)
        if (
            known is None
            or known.version != version
            or (known.name is None and is_reread and folder is not None)
        ):
            is_first = known is None or known.version is None
            if folder is None:
                known = self._unknown(key, version, "are in no folder of this machine")
            elif is_first or is_reread:
                known = self._read(key, version, folder)
            else:
                known = self._unknown(key, version, "have changed since it was loaded")
        if (
            known.name is not None
            and not is_reread
            and self._loaded.get(key[0], known.name) != known.name
        ):
            known = self._unknown(
                key, version, f"may not be loaded: another adapter had its number {key[0]}"
            )
        if known.name is not None:
            self._loaded[key[0]] = known.name
        return known.name

    def is_loaded(self, lora: Any, name: str) -> bool:
        """Whether no request has told since that an adapter of this name has been replaced by
        another one.
        """
        return lora is None or self._loaded.get(int(lora.lora_int_id)) == name

    def is_unchanged(self, lora: Any) -> bool:
        """Whether the adapter's files are those that it was named by: before vLLM is told to
        load it anew, they change.
        """
        if lora is None:
            return True
        folder, known = adapter_folder(str(lora.lora_path)), self._known.get(_key_of(lora))
        return folder is not None and known is not None and known.version == adapter_version(folder)

    def _read(self, key: _Key, version: FileVersions | None, folder: Path) -> _Known:
        try:
            fingerprint = adapter_fingerprint(folder)
        except (LayoutError, OSError) as exc:
            return self._unknown(key, version, f"cannot be read ({exc})")
        return self._remember(key, _Known(version, f"{len(key[1])}:{key[1]}@{fingerprint}"))

    def _unknown(self, key: _Key, version: FileVersions | None, why: str) -> _Known:
        logger.warning(
            "adapter not cached until it is loaded again, its files %s: adapter=%s path=%s",
            why,
            key[1],
            key[2],
        )
        return self._remember(key, _Known(version, None))

    def _remember(self, key: _Key, known: _Known) -> _Known:
        if len(self._known) >= MAX_ADAPTERS:
            self._known.clear()
            self._loaded.clear()
        self._known[key] = known
        return known


def adapter_folder(path: str) -> Path | None:
    """Where vLLM reads an adapter from: a folder, or what has been downloaded for its name on a
    hub; None when there is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return None if folder.is_absolute() else downloaded_folder(path)


def _key_of(lora: Any) -> _Key:
    return int(lora.lora_int_id), str(lora.lora_name), str(lora.lora_path)
