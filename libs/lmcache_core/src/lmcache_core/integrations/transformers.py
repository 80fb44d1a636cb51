"""Hugging Face transformers: a causal LM whose prompts' KV comes from, and goes to, the cache.

engine = LMCacheEngineBuilder.get_or_create("hf", config, metadata_of(model, name, config), connector_of(model))
cached = CachedCausalLM(model, engine)
answer = cached.generate(input_ids, max_new_tokens=32)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory.views import bytes_under

KVCaches = tuple[tuple[torch.Tensor, torch.Tensor], ...]
FMT = "huggingface"
_NOT_OF_THE_KV = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "id2label"}
    | {"label2id", "output_attentions", "output_hidden_states", "return_dict", "task_specific_params", "problem_type"}
)
"""Options of a model that change none of its KV, by name; whatever else there is takes part in the identity."""


@dataclass(frozen=True)
class Generation:
    """What one greedy generation gave.

    Attributes:
        tokens: Generated token ids.
        num_prompt_tokens: Length of the prompt.
        num_reused_tokens: How many of them were not computed.
        time_to_first_token_s: From the call until the first token was chosen, seconds.
    """

    tokens: list[int]
    num_prompt_tokens: int
    num_reused_tokens: int
    time_to_first_token_s: float


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Text that differs when any weight differs: the revision of a model that names none. Reads all weights once."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name};{tensor.dtype};{tuple(tensor.shape)};".encode())
        digest.update(bytes_under(tensor.detach().cpu().contiguous()))
    return f"weights-{digest.hexdigest()}"


def options_fingerprint(model: PreTrainedModel) -> str:
    """Text that differs when the same weights would give other KV: position encoding, activation, attention, norm."""
    options = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_THE_KV}
    options["attention"] = getattr(model.config, "_attn_implementation", None)
    text = json.dumps(options, sort_keys=True, default=str)
    return f"options-{xxhash.xxh3_128_hexdigest(text.encode())}"


def metadata_of(model: PreTrainedModel, model_name: str, config: LMCacheEngineConfig, revision: str | None = None) -> LMCacheEngineMetadata:
    """Describe the KV of a model.

    Args:
        model: A causal LM with rotary attention, on one device.
        model_name: Name under which its KV is shared.
        config: Gives the chunk size.
        revision: Revision of the weights; by default their fingerprint, so that other weights never share KV. The model's options,
            which decide about its KV too, always take part.

    Raises:
        ValueError: Not every layer keeps the KV of every token (sliding window, state space): such a model is not supported.
    """
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if not kinds <= {DynamicLayer}:
        raise ValueError(f"model {model_name!r} has layers that do not keep the KV of every token; only full attention is supported")
    shape = (_num_layers(model), 2, config.chunk_size, _num_kv_heads(model), _head_size(model))
    identity = f"{revision or weights_fingerprint(model)};{options_fingerprint(model)}"
    return LMCacheEngineMetadata(model_name, 1, 0, FMT, model.dtype, shape, revision=identity)


def connector_of(model: PreTrainedModel) -> VLLMNestedTupleGPUConnector:
    """The GPU connector for a model's KV."""
    return VLLMNestedTupleGPUConnector(_num_kv_heads(model) * _head_size(model), _num_layers(model))


