"""GPU connectors: between a serving engine's KV and memory objects. Needs torch."""

from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.gpu_connectors.nested_tuple import VLLMNestedTupleGPUConnector

__all__ = ["GPUConnectorInterface", "VLLMNestedTupleGPUConnector"]
