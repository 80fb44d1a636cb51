"""What makes the tiny llama see: a tower for pictures before it, and pictures of noise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PLACEHOLDER = "<image>"
"""Stands for a picture in a prompt; vLLM repeats it for each of the picture's tokens, and puts
other words between them.
"""
WORDS = (
    PLACEHOLDER,
    "<fake_token_around_image>",
    "<global-img>",
    "<row_1_col_1>",
    "<row_1_col_2>",
    "<end_of_utterance>",
)
"""What the processor looks for in a tokenizer."""
_TILE, _PATCH = 80, 8
_TILE_TOKENS = (_TILE // _PATCH) ** 2
PICTURE_TOKENS = 3 * _TILE_TOKENS + 7
"""Two tiles beside each other and the whole, with a word before and after each, and one at the
end.
"""
_WIDTH, _INNER, _NUM_LAYERS = 64, 128, 2


def seeing_config(text: dict[str, Any], placeholder_id: int) -> dict[str, Any]:
    """The `config.json` of a language model that sees.

    Args:
        text: That of the language model.
        placeholder_id: Token of `PLACEHOLDER`.
    """
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": text,
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": _WIDTH,
            "intermediate_size": _INNER,
            "num_hidden_layers": _NUM_LAYERS,
            "num_attention_heads": 2,
            "image_size": _TILE,
            "patch_size": _PATCH,
        },
        "image_token_id": placeholder_id,
        "scale_factor": 1,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": text["torch_dtype"],
    }


def seeing_shapes(text: dict[str, tuple[int, ...]], hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of its weights, by their names in the model's file.

    Args:
        text: Those of the language model.
        hidden: Its width.
    """
    tower = "model.vision_model"
    linear = {f"self_attn.{name}_proj": (_WIDTH, _WIDTH) for name in ("q", "k", "v", "out")}
    linear |= {
        "mlp.fc1": (_INNER, _WIDTH),
        "mlp.fc2": (_WIDTH, _INNER),
        "layer_norm1": (_WIDTH,),
        "layer_norm2": (_WIDTH,),
    }
    biased = {
        f"encoder.layers.{layer}.{name}": shape
        for layer in range(_NUM_LAYERS)
        for name, shape in linear.items()
    }
    biased |= {
        "embeddings.patch_embedding": (_WIDTH, 3, _PATCH, _PATCH),
        "post_layernorm": (_WIDTH,),
    }
    shapes = {
        f"{tower}.{name}.{part}": shape[:end]
        for name, shape in biased.items()
        for part, end in (("weight", None), ("bias", 1))
    }
    shapes[f"{tower}.embeddings.position_embedding.weight"] = (_TILE_TOKENS, _WIDTH)
    shapes["model.connector.modality_projection.proj.weight"] = (hidden, _WIDTH)
    return shapes | {
        f"model.text_model.{name[6:]}" if name.startswith("model.") else name: shape
        for name, shape in text.items()
    }


def write_processor(directory: Path) -> None:
    """Say how a picture becomes numbers."""
    sizes = {"size": {"longest_edge": 2 * _TILE}, "max_image_size": {"longest_edge": _TILE}}
    image = {"image_processor_type": "Idefics3ImageProcessor", **sizes}
    (directory / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    words = {"processor_class": "Idefics3Processor", "image_seq_len": _TILE_TOKENS}
    (directory / "processor_config.json").write_text(json.dumps(words, indent=1))


def picture(seed: int) -> Any:
    """A `PIL.Image` of noise; the same for the same seed."""
    from PIL import Image

    width, height = 2 * _TILE, _TILE
    return Image.frombytes(
        "RGB", (width, height), random.Random(seed).randbytes(width * height * 3)
    )
