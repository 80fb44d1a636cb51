"""What the demo says to an engine process, and what it answers. No torch."""

from __future__ import annotations

import msgspec


class Attach(msgspec.Struct, tag=True):
    """Where an engine process has its cache from now on.

    Attributes:
        socket: The sidecar's socket; None for no cache.
    """

    socket: str | None


class Prompt(msgspec.Struct, tag=True):
    """What to generate from."""

    text: str
    max_new_tokens: int


class Answer(msgspec.Struct):
    """What came of it.

    Attributes:
        tokens: Generated token ids.
        text: The same as text.
        num_prompt_tokens: Length of the prompt.
        num_reused_tokens: How many of them were not computed.
        reused_by_tier: The tokens that the cache delivered, by tier.
        retrieved_bytes: KV that the cache delivered.
        stored_bytes: KV that was stored.
        stored_chunks: The same in chunks.
        time_to_first_token_s: Seconds.
        kv_bits: Of each element of the KV.
    """

    tokens: list[int]
    text: str
    num_prompt_tokens: int
    num_reused_tokens: int
    reused_by_tier: dict[str, int]
    retrieved_bytes: int
    stored_bytes: int
    stored_chunks: int
    time_to_first_token_s: float
    kv_bits: int
