"""A causal LM that loads its prompts' KV from the cache and stores it there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

import torch
from transformers import DynamicCache, PreTrainedModel

from lmcache_core.config.options import shown
from lmcache_core.engine import LMCacheEngine
from lmcache_core.integrations.transformers.blended import BlendedPrefill, PromptBlender
from lmcache_core.integrations.transformers.identity import kv_shape_of


@dataclass(frozen=True)
class Generation:
    """The result of one greedy generation.

    Attributes:
        tokens: Generated token ids.
        num_prompt_tokens: Length of the prompt.
        num_reused_tokens: Tokens of the prompt that were not computed.
        time_to_first_token_s: From the call until the first token was chosen, seconds.
        is_blended: Whether reused KV was computed at other positions; the answer then approximates
            that of a full prefill.
    """

    tokens: list[int]
    num_prompt_tokens: int
    num_reused_tokens: int
    time_to_first_token_s: float
    is_blended: bool = False


class CachedCausalLM:
    """A causal LM with a cache engine; a context manager that closes what it owns.

    Args:
        model: A model in eval mode; not changed.
        engine: An open engine for this model (see `metadata_of`, `connector_of`). None computes
            everything.
        separator: Token ids that end each document of a prompt, `[num_tokens]`; for an engine with
            `enable_blending`.
        owns_engine: Whether `close` closes the engine too.

    Raises:
        ConfigError: The engine has `enable_blending`, and there is no separator.
        TypeError: The separator is not token ids.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: LMCacheEngine | None,
        separator: Sequence[int] | torch.Tensor | None = None,
        *,
        owns_engine: bool = False,
    ) -> None:
        self._model = model
        self._engine = engine
        self._owns_engine = owns_engine
        self._blender: PromptBlender | None = None
        if engine is not None and engine.config.enable_blending:
            ends = None if separator is None else _token_ids("separator", separator)
            self._blender = PromptBlender(model, engine, ends)

    def close(self) -> None:
        """Release what blending needs, and close the engine if it is owned. Idempotent."""
        try:
            if self._blender is not None:
                self._blender.close()
        finally:
            if self._engine is not None and self._owns_engine:
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def engine(self) -> LMCacheEngine | None:
        """The engine, for `stats`, `lookup` and `prefetch`."""
        return self._engine

    @property
    def reason_against_blending(self) -> str | None:
        """Why prompts are not blended; None if they are."""
        return "enable_blending is off" if self._blender is None else self._blender.reason_against

    def keep_document(self, document: torch.Tensor | Sequence[Any]) -> None:
        """Store the KV of a document for prompts that contain it anywhere. It is computed alone or
        already known, never blended.

        Args:
            document: Token ids with the separator at the end, in a form that `generate` takes.

        Raises:
            ValueError: It is empty, or there are several; or the engine has `enable_blending`, and
                the document does not end with the separator, or contains it before its end.
        """
        document = self._as_prompt(document)
        if self._blender is not None:
            self._blender.check_document(document)
        self._generate_exact(document, time.perf_counter(), 1, frozenset())

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[Any],
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | torch.Tensor | None = None,
    ) -> Generation:
        """Generate greedily, reusing the prompt's cached KV and storing the rest.

        With `save_decode_cache`, the KV of the generated tokens is also stored, so that a prompt
        that continues the answer reuses both.

        Args:
            input_ids: One prompt of at least one token, as a tokenizer returns it: a tensor on any
                device or a list, `[num_tokens]` or `[1, num_tokens]`.
            max_new_tokens: Largest number of tokens to generate, at least 1.
            eos_token_id: Token, or tokens, that end the generation; by default those of the model's
                generation config. An empty sequence: none.

        Raises:
            TypeError: The prompt or `eos_token_id` is not token ids, or `max_new_tokens` not an
                integer.
            ValueError: The prompt is empty, or there are several; or `max_new_tokens` is below 1.
        """
        if not isinstance(max_new_tokens, SupportsIndex):
            raise TypeError(f"max_new_tokens={max_new_tokens!r}: must be an integer of at least 1")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be an integer of at least 1")
        input_ids = self._as_prompt(input_ids)
        ends = self._ends(eos_token_id)
        begin = time.perf_counter()
        blended = self._blender.prefill(input_ids) if self._blender is not None else None
        if blended is not None:
            return self._generate_blended(input_ids, blended, begin, max_new_tokens, ends)
        return self._generate_exact(input_ids, begin, max_new_tokens, ends)

    def _generate_exact(
        self, input_ids: torch.Tensor, begin: float, max_new_tokens: int, ends: frozenset[int]
    ) -> Generation:
        with torch.inference_mode():
            cache, num_reused = self.load(input_ids)
            loaded = time.perf_counter()
            logits = self._forward(input_ids[num_reused:], cache)
            tokens = [int(logits.argmax())]
            first_s = time.perf_counter() - begin
            if self._engine is not None:
                self._engine.note_prefill(len(input_ids) - num_reused, time.perf_counter() - loaded)
            self.save(input_ids, cache, num_reused)
            self._decode(tokens, cache, max_new_tokens, ends)
            self._save_decoded(input_ids, tokens, cache)
        return Generation(tokens, len(input_ids), num_reused, first_s)

    def _generate_blended(
        self,
        input_ids: torch.Tensor,
        blended: BlendedPrefill,
        begin: float,
        max_new_tokens: int,
        ends: frozenset[int],
    ) -> Generation:
        """Like `generate`, but nothing is stored, since this KV is not that of a full prefill."""
        tokens = [int(blended.logits[0, -1].argmax())]
        first_s = time.perf_counter() - begin
        with torch.inference_mode():
            self._decode(tokens, blended.caches[0], max_new_tokens, ends)
        return Generation(tokens, len(input_ids), blended.num_retrieved, first_s, is_blended=True)

    def _decode(
        self, tokens: list[int], cache: DynamicCache, max_new_tokens: int, ends: frozenset[int]
    ) -> None:
        """Append generated tokens to the first."""
        while len(tokens) < max_new_tokens and tokens[-1] not in ends:
            last = torch.tensor(tokens[-1:], device=self._model.device)
            tokens.append(int(self._forward(last, cache).argmax()))

    def load(self, input_ids: torch.Tensor) -> tuple[DynamicCache, int]:
        """Return the cached KV of the prompt's longest prefix, suitable for `past_key_values`.

        At least one token is left to compute, since its logits are not cached.

        Args:
            input_ids: Prompt, shape `[num_tokens]`.

        Returns:
            The cache and the number of tokens in it.
        """
        cache = DynamicCache(config=self._model.config)
        if self._engine is None:
            return cache, 0
        num_layers, num_heads, head_size = kv_shape_of(self._model)
        sides = torch.empty(
            (num_layers, 2, len(input_ids), num_heads, head_size),
            dtype=self._model.dtype,
            device=self._model.device,
        )
        kvcaches = tuple(tuple(layer) for layer in sides)
        num_loaded = int(self._engine.retrieve(input_ids.cpu(), kvcaches=kvcaches).sum())
        num_reused = min(num_loaded, len(input_ids) - 1)
        if num_reused:
            for i, layer in enumerate(kvcaches):
                # `[1, num_heads, num_tokens, head_size]`
                k, v = (side[:num_reused].transpose(0, 1)[None].contiguous() for side in layer)
                cache.update(k, v, i)
        return cache, num_reused

    def save(self, input_ids: torch.Tensor, cache: DynamicCache, num_known: int = 0) -> None:
        """Store the prompt's KV.

        Args:
            input_ids: Prompt, shape `[num_tokens]`.
            cache: KV of at least these tokens.
            num_known: Number of tokens that came from the cache; whole chunks of these are not
                stored again.
        """
        if self._engine is None:
            return
        chunk_size = self._engine.config.chunk_size
        mask = torch.ones(len(input_ids), dtype=torch.bool)
        mask[: num_known - num_known % chunk_size] = False
        kvcaches = [
            (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
            for layer in cache.layers
        ]
        self._engine.store(input_ids.cpu(), mask, kvcaches=kvcaches)

    def _save_decoded(
        self, input_ids: torch.Tensor, tokens: list[int], cache: DynamicCache
    ) -> None:
        """Store what generation added to the cache, if the engine has `save_decode_cache`.

        The last generated token never went through the model, so it has no KV. The chunk in which
        the prompt ended is stored again: with the generated tokens it has another name.
        """
        with_kv = tokens[:-1]
        if self._engine is None or not self._engine.config.save_decode_cache or not with_kv:
            return
        everything = torch.cat(
            [input_ids, torch.tensor(with_kv, dtype=input_ids.dtype, device=input_ids.device)]
        )
        self.save(everything, cache, len(input_ids))

    def _ends(self, eos_token_id: int | Sequence[int] | torch.Tensor | None) -> frozenset[int]:
        if eos_token_id is None:
            eos_token_id = getattr(
                getattr(self._model, "generation_config", None), "eos_token_id", None
            )
        if eos_token_id is None:
            return frozenset()
        # Tensors and numpy's numbers, too: generation compares with plain integers.
        return frozenset(_token_ids("eos_token_id", eos_token_id).flatten().tolist())

    def _as_prompt(self, input_ids: torch.Tensor | Sequence[Any]) -> torch.Tensor:
        """Return one prompt as `[num_tokens]` on the model's device."""
        ndim = getattr(input_ids, "ndim", None)
        if ndim is None and (
            isinstance(input_ids, str | bytes | Mapping) or not isinstance(input_ids, Iterable)
        ):
            raise TypeError(_no_token_ids(input_ids))
        is_batch = (
            any(isinstance(row, Sequence) for row in input_ids) if ndim is None else ndim == 2
        )
        if is_batch and len(input_ids) != 1:
            raise ValueError(
                f"input_ids holds {len(input_ids)} prompts: generate takes one, call it for each"
            )
        row = input_ids[0] if is_batch else input_ids
        try:
            prompt = torch.as_tensor(row, device=self._model.device)
        except TypeError as exc:
            raise TypeError(_no_token_ids(input_ids)) from exc
        if prompt.ndim != 1 or len(prompt) == 0 or prompt.is_floating_point():
            raise ValueError(
                "input_ids must be one prompt of at least one token, not"
                f" {prompt.dtype} of shape {tuple(prompt.shape)}"
            )
        return prompt

    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = self._model(
            input_ids=tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def _token_ids(name: str, value: Any) -> torch.Tensor:
    """Return an argument's token ids."""
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise TypeError(f"{name}={shown(value)}: must be token ids") from exc
    # Without a number in it, a list has torch's default dtype.
    if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise TypeError(f"{name}={shown(value)}: must be token ids")
    return ids


def _no_token_ids(value: object) -> str:
    return f"input_ids={shown(value)}: must be token ids, as a tokenizer returns them in input_ids"
