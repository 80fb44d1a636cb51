"""Kernels for KV caches, one package for each op: `lmcache_kernels.<op>.<op>`.

The ops need torch; Triton is imported when an op is first called with a CUDA tensor.
"""

from lmcache_kernels.errors import KernelInputError

__all__ = ["KernelInputError"]
