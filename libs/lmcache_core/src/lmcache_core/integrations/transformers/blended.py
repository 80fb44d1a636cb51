"""Blended prefill of Hugging Face models with a known architecture (`architectures.py`)."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from lmcache_core.blend import (
    BlendOutput,
    BlendRetriever,
    CacheBlendImpl,
    RotaryEmbedding,
    SPTBlendRetriever,
)
from lmcache_core.blend.certificate import BlendProfile, CertificateFolder
from lmcache_core.blend.retriever import split_after
from lmcache_core.blend.selection import create_policy
from lmcache_core.engine import LMCacheEngine
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.transformers.architectures import (
    reason_against_layers,
    reason_against_rotation,
    rope_parameters_of,
)
from lmcache_core.integrations.transformers.watched import reason_against_state

_LOG = logging.getLogger(__name__)
ROWS_OF_A_BLOCK = 128
"""Computed tokens per call of attention."""


@dataclass(frozen=True, eq=False)
class BlendedPrefill:
    """The result of a blended prefill.

    Attributes:
        logits: Logits of the last tokens of each request, `[num_requests, logits_to_keep,
        vocabulary]`.
        caches: KV of each request, suitable for `past_key_values`. It approximates that of a full
            prefill.
        num_retrieved: Tokens of the batch whose KV was found.
        num_computed: Tokens that were computed on the layers after the check layer.
    """

    logits: torch.Tensor
    caches: list[DynamicCache]
    num_retrieved: int
    num_computed: int


class BlendingModel:
    """Runs a model layer by layer, between a retriever and an executor.

    Args:
        model: A model of one of `BLENDED_ARCHITECTURES`, in eval mode; not changed.
        retriever: Finds the KV of parts of prompts.
        executor: Executor with the model's encoders; must not be shared.

    Raises:
        ValueError: The model's layers are unknown.
    """

    def __init__(
        self, model: PreTrainedModel, retriever: BlendRetriever, executor: CacheBlendImpl
    ) -> None:
        reason = reason_against_layers(model)
        if reason is not None:
            raise ValueError(reason)
        self._model = model
        self._retriever = retriever
        self._executor = executor
        self._one_batch = threading.Lock()

    def prefill(
        self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor, logits_to_keep: int = 1
    ) -> BlendedPrefill:
        """Compute the KV of a batch of prompts, reusing what is found. One batch at a time.

        Args:
            input_tokens: Token ids of all prompts, concatenated, `[num_tokens]`.
            query_start_loc: First token of each, followed by the number of tokens, `[num_requests +
            1]`.
            logits_to_keep: Number of tokens at the end of each prompt for which logits are
            returned.

        Raises:
            ValueError: A prompt has fewer tokens, or some of these were retrieved and not computed.
        """
        lengths = [end - start for start, end in pairwise(query_start_loc.tolist())]
        shortest = min(lengths, default=0)
        if shortest < logits_to_keep:
            raise ValueError(
                f"logits of the last {logits_to_keep} tokens are requested, and a prompt of the"
                f" batch has {shortest}"
            )
        with self._one_batch, torch.inference_mode():
            return self._prefill(input_tokens, query_start_loc, logits_to_keep)

    def _prefill(
        self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor, logits_to_keep: int
    ) -> BlendedPrefill:
        task = self._retriever.new_request(input_tokens, query_start_loc)
        inner = self._model.model
        starts = query_start_loc.tolist()
        device = input_tokens.device
        positions = torch.cat(
            [torch.arange(end - start, device=device) for start, end in pairwise(starts)]
        )
        computed = torch.arange(len(positions), device=device)
        short = starts
        hidden = inner.embed_tokens(input_tokens)
        rotation = self._rotation(hidden, positions)
        blocks = _blocks_of(positions, starts, starts, hidden.dtype)
        kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        num_retrieved = 0
        for layer_id, layer in enumerate(inner.layers):
            found = task.result(layer_id)
            num_retrieved = int(found.valid_mask.sum())
            q, k, v = self._qkv(layer, hidden, rotation)
            out: BlendOutput = self._executor.blend(
                layer_id,
                found.k,
                found.v,
                found.valid_mask,
                found.original_positions,
                q,
                k,
                v,
                positions,
                query_start_loc,
                0,
            )
            if out.query_start_loc is not None:
                computed, short = out.local_indices, out.query_start_loc.tolist()
                hidden, positions = hidden[computed], out.positions
                rotation = self._rotation(hidden, positions)
                blocks = _blocks_of(positions, short, starts, hidden.dtype)
            kv.append((out.k, out.v))
            hidden = self._finish(layer, hidden, out, blocks)
        kept = torch.arange(-logits_to_keep, 0, device=device)
        rows, wanted = (
            torch.tensor(ends[1:], device=device)[:, None] + kept for ends in (short, starts)
        )
        if (rows < 0).any() or not torch.equal(computed[rows], wanted):
            raise ValueError(
                f"logits of the last {logits_to_keep} tokens of each prompt are requested, and some"
                " of these were retrieved"
            )
        logits: torch.Tensor = self._model.lm_head(inner.norm(hidden[rows]))
        return BlendedPrefill(logits, self._caches(kv, starts), num_retrieved, len(positions))

    def _rotation(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for all layers, `[num_tokens, 1, head_size]`."""
        cos, sin = self._model.model.rotary_emb(hidden[None], positions[None])
        return cos[0, :, None], sin[0, :, None]

    def _qkv(
        self, layer: Any, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        q, k, v = (
            side(x).view(len(x), -1, attention.head_dim)
            for side in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):  # Qwen3
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = (_rotated(side, *rotation) for side in (q, k))
        return q.flatten(1), k.flatten(1), v.flatten(1)

    def _finish(
        self, layer: Any, hidden: torch.Tensor, out: BlendOutput, blocks: list[_Block]
    ) -> torch.Tensor:
        attention = layer.self_attn
        q, k, v = (
            x.view(len(x), -1, attention.head_dim).transpose(0, 1)[None]
            for x in (out.q, out.k, out.v)
        )
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, block.rows],
                k[:, :, block.keys],
                v[:, :, block.keys],
                attn_mask=block.mask,
                is_causal=block.mask is None,
                scale=attention.scaling,
                enable_gqa=True,
            )
            for block in blocks
        ]
        attended = torch.cat([part[0].transpose(0, 1).flatten(1) for part in parts])
        hidden = hidden + attention.o_proj(attended)
        finished: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return finished

    def _caches(
        self, kv: list[tuple[torch.Tensor, torch.Tensor]], starts: list[int]
    ) -> list[DynamicCache]:
        caches = []
        for start, end in pairwise(starts):
            cache = DynamicCache(config=self._model.config)
            for i, sides in enumerate(kv):
                shape = end - start, -1, self._model.model.layers[i].self_attn.head_dim
                heads = (side[start:end].view(shape).transpose(0, 1)[None] for side in sides)
                cache.update(*heads, i)  # which copies
            caches.append(cache)
        return caches


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows of one request that are computed together, and the keys that the last of them sees.

    Attributes:
        rows: Range among the computed rows.
        keys: Range among all tokens.
        mask: Added to their products, `[num_rows, num_keys]`; None if all tokens of a request are
            computed.
    """

    rows: slice
    keys: slice
    mask: torch.Tensor | None


def _blocks_of(
    positions: torch.Tensor, short: list[int], long: list[int], dtype: torch.dtype
) -> list[_Block]:
    """Split the computed rows into blocks, so that early ones do not read keys that they do not
    see.

    Args:
        positions: Positions of the computed rows, rising within each request, `[num_rows]`.
        short: First computed row of each request, followed by their number.
        long: First token of each request, followed by their number.
        dtype: Dtype of Q and K.
    """
    blocks, last = [], positions.tolist()
    for (a, b), (start, end) in zip(pairwise(short), pairwise(long), strict=True):
        if b - a == end - start:
            blocks.append(_Block(slice(a, b), slice(start, end), None))
            continue
        for first in range(a, b, ROWS_OF_A_BLOCK):
            rows = slice(first, min(first + ROWS_OF_A_BLOCK, b))
            num_keys = last[rows.stop - 1] + 1
            is_later = torch.arange(num_keys, device=positions.device)[None] > positions[rows, None]
            mask = torch.zeros(is_later.shape, dtype=dtype, device=positions.device).masked_fill_(
                is_later, -torch.inf
            )
            blocks.append(_Block(rows, slice(start, start + num_keys), mask))
    return blocks


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    turned: torch.Tensor = x * cos + torch.cat([-second, first], -1) * sin
    return turned


def blending_model_of(
    model: PreTrainedModel, retriever: BlendRetriever, profile: BlendProfile
) -> BlendingModel:
    """Return a model that blends according to a profile.

    Raises:
        ValueError: The model's layers or its rotation are unknown; or it is in train mode, or has
            hooks.
    """
    reason = (
        reason_against_layers(model)
        or reason_against_rotation(model)
        or reason_against_state(model)
    )
    if reason is not None:
        raise ValueError(reason)
    executor = CacheBlendImpl(
        profile.recompute_ratio, create_policy(profile.policy, profile.recompute_ratio)
    )
    executor.set_mover(RotaryEmbedding(rope_parameters_of(model.config)).mover)
    return BlendingModel(model, retriever, executor)


class PromptBlender:
    """Blends prompts for which that is allowed and worth it, according to the engine's options.

    Args:
        model: A model in eval mode.
        engine: An open engine with `enable_blending`.
        separator: Token ids that end each document, `[num_tokens]`.

    Raises:
        ConfigError: The separator is missing.
    """

    def __init__(
        self, model: PreTrainedModel, engine: LMCacheEngine, separator: torch.Tensor | None
    ) -> None:
        if separator is None:
            raise ConfigError(
                "enable_blending=True: blending needs a separator, the token ids that end each"
                " document; give it, or leave blending out"
            )
        if separator.ndim != 1 or len(separator) == 0:
            raise ConfigError(
                f"separator={separator.tolist()!r}: must be a row of at least one token id, such as"
                " [250]"
            )
        config, metadata = engine.config, engine.metadata
        self._engine = engine
        self._separator = separator.cpu().to(torch.int64)
        self._profile = BlendProfile(
            config.blend_policy, config.blend_recompute_ratio, tuple(self._separator.tolist())
        )
        self._retriever: SPTBlendRetriever | None = None
        self._blended: BlendingModel | None = None
        self.reason_against = self._reason_against(model)
        """Why this model is not blended; None if it is."""
        if self.reason_against is None:
            self._retriever = SPTBlendRetriever(self._separator, engine, metadata, model.device)
            self._blended = blending_model_of(model, self._retriever, self._profile)
        else:
            _LOG.warning("computing prompts without blending: reason=%s", self.reason_against)

    def close(self) -> None:
        """End the retriever's threads. Idempotent."""
        if self._retriever is not None:
            self._retriever.close()

    def check_document(self, document: torch.Tensor) -> None:
        """Check that a document would be found in a prompt.

        Args:
            document: Token ids, `[num_tokens]`, at least one.

        Raises:
            ValueError: It does not end with the separator, or contains it before its end.
        """
        segments = split_after(document.cpu().to(torch.int64), self._separator)
        width = len(self._separator)
        if len(segments[-1]) < width or not torch.equal(segments[-1][-width:], self._separator):
            raise ValueError(
                f"a document must end with the separator, {self._separator.tolist()}; it would be"
                " found in no prompt"
            )
        if len(segments) > 1:
            raise ValueError(
                f"a document has the separator {len(segments)} times; keep each part of it as a"
                " document of its own"
            )

    def prefill(self, input_ids: torch.Tensor) -> BlendedPrefill | None:
        """Compute a prompt's KV, reusing the cached KV of its documents.

        Args:
            input_ids: Prompt, `[num_tokens]`.

        Returns:
            None if the longest cached prefix, which is exact, is as good, or if the prompt is not
                to be blended.
        """
        if self._blended is None or len(input_ids) < self._engine.config.blend_min_tokens:
            return None
        tokens = input_ids.cpu().to(torch.int64)
        segments = split_after(tokens, self._separator)
        if len(segments) < 2:
            return None
        if sum(map(self._engine.lookup, segments)) <= self._engine.lookup(tokens):
            return None
        return self._blended.prefill(input_ids, torch.tensor([0, len(input_ids)]))

    def _reason_against(self, model: PreTrainedModel) -> str | None:
        config, metadata = self._engine.config, self._engine.metadata
        reason = reason_against_layers(model) or reason_against_rotation(model)
        if reason is not None:
            return f"{metadata.model_name}: {reason}"
        if config.blend_certificates is None:
            return (
                "blend_certificates names no folder; make a certificate with `python -m"
                " lmcache_core.blend.certify`"
            )
        return CertificateFolder(Path(config.blend_certificates)).reason_against(
            metadata.model_name, metadata.revision, self._profile
        )
