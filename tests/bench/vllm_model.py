"""The model whose answers are timed: 110 million parameters with random weights, made once and
kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm import models

NAME = "small"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


def made_model(home: Path) -> Path:
    """The model's directory, made if this version of it has not been made yet.

    Args:
        home: Where such directories are kept.
    """
    sources = (Path(__file__), Path(models.__file__))
    return (
        models.made_once(
            home,
            "bench-model",
            sources,
            lambda directory: models.make_model(directory / NAME, CONFIG, seed=0),
        )
        / NAME
    )
