"""Which releases of vLLM the connectors are for. Imports no vLLM: the webhook reads it, too."""

from __future__ import annotations

import re
from typing import Final

Release = tuple[int, ...]

LEAST: Final[Release] = (0, 27, 1)
"""The least release that `LMCacheConnector` is for."""
LEAST_WITH_TIERS: Final[Release] = (0, 31, 0)
"""The least whose own offloading has tiers of others: for `LMCacheOffloadingConnector`."""

_RELEASE: Final = re.compile(r"v?(\d{1,4}(?:\.\d{1,4}){1,2})(?!\d|\.dev)")
"""A build from a checkout without tags calls itself 0.1.dev…, whatever it is."""


def text_of(release: Release) -> str:
    """Return a release as people write it."""
    return ".".join(map(str, release))


def too_old(version: str, least: Release = LEAST) -> str:
    """Return that a vLLM is too old, as a sentence; "" if it is not, or if the text does not tell.

    Args:
        version: A version or an image's tag; what follows the numbers does not count.
    """
    found = _RELEASE.match(version)
    if found is None:
        return ""
    release = tuple(map(int, found[1].split(".")))
    if release >= least[: len(release)]:
        return ""
    return f"vLLM {text_of(release)} is older than {text_of(least)}"