class CachedCausalLM:
    """A causal LM in front of a cache engine.

    Args:
        model: In eval mode; not changed.
        engine: Opened; made for this model (see `metadata_of`, `connector_of`). None computes everything.
    """

    def __init__(self, model: PreTrainedModel, engine: LMCacheEngine | None) -> None:
        self._model = model
        self._engine = engine

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_id: int | None = None) -> Generation:
        """Greedy generation; the prompt's KV is reused where cached and stored where not.

        With `save_decode_cache`, the KV of the generated tokens is stored too, so that a prompt that continues the answer reuses both.

        Args:
            input_ids: Prompt, shape `[num_tokens]`, int64, at least one token.
            max_new_tokens: How many tokens to generate at most, at least 1.
            eos_token_id: Token that ends the generation.

        Raises:
            ValueError: The prompt is empty or not one-dimensional.
        """
        if input_ids.ndim != 1 or len(input_ids) == 0:
            raise ValueError(f"input_ids must be one prompt of at least one token, not of shape {tuple(input_ids.shape)}")
        begin = time.perf_counter()
        with torch.inference_mode():
            cache, num_reused = self.load(input_ids)
            loaded = time.perf_counter()
            logits = self._forward(input_ids[num_reused:], cache)
            tokens = [int(logits.argmax())]
            first_s = time.perf_counter() - begin
            if self._engine is not None:
                self._engine.note_prefill(len(input_ids) - num_reused, time.perf_counter() - loaded)
            self.save(input_ids, cache, num_reused)
            while len(tokens) < max_new_tokens and tokens[-1] != eos_token_id:
                tokens.append(int(self._forward(torch.tensor(tokens[-1:], device=input_ids.device), cache).argmax()))
            self._save_decoded(input_ids, tokens, cache)
        return Generation(tokens, len(input_ids), num_reused, first_s)

    def load(self, input_ids: torch.Tensor) -> tuple[DynamicCache, int]:
        """The cached KV of the prompt's longest prefix, fit for `past_key_values`.

        At least one token is left to compute, since its logits are not cached.

        Args:
            input_ids: Prompt, shape `[num_tokens]`.

        Returns:
            The cache and the number of tokens in it.
        """
        cache = DynamicCache(config=self._model.config)
        if self._engine is None:
            return cache, 0
        kvcaches = self._empty_kv(len(input_ids))
        num_loaded = int(self._engine.retrieve(input_ids.cpu(), kvcaches=kvcaches).sum())
        num_reused = min(num_loaded, len(input_ids) - 1)
        if num_reused:
            for i, (k, v) in enumerate(kvcaches):
                cache.update(_as_heads_first(k[:num_reused]), _as_heads_first(v[:num_reused]), i)
        return cache, num_reused

    def save(self, input_ids: torch.Tensor, cache: DynamicCache, num_known: int = 0) -> None:
        """Store the prompt's KV.

        Args:
            input_ids: Prompt, shape `[num_tokens]`.
            cache: KV of at least these tokens.
            num_known: How many of them came from the cache; whole chunks of these are not stored again.
        """
        if self._engine is None:
            return
        chunk_size = self._engine.config.chunk_size
        mask = torch.ones(len(input_ids), dtype=torch.bool)
        mask[: num_known - num_known % chunk_size] = False
        self._engine.store(input_ids.cpu(), mask, kvcaches=tuple(_kv_of(cache)))

    def _save_decoded(self, input_ids: torch.Tensor, tokens: list[int], cache: DynamicCache) -> None:
        """Store what generation added to the cache, if the engine is to keep it.

        The last generated token was never put through the model, so it has no KV. The chunk that the prompt ended in is stored again, since
        it goes on with generated tokens and so has another name.
        """
        with_kv = tokens[:-1]
        if self._engine is None or not self._engine.config.save_decode_cache or not with_kv:
            return
        everything = torch.cat([input_ids, torch.tensor(with_kv, dtype=input_ids.dtype, device=input_ids.device)])
        self.save(everything, cache, len(input_ids))

    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = self._model(input_ids=tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _empty_kv(self, num_tokens: int) -> KVCaches:
        shape = (num_tokens, _num_kv_heads(self._model), _head_size(self._model))
        options: dict[str, Any] = {"dtype": self._model.dtype, "device": self._model.device}
        return tuple((torch.empty(shape, **options), torch.empty(shape, **options)) for _ in range(_num_layers(self._model)))


def _kv_of(cache: DynamicCache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for layer in cache.layers:
        yield layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)


def _as_heads_first(side: torch.Tensor) -> torch.Tensor:
    return side.transpose(0, 1)[None].contiguous()


def _num_layers(model: PreTrainedModel) -> int:
    return int(model.config.num_hidden_layers)


def _num_kv_heads(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads)


def _head_size(model: PreTrainedModel) -> int:
    head_size = getattr(model.config, "head_dim", None)
    return int(head_size or model.config.hidden_size // model.config.num_attention_heads)
