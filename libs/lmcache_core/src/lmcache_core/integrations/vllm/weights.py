"""Identifies the weights that made the KV: fingerprints of the model's files, and names of LoRA
adapters. Imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.file_digests import file_digests

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 1024
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
"""A folder without such a file has no weights."""
FILES_WITHOUT_KV = (
    *(".*", "*.md", "*.part", "*.tmp", "LICENSE*", "NOTICE*", "USE_POLICY*", "README*"),
    *("added_tokens.json", "chat_template*", "merges.txt", "special_tokens_map.json"),
    *("tekken.json", "tokenizer*", "vocab*"),
)
"""Files of a model's or adapter's folder that name no KV: texts, tokenizers. All others count:
weights, their index, code, quantisation, processors.
"""
COUNTED_AS_CONFIGURATION = ("config.json",)
"""vLLM's configuration holds its content, with the user's changes."""
FileVersions = tuple[tuple[str, int, int], ...]
"""Name, size and modification time of each file."""
_COMMIT = re.compile("[0-9a-f]{40}")


def model_fingerprint(
    model: str, revision: str | None, hf_config: Any, download_dir: str | None = None
) -> str | None:
    """Return text that differs for other weights, independent of their path; None if the weights
    cannot be identified.

    Every byte of its files is read (`file_digests`), except `FILES_WITHOUT_KV`.

    Args:
        model: Folder of the model, or its only file, or its name on a hub.
        hf_config: Its `transformers` configuration; None if it does not come from the same place as
            the weights.
        download_dir: vLLM's download directory; None: the hub library's.

    Raises:
        LayoutError: The files change while they are being read, or cannot be read.
    """
    path = Path(model)
    if path.exists():
        try:
            files = [path] if path.is_file() else _files(path, COUNTED_AS_CONFIGURATION)
            has_weights = path.is_file() or any(file.suffix in WEIGHT_SUFFIXES for file in files)
            return "files-" + _files_fingerprint(files) if has_weights else None
        except OSError as exc:
            raise LayoutError(f"the weights in {model} cannot be read: {exc}") from exc
    # A branch or a tag may point to other weights tomorrow: only a commit identifies them.
    commit = getattr(hf_config, "_commit_hash", None)
    if commit is None:
        folder = downloaded_folder(model, revision, download_dir)
        commit = (revision or "") if folder is None else folder.name
    return f"hub-{model}@{commit}" if _COMMIT.fullmatch(commit) else None


def downloaded_folder(
    name: str, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """Return the folder that a hub's repository was downloaded to; None if it was not, or the name
    is invalid.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        options = {"revision": revision, "cache_dir": download_dir, "local_files_only": True}
        return Path(hub.snapshot_download(repo_id=name, **options))
    except (ImportError, OSError, ValueError):
        return None


def adapter_fingerprint(folder: Path) -> str:
    """Return text that differs for other LoRA weights, computed from the whole content of the
    adapter's files.
    """
    # Called by the scheduler's thread: reading an adapter twice is better than a waiting engine.
    return "files-" + _files_fingerprint(_files(folder), lock_wait_s=0.0)


def adapter_version(folder: Path) -> FileVersions:
    """Return a value that changes when an adapter's files may have changed; cheap enough for every
    request.
    """
    stats = [(file.name, file.stat()) for file in _files(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files_fingerprint(files: Sequence[Path], lock_wait_s: float | None = None) -> str:
    digest = hashlib.sha256()
    for file, content in zip(files, file_digests(files, lock_wait_s), strict=True):
        digest.update(f"{file.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _files(folder: Path, left_out: tuple[str, ...] = ()) -> list[Path]:
    patterns = FILES_WITHOUT_KV + left_out
    return sorted(
        file
        for file in folder.iterdir()
        if not any(fnmatch(file.name, pattern) for pattern in patterns) and file.is_file()
    )


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
