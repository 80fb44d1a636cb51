"""The lm:// server through which peers read this sidecar's chunks and hand over theirs."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_core.errors import AuthenticationError
from lmcache_core.record import RAW_SERDE, Chunk, MissReason
from lmcache_core.security import Principal, TicketKeyFile, TicketVerifier
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.hot import RECEIVING_SHARE
from lmcache_core.storage.served import EncodingStore, LocalStore, WrappedStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters
from lmcache_core.wire.served import Authenticate, ServedStore, ServerLimits
from lmcache_core.wire.server import LmServer
from lmcache_servicekit.state import ServiceState
from typing_extensions import override

from lmcache_sidecar import metrics
from lmcache_sidecar.settings import SidecarSettings


class PeerStore(WrappedStore):
    """The chunks of this sidecar as seen by peers. It accepts what this sidecar's own engines could
    have stored or loaded: chunks of its tenant that are raw or can be decoded here, and lossy ones
    only if that is allowed.

    Args:
        store: The wrapped store; it refuses everything while handovers are not accepted.
        codecs: Decode what the engines cannot.
        counters: Counters of received chunks, under the names of `lmcache_sidecar.metrics`.
    """

    def __init__(
        self,
        store: ServedStore,
        tenant: str,
        codecs: Codecs,
        accepts_lossy: bool,
        counters: Counters,
    ) -> None:
        super().__init__(store)
        self._tenant = tenant
        self._codecs = codecs
        self._accepts_lossy = accepts_lossy
        self._counters = counters

    @override
    async def put(self, chunk: Chunk) -> bool:
        header = chunk.described
        is_usable = header.serde == RAW_SERDE or not isinstance(
            self._codecs.decoder_of(header), MissReason
        )
        is_ours = chunk.key.tenant == self._tenant and is_usable
        is_kept = is_ours and (self._accepts_lossy or not chunk.lossy) and await super().put(chunk)
        self._counters.add(metrics.RECEIVED_CHUNKS_TOTAL, is_kept)
        self._counters.add(metrics.RECEIVED_BYTES_TOTAL, chunk.num_bytes * is_kept)
        return is_kept


def create_peer_server(
    settings: SidecarSettings,
    state: ServiceState,
    stack: TierStack,
    codecs: Codecs,
    takes_handovers: Callable[[], bool],
    counters: Counters,
) -> LmServer:
    """Create the server, not opened.

    Args:
        stack: The tiers; only the local ones are served.
        codecs: Encode chunks for peers that can decode them.
        counters: See `PeerStore`.

    Raises:
        ConfigError: The file of ticket keys cannot be read.
    """
    verifier = None
    authenticate: Authenticate = state.tokens.authenticate
    if settings.ticket_keys_file is not None:
        keys = TicketKeyFile(settings.ticket_keys_file, "ticket_keys_file")
        verifier = TicketVerifier(keys, settings.instance_id).verify
        if settings.auth_tokens_file is None:
            # Without a token file every caller would be admitted as an administrator.
            authenticate = _refuse_without_ticket
    local = LocalStore(stack, accepts_puts=takes_handovers)
    accepts_lossy = codecs.is_lossy(settings.peer_serde)
    peer_store = PeerStore(local, settings.tenant, codecs, accepts_lossy, counters)
    return LmServer(
        EncodingStore(peer_store, codecs, settings.peer_serde),
        authenticate,
        host=settings.lm_host,
        port=settings.lm_port,
        verify_ticket=verifier,
        limits=ServerLimits(
            admit=state.admit,
            max_blob_bytes=stack.hot.stats()["capacity_bytes"] // RECEIVING_SHARE,
        ),
    )


def _refuse_without_ticket(token: str | None) -> Principal:
    raise AuthenticationError("this sidecar serves peers with a broker's ticket only")
