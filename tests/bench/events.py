"""Events as our connector publishes them and vLLM 0.32 encodes them, without vLLM."""

from __future__ import annotations

import random

import msgspec

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16


class _Event(msgspec.Struct, tag=True, omit_defaults=True):
    """Named as vLLM names it."""


class BlockStored(_Event):
    """That a place has a chunk."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[object] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event):
    """That it has it no more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


def stored_event(chance: random.Random, parent: int | None = None) -> BlockStored:
    """Return an event of a chunk of tokens of Llama-3.1's vocabulary."""
    hashes = [chance.getrandbits(64) for _ in range(CHUNK_TOKENS // BLOCK_TOKENS)]
    tokens = [chance.randrange(128_256) for _ in range(CHUNK_TOKENS)]
    about = (0, "full_attention")
    return BlockStored(hashes, parent, tokens, BLOCK_TOKENS, None, "CPU", None, None, *about)


def removed_event(stored: BlockStored) -> BlockRemoved:
    """Return the event that takes a chunk back."""
    return BlockRemoved(stored.block_hashes, stored.medium, 0)


def event_bytes() -> tuple[int, int]:
    """Return the encoded size of an event of a chunk that has come, and of one that has gone."""
    chance = random.Random(1)
    stored = stored_event(chance, chance.getrandbits(64))
    removed = removed_event(stored)
    return len(msgspec.msgpack.encode(stored)), len(msgspec.msgpack.encode(removed))
