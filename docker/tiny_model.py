"""Make the model of the image vllm-cpu-tiny: random weights, no download.

Its size is chosen so that two cores need seconds for a prompt of 4,000 tokens: a hit is then plain
to see.

Usage: python docker/tiny_model.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.vllm.models import make_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_theta": 10000.0,
}

if __name__ == "__main__":
    make_model(Path(sys.argv[1]), CONFIG, seed=0)
