"""Rotary embeddings against transformers' own, and back."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.blend import RopeParameters, RotaryEmbedding
from lmcache_core.integrations.transformers.blended import rope_parameters_of
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

HEAD_SIZE = 64
MAX_POSITIONS = 512
SCALINGS = (
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    }
    | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    | {"original_max_position_embeddings": 128},
)
IDS = [f"{scaling['rope_type']}{i}" for i, scaling in enumerate(SCALINGS)]


def config_of(scaling):
    return LlamaConfig(
        hidden_size=2 * HEAD_SIZE,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=scaling,
    )


def theirs(config, k, positions):
    """What transformers makes of K `[num_tokens, heads, head_size]`."""
    cos, sin = LlamaRotaryEmbedding(config)(k, positions[None])
    first = k.transpose(0, 1)[None]
    return apply_rotary_pos_emb(first, first, cos, sin)[1][0].transpose(0, 1)


def some_k(num_tokens, dtype=torch.float32, head_size=HEAD_SIZE):
    return torch.randn(
        num_tokens, 3, head_size, generator=torch.Generator().manual_seed(num_tokens)
    ).to(dtype)


@pytest.mark.parametrize("scaling", SCALINGS, ids=IDS)
def test_keys_are_rotated_as_by_transformers(scaling):
    num_tokens, config = 900, config_of(scaling)
    embedding = RotaryEmbedding(rope_parameters_of(config), num_tokens, num_tokens)
    k, positions = some_k(num_tokens), torch.arange(num_tokens)
    _, ours = embedding.encode(positions, k, k)
    # transformers computes the stretched base of "dynamic" in float32
    tolerance = 2e-3 if scaling["rope_type"] == "dynamic" else 1e-5
    torch.testing.assert_close(ours, theirs(config, k, positions), rtol=0, atol=tolerance)


@pytest.mark.parametrize("scaling", SCALINGS, ids=IDS)
def test_keys_are_decoded_and_moved_to_other_positions(scaling):
    embedding = RotaryEmbedding(rope_parameters_of(config_of(scaling)), 900, 300)
    k = some_k(300)
    originals, positions = (
        torch.arange(300),
        torch.randperm(900, generator=torch.Generator().manual_seed(1))[:300],
    )
    cached = RotaryEmbedding(rope_parameters_of(config_of(scaling)), 300).encode(originals, k, k)[1]
    torch.testing.assert_close(embedding.decode(originals, cached, cached)[1], k, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        embedding.mover(originals, positions)(cached),
        embedding.encode(positions, k, k)[1],
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_dimensions_that_are_not_rotated_stay_as_they_are(is_interleaved):
    embedding = RotaryEmbedding(
        RopeParameters(HEAD_SIZE, rotary_dims=24, is_interleaved=is_interleaved)
    )
    k = some_k(40)
    moved = embedding.mover(torch.zeros(40, dtype=torch.int64), torch.arange(40))(k)
    assert torch.equal(moved[..., 24:], k[..., 24:])
    assert not torch.equal(moved[1:, :, :24], k[1:, :, :24])
    assert torch.equal(moved[0], k[0])
    torch.testing.assert_close(moved, embedding.encode(torch.arange(40), k, k)[1])


def test_interleaved_pairs_are_the_halves_in_another_order():
    halves, pairs = (
        RotaryEmbedding(RopeParameters(8, is_interleaved=flag)) for flag in (False, True)
    )
    k, positions = some_k(9, head_size=8), torch.arange(9)
    order = torch.arange(8).view(2, 4).T.flatten()  # of each pair both, side by side
    torch.testing.assert_close(
        pairs.encode(positions, k[..., order], k[..., order])[1],
        halves.encode(positions, k, k)[1][..., order],
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "longrope"}, "longrope"),
        ({"rotary_dims": 7}, "7 rotated"),
        ({"factor": 0.5}, "0.5"),
        ({"theta": 1.0}, "theta 1.0"),
    ],
)
def test_unknown_parameters_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        RopeParameters(HEAD_SIZE, **options)


def test_a_tensor_of_other_heads_is_refused():
    with pytest.raises(ValueError, match="64"):
        RotaryEmbedding(RopeParameters(HEAD_SIZE)).encode(
            torch.arange(3), torch.zeros(3, 40), torch.zeros(3, 40)
        )
