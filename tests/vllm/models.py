"""Tiny models with random weights, made once and kept: every layer's output depends on the context.

Weights are drawn with the standard deviation 1/sqrt(fan in). With the usual 0.02 the output of so
small a model hardly depends on what came before, and a test that compares outputs could not fail.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.vllm.pictures import PLACEHOLDER, WORDS, seeing_config, seeing_shapes, write_processor

VOCABULARY = 4096
FIRST_WORD = 16
"""Token ids below are kept for special tokens; prompts have none of them."""
MAX_TOKENS = 8192
LORA_RANK = 8
LOUDNESS = 0.1

SHARPNESS = 3.0
"""How much larger queries are than by chance: each token then looks at a few others instead of
at the mean of all.
"""

LLAMA = "llama"
MHA = "mha"
WIDE = "wide"
"""The same, with keys and values of each head; and one that computes most outside of attention."""
SLIDING = "sliding"
MLA = "mla"
SEEING = "seeing"
EAGLE = "eagle"
"""A draft model for `LLAMA`: one layer on the hidden states of its last one."""
LOCAL = "local"
"""Every other layer attends to sections of 512 tokens."""
GATED_DELTA = "gated-delta"
MAMBA2 = "mamba2"
"""Hybrids: every other layer is full attention, and the others have one state per request: gated
delta nets, or Mamba-2. The first has a layer that predicts one more token.
"""
SHARED = "shared"
"""The second half of the layers uses the KV of the first: of a window, or of all tokens."""
MTP = "mtp"
"""A llama with biases (MiMo) and a layer that predicts one more token (multi-token prediction)."""
LORA = "lora"
OTHER_LORA = "lora-other"

_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", *WORDS)
PLACEHOLDER_ID = _SPECIAL.index(PLACEHOLDER)
"""The token in a prompt of `SEEING` that stands for a picture."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_CONFIGS: dict[str, dict[str, Any]] = {
    LLAMA: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_theta": 10000.0,
    },
    MHA: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "rope_theta": 10000.0,
    },
    WIDE: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_theta": 10000.0,
    },
    SLIDING: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    MLA: {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 10000.0,
        # As the real ones have it. vLLM's plain rotation reads the wrong memory on a CPU for this
        # kind of KV (0.32.0), so that the answer to a prompt depends on what else is computed with
        # it.
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": MAX_TOKENS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
    },
}
_HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    LOCAL: (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 512,
            "head_dim": 32,
            "intermediate_size": 64,
            "intermediate_size_mlp": 256,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "num_local_experts": 2,
            "pad_token_id": 3,
        },
    ),
    GATED_DELTA: (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 64,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    SHARED: (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 256,
            "head_dim": 32,
            "intermediate_size": 256,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 16,
            "altup_num_inputs": 2,
            "tie_word_embeddings": True,
            "pad_token_id": 3,
        },
    ),
    MAMBA2: (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "intermediate_size": 256,
            "shared_intermediate_size": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
        },
    ),
}


def made_models(home: Path) -> Path:
    """The directory of all models, made if this version of this file has not made it yet.

    Args:
        home: Where such directories are kept.
    """
    return made_once(
        home, "models", (Path(__file__), Path(__file__).with_name("pictures.py")), _make_all
    )


