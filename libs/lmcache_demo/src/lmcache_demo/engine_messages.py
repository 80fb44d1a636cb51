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


class KeepDocuments(msgspec.Struct, tag=True):
    """Store the documents of the blended prompts, each on its own.

    Attributes:
        socket: Of the sidecar to store them through.
    """

    socket: str


class AskBlended(msgspec.Struct, tag=True):
    """Certify a way to blend, then answer the questions of the blended prompts with it.

    Attributes:
        socket: Of the sidecar to read the documents through.
        folder: Of the certificates.
        policy: Which tokens are computed anew.
        recompute_ratio: Share of them.
    """

    socket: str
    folder: str
    policy: str
    recompute_ratio: float


class BlendedAnswers(msgspec.Struct):
    """What came of one way to blend.

    Attributes:
        kl_nats: What its certificate says: the divergence from full recompute, per token.
        top1_agreement: And the share of equal first choices.
        reason_against: Why prompts were computed in full instead; None if they were blended.
        num_answers: Questions that were asked.
        num_blended: Those whose prompts were blended.
        num_equal: Answers that are those of an engine without a cache.
        num_right: Answers that are right.
        num_prompt_tokens: Of all prompts together.
        num_reused_tokens: How many of them were retrieved.
    """

    kl_nats: float
    top1_agreement: float
    reason_against: str | None
    num_answers: int
    num_blended: int
    num_equal: int
    num_right: int
    num_prompt_tokens: int
    num_reused_tokens: int
