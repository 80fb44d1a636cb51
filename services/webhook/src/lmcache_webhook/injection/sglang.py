"""What is appended to SGLang's command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from lmcache_webhook.injection.pod import Container, DeclinedError
from lmcache_webhook.injection.sidecar import SOCKET_PATH

LINKER_MODULE: Final = "lmcache_core.integrations.sglang"
OPTION: Final = "--unified-cache-external-linker-config"
PAGE_SIZE: Final = 64
_PAGE_SIZE_OPTION: Final = "--page-size"
_IN_THE_WAY: Final = (
    *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", OPTION),
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "--enable-lmcache"),
    *("--enable-flexkv", "--radix-cache-backend", "--disable-radix-cache"),
)
"""Options of SGLang beside which there can be no linker of ours."""


def linker_arguments(container: Container, line: Sequence[str]) -> tuple[str, ...]:
    """Return the words by which SGLang uses the linker.

    Args:
        line: The server's command line.

    Raises:
        DeclinedError: It has another cache.
    """
    given = {word.partition("=")[0] for word in line}
    for option in _IN_THE_WAY:
        if option in given:
            raise DeclinedError(
                f"the container {container.name} is given {option}, and one SGLang has one cache"
                " beside its own: remove that to have the linker set here"
            )
    config = {
        "linker": "LMCacheLinker",
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": {"sidecar_socket": SOCKET_PATH},
    }
    pages = () if _PAGE_SIZE_OPTION in given else (_PAGE_SIZE_OPTION, str(PAGE_SIZE))
    return (
        *pages,
        *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend"),
        *("dynamic", OPTION, json.dumps(config, separators=(",", ":"))),
    )