def made_once(home: Path, name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """A directory that is kept for as long as the files that make it stay the same.

    Args:
        home: Where it is kept.
        name: What its own name begins with.
        sources: Those files.
        make: Fills a directory; not called when there is one already.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    directory = home / f"{name}-{digest}"
    if directory.is_dir():
        return directory
    home.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{name}-part-", dir=home))
    try:
        make(part)
        os.replace(part, directory)  # noqa: PTH105 (an empty or missing target only, which is what is wanted)
    except OSError:
        if not directory.is_dir():  # else another test process was quicker
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory


def make_model(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Make one model.

    Args:
        directory: Made for it.
        config: Of its `config.json`, what differs from the tiny models' common part; `torch_dtype`
            is also that of its file.
        seed: Of its weights.
    """
    directory.mkdir()
    config = _COMMON | config
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _save(directory, _tensors(_shapes(config), seed), config["torch_dtype"])


def _make_all(directory: Path) -> None:
    for seed, name in enumerate(_CONFIGS):
        make_model(directory / name, _CONFIGS[name], seed)
    _make_seeing(directory / SEEING, seed=50)
    _make_eagle(directory / EAGLE, seed=60)
    for seed, name in enumerate(_HYBRIDS, 70):
        _make_hybrid(directory / name, name, seed)
    _make_mtp(directory / MTP, seed=80)
    _make_lora(directory / LORA, seed=100)
    _make_lora(directory / OTHER_LORA, seed=101)


def _make_seeing(directory: Path, seed: int) -> None:
    """The llama behind a tower for pictures."""
    directory.mkdir()
    text = _COMMON | _CONFIGS[LLAMA]
    config = seeing_config(text, PLACEHOLDER_ID)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _save(
        directory,
        _tensors(seeing_shapes(_shapes(text), text["hidden_size"]), seed),
        text["torch_dtype"],
    )
    write_processor(directory)


def _make_eagle(directory: Path, seed: int) -> None:
    directory.mkdir()
    config = _COMMON | _CONFIGS[LLAMA] | {"num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {
        name.removeprefix("model."): shape
        for name, shape in _shapes(config).items()
        if ".layers." in name and "input_layernorm" not in name
    }
    shapes["fc.weight"] = (config["hidden_size"], 2 * config["hidden_size"])
    _save(directory, _tensors(shapes, seed), config["torch_dtype"])


def _make_mtp(directory: Path, seed: int) -> None:
    directory.mkdir()
    config = (
        _COMMON
        | _CONFIGS[LLAMA]
        | {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": 1,
        }
    )
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    hidden = config["hidden_size"]
    shapes = _shapes(config)
    predicting, first = "model.mtp_layers.0.", "model.layers.0."
    shapes |= {
        name.replace(first, predicting): shape
        for name, shape in shapes.items()
        if name.startswith(first)
    }
    shapes[f"{predicting}input_proj.weight"] = (hidden, 2 * hidden)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"{predicting}{norm}.weight"] = (hidden,)
    shapes |= {
        name.replace("weight", "bias"): shape[:1]
        for name, shape in shapes.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    _save(directory, _tensors(shapes, seed), config["torch_dtype"])


def _make_hybrid(directory: Path, name: str, seed: int) -> None:
    """One of `_HYBRIDS`, whose weights have the names and shapes that transformers gives them."""
    import transformers

    config_class, model_class, config = _HYBRIDS[name]
    configuration = getattr(transformers, config_class)(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        architectures=[model_class],
        **({"tie_word_embeddings": False} | config),
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(configuration).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[1]))
        # A few words are much louder than the others: with thousands of equals, the likeliest two
        # often differ by less than bfloat16 can tell.
        head = model.get_output_embeddings().weight
        if not configuration.tie_word_embeddings:
            head *= LOUDNESS * torch.randn(len(head), 1).exp()
    model.save_pretrained(directory)
    if name == GATED_DELTA:
        _add_predicting_layer(directory, configuration.hidden_size, seed)
    _make_tokenizer(directory)


def _add_predicting_layer(directory: Path, hidden: int, seed: int) -> None:
    """One like the model's second layer, which transformers does not know."""
    path = directory / "model.safetensors"
    tensors, second = load_file(path), "model.layers.1."
    generator = torch.Generator().manual_seed(seed)
    tensors |= {
        name.replace(second, "mtp.layers.0."): _drawn(tuple(tensor.shape), generator)
        if tensor.dim() == 2
        else tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(second)
    }
    tensors["mtp.fc.weight"] = _drawn((hidden, 2 * hidden), generator)
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{norm}.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Random weights with sharp queries."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _drawn(shape, generator) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            tensor *= SHARPNESS
        if name.endswith(".bias"):
            tensor.zero_()
    return tensors


def _save(directory: Path, tensors: dict[str, torch.Tensor], dtype_name: str) -> None:
    """Write a model's weights, and its tokenizer beside them."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    _make_tokenizer(directory)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Ones for a norm, else normal numbers that keep the variance of what they are applied to."""
    return (
        torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
    )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = (
            _mla_shapes(config)
            if config["model_type"] == "deepseek_v2"
            else _attention_shapes(config)
        )
        of_layer |= {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    of_queries, of_keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    return {
        "self_attn.q_proj": (of_queries, hidden),
        "self_attn.k_proj": (of_keys, hidden),
        "self_attn.v_proj": (of_keys, hidden),
        "self_attn.o_proj": (hidden, of_queries),
    }


def _mla_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["kv_lora_rank"],
    )
    plain, rotated, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    return {
        "self_attn.q_proj": (heads * (plain + rotated), hidden),
        "self_attn.kv_a_proj_with_mqa": (latent + rotated, hidden),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (plain + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
    }


def _make_lora(directory: Path, seed: int) -> None:
    """An adapter of the llama's Q, K, V and O, large enough to change its output."""
    directory.mkdir()
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": LLAMA,
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter, indent=1))
    generator = torch.Generator().manual_seed(seed)
    config = _COMMON | _CONFIGS[LLAMA]
    tensors = {}
    for name, (num_out, num_in) in _attention_shapes(config).items():
        for layer in range(config["num_hidden_layers"]):
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _drawn((LORA_RANK, num_in), generator)
            tensors[f"{prefix}.lora_B.weight"] = _drawn((num_out, LORA_RANK), generator)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _make_tokenizer(directory: Path) -> None:
    """One word for each token id: `w16 w17 …`."""
    words = (
        list(_SPECIAL)
        + [f"<extra{i}>" for i in range(len(_SPECIAL), FIRST_WORD)]
        + [f"w{i}" for i in range(FIRST_WORD, VOCABULARY)]
    )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, word in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
