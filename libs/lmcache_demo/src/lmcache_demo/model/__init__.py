"""A small language model that ships with the demonstration: real weights, trained by :mod:`.train`, loaded offline.

``MODEL_CARD.md`` beside this file says how it was trained and what it can do.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["MODEL_DIR", "load_model", "load_tokenizer"]

MODEL_DIR: Final = Path(__file__).parent / "assets"


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """Loads the byte-level BPE tokenizer; it adds no token of its own to a text."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(MODEL_DIR), local_files_only=True)


def load_model(
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast"]:
    """Loads the model, in evaluation mode on the CPU, and its tokenizer; needs no network.

    Args:
        dtype: Type of the weights in memory; they are stored as bfloat16.

    Returns:
        The model and the tokenizer, owned by the caller.
    """
    import torch
    from transformers import LlamaForCausalLM

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    model = LlamaForCausalLM.from_pretrained(str(MODEL_DIR), dtype=dtypes[dtype], local_files_only=True)
    return model.eval(), load_tokenizer()
