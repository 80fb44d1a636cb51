"""Token ids that a command is given."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lmcache_ctl.errors import UsageError

STANDARD_INPUT = Path("-")


def read_token_ids(path: Path) -> list[int]:
    """Token ids from a file (a JSON list, or numbers apart by commas or blanks), or from standard
    input for `-`.

    Raises:
        UsageError: It cannot be read, is empty or holds something else; what that is, is not
            repeated.
    """
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {path}: {getattr(exc, 'strerror', None) or 'it is no text'}"
        ) from exc
    inside = text.strip().removeprefix("[").removesuffix("]").strip()
    if not inside:
        raise UsageError(f"{path} is empty: write token ids as numbers, apart by commas or blanks")
    words = re.split(r"[\s,]+", inside)
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"{path} holds something else than token ids: write numbers apart by commas or blanks"
        )
    return [int(word) for word in words]
