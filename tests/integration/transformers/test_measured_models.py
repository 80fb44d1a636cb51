"""What `open` sees by running a model: the shape of its KV, and whether that may be reused."""

from __future__ import annotations

from collections.abc import Callable

import lmcache_core
import pytest
import torch
from lmcache_core.integrations.transformers import CachedCausalLM, metadata_of
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tests.fixtures.kv import make_config
from tests.fixtures.small_causal_lm import vary_weights
from tests.fixtures.tiny_llama import VOCAB, make_model

CHUNK = 16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
PROMPT = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(5))
Make = Callable[[], PreTrainedModel]


def opened(model: PreTrainedModel, **options: object) -> CachedCausalLM:
    return lmcache_core.open(model, memory_gb=0.02, chunk_size=CHUNK, **options)


def llama(**options: object) -> LlamaForCausalLM:
    return vary_weights(LlamaForCausalLM(LlamaConfig(**SIZES | options)).eval())


def rotating(**options: object) -> Make:
    return lambda: llama(rope_parameters={"rope_theta": 1e4, **options})


def falcon_7b() -> FalconForCausalLM:
    """Several heads, one KV head: the configuration does not say so under its usual name."""
    config = FalconConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCAB,
        multi_query=True,
        new_decoder_architecture=False,
    )
    return vary_weights(FalconForCausalLM(config).eval())


def latent(rank: int) -> DeepseekV3ForCausalLM:
    """Keeps a latent vector and a rotated key for all heads together, of `rank` and 8 elements."""
    config = DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=rank,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return vary_weights(DeepseekV3ForCausalLM(config).eval())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (falcon_7b, (2, 2, CHUNK, 1, 16)),
        (lambda: latent(16), (3, 2, CHUNK, 1, 12)),
        (lambda: latent(4), (3, 2, CHUNK, 1, 6)),
        (lambda: llama().to(torch.bfloat16), (3, 2, CHUNK, 4, 16)),
        (
            rotating(rope_type="yarn", factor=2.0, original_max_position_embeddings=64),
            (3, 2, CHUNK, 4, 16),
        ),
        (lambda: torch.compile(llama(), backend="eager"), (3, 2, CHUNK, 4, 16)),
    ],
)
def test_the_shape_is_that_of_the_kv(make: Make, shape: tuple[int, ...]) -> None:
    model = make()
    want = CachedCausalLM(model, None).generate(PROMPT, 8, ()).tokens
    with opened(model) as cache:
        assert cache.engine is not None
        assert cache.engine.metadata.kv_shape == shape
        for reused in (0, len(PROMPT) - 1):
            answer = cache.generate(PROMPT, 8, ())
            assert (answer.tokens, answer.num_reused_tokens) == (want, reused)


def test_latent_kv_of_other_sizes_never_shares_a_name() -> None:
    config = make_config(chunk_size=CHUNK)
    narrow, wide = (metadata_of(latent(size), "test", config, "main") for size in (15, 16))
    assert narrow.kv_shape == wide.kv_shape
    assert narrow.layout_fingerprint() != wide.layout_fingerprint()


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


def with_an_own_table() -> LlamaForCausalLM:
    """Declares the default rotation, and turns otherwise in long prompts."""
    model = llama()
    rotary = model.model.rotary_emb

    class OwnRotary(type(rotary)):
        def forward(
            self, x: torch.Tensor, position_ids: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = super().forward(x, position_ids)
            return (cos * 1.1, sin) if int(position_ids.max()) >= 256 else (cos, sin)

    rotary.__class__ = OwnRotary
    return model


def without_weights() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def packed() -> LlamaForCausalLM:
    """Weights of which `state_dict` gives no tensors, as packed integers are."""
    model = llama()

    class Packed(torch.nn.Linear):
        def get_extra_state(self) -> tuple[int, ...]:
            return (1, 2)

        def set_extra_state(self, state: object) -> None:
            return

    model.lm_head.__class__ = Packed
    return model


def that_counts() -> LlamaForCausalLM:
    """Changes whenever it runs, so that no mark would hold."""
    model = llama()
    norm = model.model.norm

    class Counting(type(norm)):
        num_runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_runs += 1
            return super().forward(x)

    norm.__class__ = Counting
    return model


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (rotating(**LONGROPE), "rope_type 'longrope' turns a token by the length of the prompt"),
        (with_an_own_table, "turns a token otherwise in prompts of more than 256 tokens"),
        (lambda: llama(is_causal=False), "the KV of a token depends on later tokens"),
        (
            lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=100_000)).eval(),
            "3 of its 3 layers do not keep the KV of every token",
        ),
        (without_weights, "model.embed_tokens.weight is not in memory (meta device"),
        (packed, "lm_head._extra_state is tuple, not a tensor that can be read"),
        (that_counts, "running it changes it"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_kv_cannot_be_reused_is_refused_with_the_reason(
    make: Make, found: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match="cannot be cached") as refused:
        opened(model)
    message = str(refused.value)
    assert f"({type(model).__name__})" in message
    assert found in message
    assert "only causal language models in eval mode, with full attention on every layer" in message
    with pytest.raises(ValueError, match="cannot be cached"):
        metadata_of(model, "test", make_config(chunk_size=CHUNK))


def test_memory_for_kv_is_taken_once_the_cache_has_answered() -> None:
    model = make_model(0)
    with opened(model) as cache:
        engine = cache.engine
        assert engine is not None
        asked: list[int] = []
        retrieve = engine.retrieve

        def watching(tokens: torch.Tensor, kvcaches: Callable[[int], object]) -> torch.Tensor:
            def allocate(num_tokens: int) -> object:
                asked.append(num_tokens)
                return kvcaches(num_tokens)

            return retrieve(tokens, kvcaches=allocate)

        engine.retrieve = watching
        cache.generate(PROMPT, 1)
        assert asked == [], "nothing was found"
        cache.generate(torch.cat([PROMPT[:40], PROMPT]), 1)
        assert asked == [2 * CHUNK]


def test_loaded_kv_is_held_once_and_layer_by_layer() -> None:
    model = make_model(0)
    with opened(model) as cache:
        cache.generate(PROMPT, 1)
        kv, num_reused = cache.load(PROMPT)
        assert num_reused == len(PROMPT) - 1
        storages = [
            {side.untyped_storage().data_ptr(): side.untyped_storage().nbytes()}
            for layer in kv.layers
            for side in (layer.keys, layer.values)
        ]
        distinct = {address: size for one in storages for address, size in one.items()}
        assert len(distinct) == len(kv.layers), "one for each layer, freed when it is appended to"
        assert sum(distinct.values()) == 3 * 2 * len(PROMPT) * 2 * 16 * 4


def test_engine_of_another_shape_is_refused() -> None:
    from lmcache_core.engine.engine import create_engine
    from lmcache_core.integrations.transformers import connector_of

    other = llama(num_key_value_heads=2)
    metadata = metadata_of(other, "test", make_config(chunk_size=CHUNK))
    engine = create_engine(make_config(chunk_size=CHUNK), metadata, connector_of(other))
    with engine, pytest.raises(ValueError, match="its engine was made for"):
        CachedCausalLM(llama(), engine)
