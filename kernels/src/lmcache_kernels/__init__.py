"""Kernels for KV caches, one package for each op: `lmcache_kernels.<op>.<op>`.

The ops need torch; Triton is imported when an op first meets a CUDA tensor.
"""

from lmcache_kernels.errors import KernelInputError

__all__ = ["KernelInputError"]
