"""The end of a sidecar: what only it holds is handed on to storage or to peers; and the door
through which peers hand theirs.
"""

from lmcache_sidecar.handover.base import Taker, TakerSource
from lmcache_sidecar.handover.chunks import LocalChunks
from lmcache_sidecar.handover.copies import Copier
from lmcache_sidecar.handover.door import HandoverDoor
from lmcache_sidecar.handover.drain import Drain
from lmcache_sidecar.handover.handover import Handover
from lmcache_sidecar.handover.peers import PeerSource
from lmcache_sidecar.handover.progress import DrainProgress, DrainState
from lmcache_sidecar.handover.remote import RemoteSource
from lmcache_sidecar.handover.wishes import BrokerWishes

__all__ = [
    "BrokerWishes",
    "Copier",
    "Drain",
    "DrainProgress",
    "DrainState",
    "Handover",
    "HandoverDoor",
    "LocalChunks",
    "PeerSource",
    "RemoteSource",
    "Taker",
    "TakerSource",
]
