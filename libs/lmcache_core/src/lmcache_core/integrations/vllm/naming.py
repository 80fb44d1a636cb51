"""Names the chunks of requests, as soon as that can be done."""

from __future__ import annotations

from typing import Any

from lmcache_core.integrations.vllm.identity import Roots
from lmcache_core.integrations.vllm.names import ChunkNames, spans_of
from lmcache_core.integrations.vllm.requests import RequestState


class Namer:
    """Keeps the names of a request's chunks up to its tokens.

    Args:
        roots: What the chains begin with.
        chunk_size: Tokens in a chunk.
        contents: What else decides about the KV of multimodal contents; None: they have no names.
    """

    def __init__(self, roots: Roots, chunk_size: int, contents: str | None = "") -> None:
        self._roots = roots
        self._chunk_size = chunk_size
        self._contents = contents

    def name(self, state: RequestState) -> ChunkNames | None:
        """The names of a request's chunks, as far as its tokens are known; None when they cannot be
        told (yet).

        Under other roots than before, nothing of the request counts as stored. Nor when its prompt
        has grown: a session that goes on has dropped the token that was generated last, and may
        have new contents.
        """
        request = state.request
        if state.names is not None and not self._roots.adapters.is_loaded(
            _adapter(request), state.adapter
        ):
            state.is_outdated = True
        if state.is_outdated:
            return None
        version = self._roots.version, request.num_prompt_tokens
        if state.names is None or state.names_version != version:
            root, spans = self._roots.root_of(request), spans_of(request, self._contents)
            if root is None or spans is None or getattr(request, "prompt_embeds", None) is not None:
                return None
            state.names, state.names_version = ChunkNames(root, self._chunk_size, spans), version
            state.adapter = self._roots.adapters.name_of(_adapter(request)) or ""
            state.stored = [0] * len(state.stored)
        may_lose_tokens = getattr(request, "resumable", False)
        state.names.extend(
            request.all_token_ids[: request.num_prompt_tokens]
            if may_lose_tokens
            else request.all_token_ids
        )
        return state.names

    def check(self, state: RequestState) -> bool:
        """Whether what the request computes now has the names that it was given; takes longer
        than `name`.
        """
        state.is_outdated |= not self._roots.adapters.is_unchanged(_adapter(state.request))
        return not state.is_outdated


def _adapter(request: Any) -> Any:
    return getattr(request, "lora_request", None)
