"""One call blends, if the engine's options and a certificate allow it; else it computes, and
says why.
"""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
from lmcache_core.blend.certificate import (
    BlendCertificate,
    BlendProfile,
    CertificateFolder,
    Quality,
    QualityBounds,
)
from lmcache_core.integrations.transformers import CachedCausalLM
from transformers import GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from tests.fixtures.blend_model import SEPARATOR, VOCAB, cached, document, small_llama, text


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_llama()


def certify(folder, engine, **figures):
    quality = {"kl_nats": 0.0, "top1_agreement": 1.0, "delta_loss_nats": 0.0} | figures
    profile = BlendProfile(
        engine.config.blend_policy, engine.config.blend_recompute_ratio, tuple(SEPARATOR.tolist())
    )
    found = Quality(num_prompts=2, num_tokens=20, delta_loss_error=0.0, reused_share=0.9, **quality)
    made = BlendCertificate(
        1, "test", engine.metadata.revision, profile, QualityBounds(), found, "0.1.0"
    )
    CertificateFolder(folder).save(made)


@pytest.fixture
def options(tmp_path):
    return {
        "enable_blending": True,
        "blend_certificates": str(tmp_path),
        "blend_min_tokens": 40,
        "blend_recompute_ratio": 0.25,
    }


@contextlib.contextmanager
def blending(model, folder, options, **more):
    """Yield an engine and its model that may blend, with a certificate."""
    with cached(model, **options | more) as (engine, _):
        certify(folder, engine)
        with contextlib.closing(CachedCausalLM(model, engine, SEPARATOR)) as made:
            yield engine, made


@pytest.mark.parametrize("keeps_answers", [False, True])
def test_one_call_blends(model, options, tmp_path, keeps_answers):
    first, second, question = document(30, 1), document(22, 2), text(5, 3)
    prompt = torch.cat([second, first, question])
    with blending(model, tmp_path, options, save_decode_cache=keeps_answers) as (engine, lm):
        assert lm.reason_against_blending is None
        assert not lm.generate(prompt, 1).is_blended, "nothing is cached yet"
        for one in (first, second):
            lm.keep_document(one)
        assert not lm.generate(prompt, 3).is_blended, "the prompt itself is cached, which is exact"
        other = torch.cat([first, second, question])
        answer = lm.generate(other, 4)
        assert answer.is_blended
        assert answer.num_reused_tokens == len(first) + len(second)
        assert len(answer.tokens) == 4
        everything = torch.cat([other, torch.tensor(answer.tokens)])
        assert engine.lookup(everything) == len(first), (
            "the first document alone: what was blended is not stored"
        )
        assert not lm.generate(other[:39], 1).is_blended, "shorter than blend_min_tokens"


SPOILED = {
    "none": lambda folder, _: shutil.rmtree(folder),
    "failed": lambda folder, engine: certify(folder, engine, kl_nats=0.2),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_without_a_certificate_prompts_are_computed_and_the_reason_logged(
    model, options, tmp_path, spoiled, caplog
):
    prompt = torch.cat([document(22, 2), document(30, 1), text(5, 3)])
    with cached(model, **options) as (engine, _):
        certify(tmp_path, engine)
        SPOILED[spoiled](tmp_path, engine)
        with contextlib.closing(CachedCausalLM(model, engine, SEPARATOR)) as plain:
            assert "certificate" in plain.reason_against_blending
            assert plain.reason_against_blending in caplog.text
            plain.keep_document(document(30, 1))
            answer = plain.generate(prompt, 8)
            assert not answer.is_blended
            assert answer.tokens == CachedCausalLM(model, None).generate(prompt, 8).tokens


def test_an_unknown_model_is_computed_and_the_reason_given(options, tmp_path):
    torch.manual_seed(0)
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = GraniteForCausalLM(
        GraniteConfig(**small, vocab_size=VOCAB + 2, residual_multiplier=0.2)
    ).eval()
    prompt = torch.cat([document(22, 2), document(30, 1), text(5, 3)])
    with blending(model, tmp_path, options) as (_, plain):
        assert "test: GraniteForCausalLM is not one of" in plain.reason_against_blending
        plain.keep_document(document(30, 1))
        answer = plain.generate(prompt, 4)
        assert not answer.is_blended
        assert answer.tokens == CachedCausalLM(model, None).generate(prompt, 4).tokens


def test_separators_may_be_anywhere_in_a_prompt(model, options, tmp_path):
    first, second, question = document(30, 1), document(22, 2), text(5, 3)
    prompts = {
        "at the end": torch.cat([second, first]),
        "twice": torch.cat([second, SEPARATOR, first, SEPARATOR, question]),
        "part of one at the end": torch.cat([second, first, question, SEPARATOR[:1]]),
    }
    with blending(model, tmp_path, options, blend_recompute_ratio=1.0) as (_, lm):
        for one in (first, second):
            lm.keep_document(one)
        for name, prompt in prompts.items():
            answer = lm.generate(prompt, 6)
            assert answer.is_blended, name
            assert answer.num_reused_tokens == len(first) + len(second), name
            assert answer.tokens == CachedCausalLM(model, None).generate(prompt, 6).tokens, name
        without = torch.cat([first[:-2], second[:-2], question])
        answer = lm.generate(without, 6)
        assert not answer.is_blended
        assert answer.tokens == CachedCausalLM(model, None).generate(without, 6).tokens


def test_documents_are_stored_as_computed_by_themselves(model, options, tmp_path):
    first, second = document(30, 1), document(50, 2)
    with blending(model, tmp_path, options) as (engine, lm):
        for bad, words in (
            (torch.cat([first, text(3, 1)]), "must end with the separator"),
            (torch.cat([first, second]), "has the separator 2 times"),
            (torch.zeros(0, dtype=torch.int64), "at least one token"),
        ):
            with pytest.raises(ValueError, match=words):
                lm.keep_document(bad)
            assert engine.lookup(bad) == 0, "nothing of it was written"
        lm.keep_document(first)
        lm.keep_document(second)
        assert engine.lookup(first) == len(first)
        assert engine.lookup(second) == len(second)
