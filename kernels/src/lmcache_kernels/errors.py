"""The package's exceptions.

ValueError
`-- KernelInputError   arguments that an op cannot process; nothing was written
"""

from __future__ import annotations


class KernelInputError(ValueError):
    """Arguments that an op cannot process. Raised before anything is written."""
