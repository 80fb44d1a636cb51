"""Names of `typing` that Python 3.11 lacks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.version_info >= (3, 12):
    from typing import override
elif TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method):
        """Return the method: the mark is for readers and checkers."""
        return method


__all__ = ["override"]
