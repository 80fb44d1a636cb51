"""Identifies the weights that made the KV by the files of models and LoRA adapters. Imports no
engine.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lmcache_core.errors import LayoutError
from lmcache_core.integrations.file_digests import file_digests

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
"""The engine's configuration holds its content, with the user's changes."""
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
        download_dir: The engine's download directory; None: the hub library's.

    Raises:
        LayoutError: The files change while they are being read, or cannot be read.
    """
    path = Path(model)
    if path.exists():
        try:
            files = [path] if path.is_file() else files_of(path, COUNTED_AS_CONFIGURATION)
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


def shared_name(model: str) -> str:
    """Return the name under which a model's KV is shared: of a path, the folder's own name, so that
    copies of the weights at two paths share KV.
    """
    is_path = model.startswith(("/", ".", "~"))
    return model.rstrip("/").rsplit("/", 1)[-1] if is_path else model


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
    return "files-" + _files_fingerprint(files_of(folder), lock_wait_s=0.0)


def _files_fingerprint(files: Sequence[Path], lock_wait_s: float | None = None) -> str:
    digest = hashlib.sha256()
    for file, content in zip(files, file_digests(files, lock_wait_s), strict=True):
        digest.update(f"{file.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def files_of(folder: Path, left_out: tuple[str, ...] = ()) -> list[Path]:
    """Return the files of a model's or adapter's folder that may change the KV."""
    patterns = FILES_WITHOUT_KV + left_out
    return sorted(
        file
        for file in folder.iterdir()
        if not any(fnmatch(file.name, pattern) for pattern in patterns) and file.is_file()
    )
