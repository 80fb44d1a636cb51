"""A causal LM that loads its prompts' KV from the cache and stores it there."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.config.options import shown
from lmcache_core.engine import LMCacheEngine
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.transformers.blended import BlendedPrefill, PromptBlender
from lmcache_core.integrations.transformers.identity import described
from lmcache_core.integrations.transformers.measured import cache_of, run, vocabulary_of
from lmcache_core.integrations.transformers.watched import KnownModel, WatchedModel

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """The result of one greedy generation.

    Attributes:
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

    The model may change: each call looks whether it has, and the engine then names KV by what it
    has become. What it had before is found again when it returns to that, such as to an adapter.
    While its KV cannot be cached (train mode, hooks), prompts are computed, and a warning says why.

    Args:
        model: A model in eval mode; not changed.
        engine: An open engine for this model (see `metadata_of`, `connector_of`). None computes
            everything.
        separator: Token ids that end each document of a prompt, `[num_tokens]`; for an engine with
            `enable_blending`.
        watched: The model as it was looked at for the engine's metadata; by default it is looked at
            here, which reads its weights again unless the engine has a revision of them.

    Raises:
        ConfigError: The engine has `enable_blending`, and there is no separator, or none that can
            occur in a prompt.
        TypeError: The separator is not token ids.
        ValueError: The model's KV cannot be cached, or is not what the engine was made for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: LMCacheEngine | None,
        separator: Sequence[int] | torch.Tensor | None = None,
        *,
        owns_engine: bool = False,
        watched: WatchedModel | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._owns_engine = owns_engine
        self._is_closed = False
        self._watched = watched
        self._looks: WeakKeyDictionary[DynamicCache, _Look | None] = WeakKeyDictionary()
        self._last_reason = ""
        self._blender: PromptBlender | None = None
        if engine is None:
            return
        if watched is None:
            weights = engine.metadata.revision.split(";")[0]
            given = None if weights.startswith("weights-") or not weights else weights
            self._watched = WatchedModel(model, engine.metadata.model_name, given)
        self._blended_revision = self._named(engine).metadata.revision
        if engine.config.enable_blending:
            ends = None if separator is None else _token_ids("separator", separator)
            if ends is not None and ends.ndim == 1:
                _check_vocabulary("separator", ends, model, ConfigError)
            self._blender = PromptBlender(model, engine, ends)

    def close(self) -> None:
        """Release what blending needs, and close the engine if it is owned. Idempotent."""
        self._is_closed = True
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
        if self._blender is None or self._engine is None:
            return "enable_blending is off"
        if self._blender.reason_against is None and not self._is_certified(self._engine.metadata):
            return "the model has changed since its certificate was read; open it again"
        return self._blender.reason_against

    def model_changed(self) -> None:
        """Look at the model again, and read its weights: call this after writing to them in a way
        that leaves no mark, through `.data`, through numpy, or in inference mode. Any other change
        is noticed.
        """
        if self._watched is not None:
            self._watched.forget()
            self._look()

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
        self._generate_exact(document, time.perf_counter(), 1, frozenset(), self._look())

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[Any] | Mapping[str, Any],
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | torch.Tensor | None = None,
        **others: object,
    ) -> Generation:
        """Generate greedily, reusing the prompt's cached KV and storing the rest. To sample, give
        the KV that `load` returns to the model's own `generate`, as `past_key_values`.

        With `save_decode_cache`, the KV of the generated tokens is also stored, so that a prompt
        that continues the answer reuses both.

        Args:
            input_ids: One prompt of at least one token, as a tokenizer returns it: a tensor on any
                device or a list, `[num_tokens]` or `[1, num_tokens]`, or a mapping with
                `input_ids`.
            max_new_tokens: Largest number of tokens to generate, at least 1.
            eos_token_id: Token, or tokens, that end the generation; by default those of the model's
                generation config. An empty sequence: none.

        Raises:
            RuntimeError: It was closed.
            TypeError: The prompt or `eos_token_id` is not token ids, or `max_new_tokens` not an
                integer; or there are other arguments.
            ValueError: The prompt is empty, or there are several; or `max_new_tokens` is below 1.
        """
        if others:
            raise TypeError(
                f"generate has no {', '.join(others)}: it is greedy; to sample, give the KV of load"
                " to the model's own generate, as past_key_values"
            )
        if not isinstance(max_new_tokens, SupportsIndex):
            raise TypeError(f"max_new_tokens={max_new_tokens!r}: must be an integer of at least 1")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be an integer of at least 1")
        input_ids = self._as_prompt(input_ids)
        ends = self._ends(eos_token_id)
        begin = time.perf_counter()
        look = self._look()
        if self._blender is not None and look is not None and self._is_certified(look.metadata):
            blended = self._blender.prefill(input_ids)
            if blended is not None and self._is_still(look):
                return self._generate_blended(input_ids, blended, begin, max_new_tokens, ends)
        return self._generate_exact(input_ids, begin, max_new_tokens, ends, look)

    def _generate_exact(
        self,
        input_ids: torch.Tensor,
        begin: float,
        max_new_tokens: int,
        ends: frozenset[int],
        look: _Look | None,
    ) -> Generation:
        with torch.inference_mode():
            cache, num_reused = self._load(input_ids, look)
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
        return self._load(input_ids, self._look())

    def _load(self, input_ids: torch.Tensor, look: _Look | None) -> tuple[DynamicCache, int]:
        """Return the same, for a model as it was looked at; None: it cannot be cached now."""
        layers: list[torch.Tensor] = []
        num_reused = 0
        if self._engine is not None and look is not None:
            kv = look.known.kv

            def allocate(num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
                # One tensor for each layer: it is freed as soon as the model has appended to it.
                layers[:] = kv.allocate(num_tokens)
                return [kv.sides_in(layer) for layer in layers]

            loaded = self._engine.retrieve(input_ids.cpu(), kvcaches=allocate)
            num_reused = min(int(loaded.sum()), len(input_ids) - 1)
            if num_reused and not self._is_still(look):
                num_reused = 0
        sides = [kv.kv_in(layer, num_reused) for layer in layers] if num_reused else []
        cache = cache_of(self._model, sides)
        self._looks[cache] = look
        return cache, num_reused

    def save(self, input_ids: torch.Tensor, cache: DynamicCache, num_known: int = 0) -> None:
        """Store the prompt's KV, unless the model has changed since `load` returned the cache.

        Args:
            input_ids: Prompt, shape `[num_tokens]`.
            cache: KV of at least these tokens.
            num_known: Number of tokens that came from the cache; whole chunks of these are not
                stored again.
        """
        if self._engine is None:
            return
        look = self._looks[cache] if cache in self._looks else self._look()
        if look is None:
            return
        chunk_size, kv = self._engine.config.chunk_size, look.known.kv
        mask = torch.ones(len(input_ids), dtype=torch.bool)
        mask[: num_known - num_known % chunk_size] = False

        with self._engine.naming:
            if not self._is_still(look):
                _LOG.warning(
                    "the model changed while it ran, not storing: tokens=%d", len(input_ids)
                )
                return
            kvcaches = [kv.sides_of(layer.keys, layer.values) for layer in cache.layers]
            self._engine.store(input_ids.cpu(), mask, kvcaches=kvcaches)

    def _look(self) -> _Look | None:
        """Return what the model is now, by which the engine names KV from now on; None if its KV
        cannot be cached, or there is no engine.
        """
        if self._engine is None:
            return None
        try:
            look = self._named(self._engine)
        except ValueError as exc:  # among them, a token database that cannot name another model
            if str(exc) != self._last_reason:
                _LOG.warning("computing without the cache: reason=%s", exc)
            self._last_reason = str(exc)
            return None
        self._last_reason = ""
        return look

    def _named(self, engine: LMCacheEngine) -> _Look:
        """Return what the model is now, by which the engine names KV from now on.

        Raises:
            ValueError: Its KV cannot be cached, or is not what the engine was made for.
        """
        assert self._watched is not None
        known = self._watched.known()
        ours = described(known, engine.metadata.model_name, engine.config)
        fixed = ("kv_shape", "kv_dtype_name", "layout")
        now, then = ([getattr(one, name) for name in fixed] for one in (ours, engine.metadata))
        if now != then:
            raise ValueError(
                f"model {engine.metadata.model_name!r} keeps KV of {now}, and its engine was made"
                f" for {then}; open it again"
            )
        with engine.naming:
            engine.use_revision(known.revision)
            return _Look(known, engine.metadata)

    def _is_still(self, look: _Look) -> bool:
        assert self._engine is not None
        assert self._watched is not None
        return self._engine.metadata is look.metadata and self._watched.is_still(look.known)

    def _is_certified(self, metadata: LMCacheEngineMetadata) -> bool:
        return metadata.revision == self._blended_revision

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

    def _as_prompt(self, input_ids: Any) -> torch.Tensor:
        """Return one prompt as `[num_tokens]` on the model's device."""
        if self._is_closed:
            raise RuntimeError("the cache was closed; open it again")
        if isinstance(input_ids, Mapping) and "input_ids" in input_ids:
            input_ids = input_ids["input_ids"]
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
        prompt = _as_tensor(input_ids[0] if is_batch else input_ids)
        if prompt is None:
            raise TypeError(_no_token_ids(input_ids))
        if prompt.ndim != 1 or len(prompt) == 0 or not _is_integral(prompt):
            raise ValueError(
                "input_ids must be one prompt of at least one token, not"
                f" {prompt.dtype} of shape {tuple(prompt.shape)}"
            )
        prompt = prompt.to(torch.int64)
        _check_vocabulary("input_ids", prompt, self._model, ValueError)
        return prompt.to(self._model.device)

    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        logits: torch.Tensor = run(self._model, tokens, cache).logits[0, -1]
        return logits


@dataclass(frozen=True, eq=False)
class _Look:
    """What one call saw of the model.

    Attributes:
        metadata: The engine's, which name KV by it. Renamed, the engine has others.
    """

    known: KnownModel
    metadata: LMCacheEngineMetadata


def _token_ids(name: str, value: Any) -> torch.Tensor:
    ids = _as_tensor(value)
    # Without a number in it, a list has torch's default dtype.
    if ids is None or (ids.numel() and not _is_integral(ids)):
        raise TypeError(f"{name}={shown(value)}: must be token ids")
    return ids.to(torch.int64)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return numbers as a tensor, from any dtype and byte order; None if they are none."""
    try:
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            value = value.astype(np.int64)  # torch has neither all unsigned nor foreign byte orders
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _is_integral(ids: torch.Tensor) -> bool:
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def _check_vocabulary(
    name: str, ids: torch.Tensor, model: PreTrainedModel, error: type[Exception]
) -> None:
    """Refuse ids that a model has no embedding for: on a device they would end the process."""
    size = vocabulary_of(model)
    if size is None or not ids.numel():
        return
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise error(f"{name} has the token id {int(outside[0])}: the model knows 0 … {size - 1}")


def _no_token_ids(value: object) -> str:
    return f"input_ids={shown(value)}: must be token ids, as a tokenizer returns them in input_ids"
