"""Packages that come along for a Python that has not got them.

The images of vLLM bring torch, numpy and msgspec, but not always xxhash. What is copied into a pod
therefore has the two small ones beside itself, built for several Pythons, in a folder that no
import looks at: it is appended to the search path when one of them is missing, so that it never
takes the place of something that is there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

NEEDED: Final = ("msgspec", "xxhash")
FOLDER: Final = Path(__file__).parents[2] / "bundled"
"""In this package, and only where it was copied into a pod: `docker/payload.Dockerfile` puts it
there.
"""


def python_tag() -> str:
    """Which Python this is, as wheels name it: `cp312`, with a `t` behind it where it has no
    GIL.
    """
    return f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


def append_missing(folder: Path = FOLDER) -> bool:
    """Let this process find the bundled packages behind all others, if it lacks one of them.

    Args:
        folder: Where they are, below the tag of each Python.

    Returns:
        Whether the search path has changed. It does not where nothing is missing, where nothing was
        brought along for this Python, and at a second call.
    """
    place = folder / python_tag()
    if (
        all(importlib.util.find_spec(name) is not None for name in NEEDED)
        or not place.is_dir()
        or str(place) in sys.path
    ):
        return False
    sys.path.append(str(place))
    importlib.invalidate_caches()
    return True
