"""Two small language models that ship with the demonstration: real weights, loaded offline.

The second is the first, taught to answer from two documents (:mod:`.two_documents`).
``MODEL_CARD.md`` in this folder says how they were trained and what they can do.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "MODEL_DIR",
    "TWO_DOCUMENT_DIR",
    "load_model",
    "load_tokenizer",
    "load_two_document_model",
]

Dtype = Literal["float32", "bfloat16", "float16"]

MODEL_DIR: Final = Path(__file__).parent / "assets"
TWO_DOCUMENT_DIR: Final = MODEL_DIR / "two_documents"
"""Weights and configuration; the tokenizer is that of `MODEL_DIR`."""


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """Loads the byte-level BPE tokenizer; it adds no token of its own to a text."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(MODEL_DIR), local_files_only=True)


def load_model(dtype: Dtype = "float32") -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast"]:
    """Loads the model, in evaluation mode on the CPU, and its tokenizer; needs no network.

    Args:
        dtype: Type of the weights in memory; they are stored as bfloat16.

    Returns:
        The model and the tokenizer, owned by the caller.
    """
    return _load(MODEL_DIR, dtype), load_tokenizer()


def load_two_document_model(
    dtype: Dtype = "float32",
) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast"]:
    """Loads the model that answers prompts of :mod:`.two_documents`, as :func:`load_model` does."""
    return _load(TWO_DOCUMENT_DIR, dtype), load_tokenizer()


def _load(folder: Path, dtype: Dtype) -> "LlamaForCausalLM":
    import torch
    from transformers import LlamaForCausalLM

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return LlamaForCausalLM.from_pretrained(
        str(folder), dtype=dtypes[dtype], local_files_only=True
    ).eval()
