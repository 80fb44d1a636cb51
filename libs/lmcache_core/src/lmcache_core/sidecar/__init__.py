"""Client of the pod's sidecar: the connection, and the chunk store that the engine uses. No
torch.
"""

from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.sidecar.store import SidecarChunkStore

__all__ = ["SidecarChunkStore", "SidecarConnection"]
