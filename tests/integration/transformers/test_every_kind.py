"""Every kind of causal LM that transformers knows answers with the cache as without, or is refused
when it is opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Final

import lmcache_core
import pytest
import torch
import transformers
from lmcache_core.integrations.transformers import CachedCausalLM
from transformers import DynamicCache, PreTrainedModel

from tests.fixtures.small_causal_lm import KINDS, VARIANTS, VOCAB, has_variant, small_model

pytestmark = pytest.mark.filterwarnings("ignore")

CHUNK: Final = 16
NOT_BUILT: Final = frozenset(
    {*("gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "zamba", "zamba2")}
)
"""Kinds that cannot be built small here. They count neither as right nor as refused."""
REFUSED: Final = frozenset(
    {
        *("afmoe", "axk2", "bamba", "bert", "bert-generation", "big_bird", "blt"),
        *("camembert", "cohere2", "cohere2_moe", "cpmant", "cwm", "data2vec-text"),
        *("deepseek_v32", "deepseek_v4", "electra", "ernie", "exaone4", "exaone_moe"),
        *("falcon_h1", "falcon_mamba", "gemma2", "gemma3", "gemma3_text"),
        *("gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified"),
        *("gemma4_unified_text", "glm_moe_dsa", "gpt_oss", "granite_swa"),
        *("granitemoe_swa", "granitemoehybrid", "hy_v4", "inkling_text", "jamba"),
        *("kimi_linear", "llama4", "llama4_text", "mamba", "mamba2", "megatron-bert"),
        *("mimo_v2_flash", "minimax", "ministral", "mistral", "modernbert-decoder"),
        *("moshi", "musicgen", "musicgen_melody", "nemotron_h", "olmo3", "olmo_hybrid"),
        *("openai-gpt", "prophetnet", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text"),
        *("recurrent_gemma", "reformer", "rembert", "roberta", "roberta-prelayernorm"),
        *("roc_bert", "roformer", "rwkv", "vaultgemma", "xlm", "xlm-roberta"),
        *("xlm-roberta-xl", "xlnet", "xlstm", "xmod", "zaya"),
    }
)
"""Kinds whose own default is refused: windows, state spaces, encoders, caches of their own."""


def prompts() -> list[torch.Tensor]:
    """Prompts that share prefixes: some end in them, others continue differently."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(3, VOCAB - 8, (70,), generator=generator)
    other = torch.randint(3, VOCAB - 8, (25,), generator=generator)
    longer = torch.cat([first, other])
    return [first, first[:40], torch.cat([first[:40], other]), longer, first[:17], longer]


@pytest.fixture(autouse=True)
def quiet_on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        torch.set_num_threads(threads)


def last_logits(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.inference_mode():
        output = model(input_ids=tokens[None], past_key_values=cache, use_cache=True)
    return output.logits[0, -1]


def verdict_on(kind: str, variant: str) -> tuple[str, str]:
    """Return "not built", "refused" or "right", and why."""
    try:
        model = small_model(kind, variant)
    except Exception as exc:
        return "not built", f"{type(exc).__name__}: {exc}".partition("\n")[0]
    try:
        cache = lmcache_core.open(model, memory_gb=0.05, chunk_size=CHUNK)
    except ValueError as exc:
        is_ours = f"({type(model).__name__}) cannot be cached: " in str(exc)
        return "refused" if is_ours else "foreign error", str(exc)
    plain, num_reused = CachedCausalLM(model, None), 0
    with cache:
        for prompt in prompts():
            got = cache.generate(prompt, 6, ())
            assert got.tokens == plain.generate(prompt, 6, ()).tokens
            num_reused += got.num_reused_tokens
        kv, num_loaded = cache.load(prompt)
        assert num_loaded == len(prompt) - 1
        hit = last_logits(model, prompt[num_loaded:], kv)
        cold = last_logits(model, prompt, DynamicCache(config=model.config))
        torch.testing.assert_close(hit, cold, atol=1e-3 * cold.abs().max().item(), rtol=1e-3)
    assert num_reused > 0
    return "right", f"{num_reused} tokens reused"


@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_right_or_refused(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {"": verdict_on(kind, "")}
        for variant in VARIANTS:
            if variant and found[""][0] != "not built" and has_variant(kind, variant):
                found[variant] = verdict_on(kind, variant)
    for variant, (verdict, why) in found.items():
        print(f"{kind}{f' ({variant})' if variant else ''}: {verdict}: {why}")
    want = "not built" if kind in NOT_BUILT else "refused" if kind in REFUSED else "right"
    assert found[""][0] == want, found[""][1]
    assert {verdict for verdict, _ in found.values()} <= {"not built", "refused", "right"}
