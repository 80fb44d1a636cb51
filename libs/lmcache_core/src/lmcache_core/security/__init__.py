"""Who is calling (tokens, principals, tenants) and what a peer may be asked for (tickets)."""

from lmcache_core.security.names import validate_instance_id, validate_tenant
from lmcache_core.security.ticket_keys import parse_ticket_keys, read_ticket_keys
from lmcache_core.security.tickets import Ticket, TicketSigner, TicketVerifier, unix_ms
from lmcache_core.security.tokens import Principal, Role, TokenTable

__all__ = [
    "Principal",
    "Role",
    "TokenTable",
    "Ticket",
    "TicketSigner",
    "TicketVerifier",
    "parse_ticket_keys",
    "read_ticket_keys",
    "unix_ms",
    "validate_instance_id",
    "validate_tenant",
]
