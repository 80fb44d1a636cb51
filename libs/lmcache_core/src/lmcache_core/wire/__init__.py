"""Frames: how chunks travel over lm://, and how engines talk to their sidecar over its Unix
socket. No torch.

A frame is a checked 32-byte header, a MessagePack array and, for a record, raw bytes after it
(`frames`, `messages`; `docs/protocols.md` has every field). Each request has its own correlation
id. Over lm:// answers of different requests may interleave:

    frame                      answer              meaning
    HELLO                      HELLO_OK | ERROR    version, what the client takes, token, name
    LANE                                           a number for format, model, ranks, group
    CONTEXT                                        which request the next frame belongs to
    CONTAINS names             CONTAINS_OK         which exist
    HELD tenant, names         CONTAINS_OK         which of a tenant's chunks are here to stay
    GET names, ticket          CHUNK*, GET_END     a record each, then why others are missing
    PUT + record               PUT_OK              stored, or why not
    HANDOVER tenant + record   PUT_OK              stored for a tenant, from a server shutting down
    REMOVE names               REMOVE_OK           how many were there
    PING                       PONG
    ERROR                                          ends a request; with id 0 the connection

The socket also takes HELLO, LANE, CONTEXT and PING, and answers in order (`lmcache_core.sidecar`,
`lmcache_sidecar.socket`); KV crosses shared memory:

    RESERVE sizes              EXTENTS             memory to fill, or why there is none
    COMMIT extents, heads      CONTAINS_OK         which are visible now
    LOAD names                 EXTENTS             chunks in shared memory, then why one is missing
    STAGE ticket, names        PROMISE             what is held for a request, of all ranks
    EXPECT and who has them    PROMISE             as STAGE, of chunks that are still to come
    DONE extents, tickets      OK                  released
    LOOKUP, PREFETCH names     CONTAINS_OK, OK
    REJECT, DESCRIBE, STATS    OK, OK, STATS_OK

A chunk's name is its lane and the 32 bytes of its hash. A client declares a lane once, before the
first name in it; from then on a run of names is the lane's number and the packed hashes (`lanes`).
A key whose hash is not 32 bytes is spelled out in full. The tenant is named only in HELD and
HANDOVER; otherwise it is the token's or the ticket's.

States of a connection at the lm:// server (`server`; `requests` has what precedes a request):

    stranger --HELLO, good token--> served       --token revoked, or a frame that violates a
    stranger --HELLO, no token----> ticket only    bound-->  ERROR, closed
    ticket only --GET with a good ticket--> served for that request
    served --drain--> answers what is underway, then closed

Bounds: frames and fields in `frames` and `messages`, what one client can make a server do in
`ServerLimits`, what one server can make a client hold in `connection`. A sender that stalls loses
its connection by the bytes received, not by those announced. A record is trusted only when its
digest has been computed here and its key is the one requested. What says that the other side cannot
be reached is in one table for all transports (`failures`).
"""
