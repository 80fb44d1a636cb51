"""Names LoRA adapters. Imports nothing of vLLM."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.errors import LayoutError
from lmcache_core.integrations.weights import (
    adapter_fingerprint,
    downloaded_folder,
    files_of,
)

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 1024
FileVersions = tuple[tuple[str, int, int], ...]
"""Name, size and modification time of each file."""


def adapter_version(folder: Path) -> FileVersions:
    """Return a value that changes when an adapter's files may have changed; cheap enough for every
    request.
    """
    stats = [(file.name, file.stat()) for file in files_of(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


_AdapterKey = tuple[int, str, str]


@dataclass(frozen=True)
class _KnownAdapter:
    """An adapter: the version of its files when it was seen, and its name; None while the weights
    that vLLM computes with are unknown.
    """

    version: FileVersions | None
    name: str | None


class Adapters:
    """Names LoRA adapters by name and content, as far as requests and files reveal them.

    vLLM re-reads an adapter if that is requested (`load_inplace`), and otherwise only after
    dropping it; it identifies adapters by their numbers alone.

    Args:
        settings: Text that differs if the engine applies the same files differently.
    """

    def __init__(self, settings: str = "") -> None:
        self._settings = settings
        self._known: dict[_AdapterKey, _KnownAdapter] = {}
        self._loaded: dict[int, str] = {}
        """What vLLM has loaded under each number, according to the last request with it."""

    def name_of(self, lora: Any) -> str | None:
        """Return the name of a request's adapter, "" if it has none; None if its weights are
        unknown: the request is then not cached.
        """
        if lora is None:
            return ""
        key, is_reread = _key_of(lora), bool(getattr(lora, "load_inplace", False))
        folder = adapter_folder(key[2])
        version = None if folder is None else adapter_version(folder)
        known = self._known.get(key)
        is_retried = known is not None and known.name is None and is_reread and folder is not None
        if known is None or known.version != version or is_retried:
            is_first = known is None or known.version is None
            name, why = None, "have changed since it was loaded"
            if folder is None:
                why = "are in no folder of this machine"
            elif is_first or is_reread:
                try:
                    content = adapter_fingerprint(folder)
                    name = f"{len(key[1])}:{key[1]}@{content};{self._settings}"
                except (LayoutError, OSError) as exc:
                    why = f"cannot be read ({exc})"
            known = self._remember(key, version, name, why)
        if known.name is None:
            return None
        if not is_reread and self._loaded.get(key[0], known.name) != known.name:
            why = f"may not be loaded: another adapter had its number {key[0]}"
            return self._remember(key, version, None, why).name
        self._loaded[key[0]] = known.name
        return known.name

    def is_loaded(self, lora: Any, name: str) -> bool:
        """Return whether, as far as requests show, the adapter of this name has not been replaced
        by another.
        """
        return lora is None or self._loaded.get(int(lora.lora_int_id)) == name

    def is_unchanged(self, lora: Any) -> bool:
        """Return whether the adapter's files are the ones it was named by: they change before vLLM
        is asked to reload it.
        """
        if lora is None:
            return True
        folder, known = adapter_folder(str(lora.lora_path)), self._known.get(_key_of(lora))
        return folder is not None and known is not None and known.version == adapter_version(folder)

    def _remember(
        self, key: _AdapterKey, version: FileVersions | None, name: str | None, why: str
    ) -> _KnownAdapter:
        if name is None:
            logger.warning(
                "adapter not cached until it is loaded again: adapter=%s path=%s"
                " reason=its files %s",
                key[1],
                key[2],
                why,
            )
        if len(self._known) >= MAX_ADAPTERS:
            self._known.clear()
            self._loaded.clear()
        self._known[key] = _KnownAdapter(version, name)
        return self._known[key]


def adapter_folder(path: str) -> Path | None:
    """Return the folder that vLLM reads an adapter from: a local one, or the download of a hub
    name; None if there is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return None if folder.is_absolute() else downloaded_folder(path)


def _key_of(lora: Any) -> _AdapterKey:
    return int(lora.lora_int_id), str(lora.lora_name), str(lora.lora_path)
