"""The package's exceptions.

ValueError
`-- KernelInputError   tensors or slots that an op cannot work on; nothing was written
"""

from __future__ import annotations


class KernelInputError(ValueError):
    """Tensors or slots that an op cannot work on. Raised before anything is written."""
