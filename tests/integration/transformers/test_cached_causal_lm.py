"""A real model generates with the cache what it generates without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.integrations.transformers import (
    CachedCausalLM,
    connector_of,
    metadata_of,
    weights_fingerprint,
)
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests.fixtures.kv import make_config
from tests.fixtures.tiny_llama import VOCAB, make_model

CHUNK = 16


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model(0)


@contextlib.contextmanager
def engine_for(model: LlamaForCausalLM, **options: object) -> Iterator[LMCacheEngine]:
    config = make_config(chunk_size=CHUNK, **options)
    metadata = metadata_of(model, "test", config)
    allocator = HostMemoryAllocator(16 << 20)
    made = LMCacheEngine(
        config, metadata, allocator, ChunkedTokenDatabase(config, metadata), connector_of(model)
    )
    made.open()
    yield made
    made.close()
    allocator.check_integrity()
    assert allocator.used_bytes == 0


@pytest.fixture
def engine(model: LlamaForCausalLM) -> Iterator[LMCacheEngine]:
    with engine_for(model) as made:
        yield made


def prompt(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_tokens", [1, CHUNK, 5 * CHUNK + 7])
def test_tokens_equal_those_without_a_cache(
    model: LlamaForCausalLM, engine: LMCacheEngine, num_tokens: int
) -> None:
    plain, cached = CachedCausalLM(model, None), CachedCausalLM(model, engine)
    want = plain.generate(prompt(num_tokens), 12)
    first, second = cached.generate(prompt(num_tokens), 12), cached.generate(prompt(num_tokens), 12)
    assert want.tokens == first.tokens == second.tokens
    assert first.num_reused_tokens == 0
    assert second.num_reused_tokens == num_tokens - 1, (
        "one token is always computed: its logits are not cached"
    )


@pytest.mark.parametrize("num_tokens", [3 * CHUNK - 1, 3 * CHUNK])
@pytest.mark.parametrize("num_new", [1, 2, CHUNK + 1])
def test_the_next_turn_reuses_the_answer_where_it_is_kept(
    model: LlamaForCausalLM, num_tokens: int, num_new: int
) -> None:
    first = prompt(num_tokens)
    plain = CachedCausalLM(model, None)
    answer = plain.generate(first, num_new).tokens
    second = torch.cat([first, torch.tensor(answer), prompt(5, seed=2)])
    want = plain.generate(second, 12).tokens
    reused = {}
    for keep in (False, True):
        with engine_for(model, save_decode_cache=keep) as engine:
            cached = CachedCausalLM(model, engine)
            assert cached.generate(first, num_new).tokens == answer
            turn = cached.generate(second, 12)
            assert turn.tokens == want
            assert engine.lookup(first) == num_tokens, "the prompt alone is found as before"
            reused[keep] = turn.num_reused_tokens
    num_with_kv = num_tokens + num_new - 1
    assert reused[False] == num_tokens // CHUNK * CHUNK
    assert reused[True] == num_with_kv // CHUNK * CHUNK
    assert (reused[True] > reused[False]) is (num_with_kv // CHUNK > num_tokens // CHUNK)


def test_the_kept_kv_is_that_of_a_prefill(model: LlamaForCausalLM) -> None:
    """The KV that decoding left is, within rounding, the KV that a prefill of prompt and answer
    computes.
    """
    first = prompt(2 * CHUNK + 3)
    with engine_for(model, save_decode_cache=True) as engine:
        cached = CachedCausalLM(model, engine)
        answer = cached.generate(first, CHUNK).tokens
        everything = torch.cat([first, torch.tensor(answer[:-1])])
        cache, num_loaded = cached.load(torch.cat([everything, prompt(1)]))
        assert num_loaded == len(everything) // CHUNK * CHUNK
        assert engine.lookup(everything) == len(everything), "its last partial chunk too"
        assert engine.lookup(torch.cat([first, torch.tensor(answer)])) == num_loaded, (
            "the last token has no KV yet"
        )
        with torch.inference_mode():
            fresh = model(input_ids=everything[None], use_cache=True).past_key_values
        for got, wanted in zip(cache.layers, fresh.layers, strict=True):
            torch.testing.assert_close(
                got.keys[0], wanted.keys[0][:, :num_loaded], atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                got.values[0], wanted.values[0][:, :num_loaded], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize(
    "options", [{"rms_norm_eps": 1e-5}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}]
)
@pytest.mark.parametrize("revision", [None, "main"])
def test_the_same_weights_with_other_options_never_share(
    model: LlamaForCausalLM, options: dict[str, object], revision: str | None
) -> None:
    """The position encoding is no weight; KV under another one is other KV."""
    config = make_config(chunk_size=CHUNK)
    other = LlamaForCausalLM(
        LlamaConfig.from_dict(model.config.to_dict() | _as_rope(model, options))
    ).eval()
    other.load_state_dict(model.state_dict())
    assert weights_fingerprint(model) == weights_fingerprint(other)
    mine, theirs = (metadata_of(m, "test", config, revision) for m in (model, other))
    ids = prompt(3 * CHUNK)
    keys = {k for _, _, k in ChunkedTokenDatabase(config, mine).process_tokens(ids)}
    assert not keys & {k for _, _, k in ChunkedTokenDatabase(config, theirs).process_tokens(ids)}


def _as_rope(model: LlamaForCausalLM, options: dict[str, object]) -> dict[str, object]:
    """Later releases of transformers keep these options in `rope_parameters`."""
    rope = dict(getattr(model.config, "rope_parameters", None) or {})
    if not rope or not any(name.startswith("rope") for name in options):
        return options
    scaling = options.get("rope_scaling", {})
    assert isinstance(scaling, dict)
    theta = {"rope_theta": options["rope_theta"]} if "rope_theta" in options else {}
    return {"rope_parameters": rope | scaling | theta}


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_model_that_was_cast_never_shares_with_one_that_was_loaded_so(
    revision: str | None, tmp_path: Path
) -> None:
    """The cast rounds the frequencies of the rotation too, which are no weights; loading does
    not.
    """
    config = make_config(chunk_size=CHUNK)
    cast = make_model(0).to(torch.bfloat16)
    cast.config.dtype = torch.bfloat16
    cast.save_pretrained(tmp_path)
    loaded = [
        LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval() for _ in range(2)
    ]
    assert weights_fingerprint(cast) == weights_fingerprint(loaded[0])
    assert metadata_of(loaded[0], "test", config, revision) == metadata_of(
        loaded[1], "test", config, revision
    )
    assert (
        metadata_of(cast, "test", config, revision).revision
        != metadata_of(loaded[0], "test", config, revision).revision
    )


def test_a_model_with_a_sliding_window_is_refused() -> None:
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
    )
    config.sliding_window = 8
    with pytest.raises(ValueError, match="full attention"):
        metadata_of(MistralForCausalLM(config).eval(), "test", make_config(chunk_size=CHUNK))
