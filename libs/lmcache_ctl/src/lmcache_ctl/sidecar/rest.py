"""What a sidecar's REST is asked with."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lmcache_ctl.errors import CtlError
from lmcache_ctl.rest import RestService

STANDARD_INPUT = Path("-")


class Sidecar(RestService):
    """Asks one sidecar.

    Args:
        url: Its REST address.
        token_file: Holds the token to show; None for none.
        tls: See `RestService`.
    """

    def __init__(self, url: str, token_file: Path | None, tls: str | None = None) -> None:
        super().__init__("sidecar", url, token_file, tls)


def read_token_ids(path: Path) -> list[int]:
    """Token ids from a file (a JSON list, or numbers apart by commas or blanks), or from standard input for `-`.

    Raises:
        CtlError: It cannot be read, or holds something else; what that is, is not repeated.
    """
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise CtlError(f"cannot read {path}: {getattr(exc, 'strerror', None) or 'it is no text'}") from exc
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    if not all(word.isascii() and word.isdigit() for word in words):
        raise CtlError(f"{path} holds something else than token ids: write numbers apart by commas or blanks")
    return [int(word) for word in words]
