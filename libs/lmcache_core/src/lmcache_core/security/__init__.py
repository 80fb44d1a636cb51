"""Identity of callers (tokens, principals, tenants), permission to pull from a peer (tickets), and
encryption (TLS).
"""

from lmcache_core.names import validate_instance_id, validate_tenant
from lmcache_core.security.ticket_keys import (
    TicketKeyFile,
    TicketKeys,
    parse_ticket_keys,
    read_ticket_keys,
)
from lmcache_core.security.tickets import Ticket, TicketSigner, TicketVerifier, unix_ms
from lmcache_core.security.tls import (
    ClientTls,
    TlsFiles,
    client_context,
    no_context,
    server_context,
    why_silent,
)
from lmcache_core.security.token_file import ShownToken, TokenFile, token_text
from lmcache_core.security.tokens import (
    SHARED_OWNER,
    Principal,
    RateLimiter,
    Role,
    TokenTable,
    owner_of,
    speaks_for_all_tenants,
)

__all__ = [
    "ClientTls",
    "Principal",
    "RateLimiter",
    "Role",
    "SHARED_OWNER",
    "ShownToken",
    "TlsFiles",
    "TokenFile",
    "TokenTable",
    "Ticket",
    "TicketKeyFile",
    "TicketKeys",
    "TicketSigner",
    "TicketVerifier",
    "client_context",
    "no_context",
    "owner_of",
    "parse_ticket_keys",
    "read_ticket_keys",
    "server_context",
    "speaks_for_all_tenants",
    "token_text",
    "unix_ms",
    "validate_instance_id",
    "validate_tenant",
    "why_silent",
]
