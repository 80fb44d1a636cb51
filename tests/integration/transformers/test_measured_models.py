"""What `open` sees by running a model: the shape of its KV, and whether that may be reused."""

from __future__ import annotations

from collections.abc import Callable

import lmcache_core
import numpy as np
import pytest
import torch
from lmcache_core.integrations.transformers import CachedCausalLM, metadata_of
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
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


def with_images() -> LlavaForConditionalGeneration:
    config = LlavaConfig(
        text_config=LlamaConfig(**SIZES, num_key_value_heads=2),
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        image_token_index=VOCAB - 1,
    )
    return vary_weights(LlavaForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (falcon_7b, (2, 2, CHUNK, 1, 16)),
        (lambda: latent(16), (3, 2, CHUNK, 1, 12)),
        (lambda: latent(15), (3, 2, CHUNK, 1, 12)),
        (lambda: latent(8), (3, 2, CHUNK, 1, 8)),
        (lambda: latent(4), (3, 2, CHUNK, 1, 6)),
        (with_images, (3, 2, CHUNK, 2, 16)),
        (lambda: llama().to(torch.bfloat16), (3, 2, CHUNK, 4, 16)),
        (rotating(rope_type="linear", factor=2.0), (3, 2, CHUNK, 4, 16)),
        (
            rotating(rope_type="yarn", factor=2.0, original_max_position_embeddings=64),
            (3, 2, CHUNK, 4, 16),
        ),
        (lambda: torch.compile(llama(), backend="eager"), (3, 2, CHUNK, 4, 16)),
    ],
)
def test_shape_is_that_of_the_kv_that_comes_back(make: Make, shape: tuple[int, ...]) -> None:
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


def encoder() -> BertLMHeadModel:
    return vary_weights(BertLMHeadModel(BertConfig(**SIZES)).eval())


def in_train_mode() -> LlamaForCausalLM:
    model = llama(attention_dropout=0.5)
    model.model.layers[1].train()
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


def hooked() -> LlamaForCausalLM:
    model = llama()
    model.model.norm.register_forward_hook(lambda _m, _i, output: output * 2)
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
        (rotating(rope_type="dynamic", factor=2.0), "rope_type 'dynamic' turns a token by"),
        (with_an_own_table, "turns a token otherwise in prompts of more than 256 tokens"),
        (lambda: llama(is_causal=False), "the KV of a token depends on later tokens"),
        (lambda: llama(is_causal=False).to(torch.bfloat16), "keys of layer 1 differ by"),
        (encoder, "it returns NoneType, not the cache of KV"),
        (
            lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=100_000)).eval(),
            "3 of its 3 layers do not keep the KV of every token",
        ),
        (in_train_mode, "model.layers.1 is in train mode, call model.eval()"),
        (without_weights, "model.embed_tokens.weight is not in memory (meta device"),
        (packed, "lm_head._extra_state is tuple, not a tensor that can be read"),
        (hooked, "model.norm has a hook"),
        (that_counts, "running it changes it"),
        (lambda: LlamaModel(LlamaConfig(**SIZES)).eval(), "BaseModelOutputWithPast has no logits"),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(d_model=32, d_ff=32, num_layers=2, num_heads=2, d_kv=16, vocab_size=VOCAB)
            ).eval(),
            "running it on a few tokens failed: ValueError",
        ),
        (
            lambda: OpenAIGPTLMHeadModel(
                OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=2, vocab_size=VOCAB)
            ).eval(),
            "it returns NoneType, not the cache of KV",
        ),
        (
            lambda: RwkvForCausalLM(
                RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCAB)
            ).eval(),
            "it returns NoneType, not the cache of KV",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_may_not_be_reused_is_refused_with_what_was_found(make: Make, found: str) -> None:
    model = make()
    with pytest.raises(ValueError, match="cannot be cached") as refused:
        opened(model)
    told = str(refused.value)
    assert f"({type(model).__name__})" in told
    assert found in told
    assert "only causal language models in eval mode, with full attention on every layer" in told
    with pytest.raises(ValueError, match="cannot be cached"):
        metadata_of(model, "test", make_config(chunk_size=CHUNK))


def test_engine_of_another_shape_is_refused() -> None:
    from lmcache_core.engine.engine import create_engine
    from lmcache_core.integrations.transformers import connector_of

    other = llama(num_key_value_heads=2)
    metadata = metadata_of(other, "test", make_config(chunk_size=CHUNK))
    engine = create_engine(make_config(chunk_size=CHUNK), metadata, connector_of(other))
    with engine, pytest.raises(ValueError, match="its engine was made for"):
        CachedCausalLM(llama(), engine)


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


FORMS = {
    **{name: PROMPT.numpy().astype(name) for name in ("int8", "int16", "uint8", "uint16")},
    **{name: PROMPT.numpy().astype(name) for name in ("uint32", "uint64", ">i8", ">u2", ">i4")},
    "torch.int16": PROMPT.to(torch.int16),
    "torch.uint16": PROMPT.to(torch.uint16),
    "row": PROMPT.numpy().astype("uint16")[None],
    "numbers": [np.uint16(one) for one in PROMPT],
}


@pytest.mark.parametrize("form", FORMS)
def test_token_ids_of_any_integer_type_are_taken(form: str) -> None:
    if form == "int8":
        ids = PROMPT % 100
        given: object = ids.numpy().astype("int8")
    else:
        ids, given = PROMPT, FORMS[form]
    plain = CachedCausalLM(make_model(0), None)
    assert plain.generate(given, 8).tokens == plain.generate(ids, 8).tokens


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([1, None], TypeError),
        ([object()], TypeError),
        (np.array(["a"]), TypeError),
        ([1 << 70], TypeError),
        ([torch.tensor([1, 2])], TypeError),
        (torch.tensor([True, False]), ValueError),
        ([1, VOCAB], ValueError),
        ([-1, 1], ValueError),
        (np.array([1, 1 << 63], dtype="uint64"), ValueError),
    ],
)
def test_what_is_no_token_id_is_refused(given: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="input_ids"):
        CachedCausalLM(make_model(0), None).generate(given, 1)


@pytest.mark.parametrize(
    ("separator", "told"),
    [
        (150, "separator=150: must be a row of at least one token id"),
        ([[150]], r"separator=\[\[150\]\]: must be a row"),
        ([], r"separator=\[\]: must be a row"),
        ([VOCAB], f"separator has the token id {VOCAB}: the model knows 0 … {VOCAB - 1}"),
        ([-1], "separator has the token id -1"),
    ],
)
def test_separator_that_occurs_in_no_prompt_is_refused(separator: object, told: str) -> None:
    with pytest.raises(lmcache_core.ConfigError, match=told):
        opened(make_model(0), separator=separator, enable_blending=True)
