"""A Hugging Face model and a text to put through it. Needs torch and transformers."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from lmcache_ctl.errors import CtlError


def load_model(
    directory: Path, dtype: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode, and its tokenizer.

    Args:
        directory: Both as Hugging Face saves them; nothing is downloaded, and none of its code is
            run.
        dtype: Of the weights in memory: "auto" for that in which they are stored, or its name.

    Raises:
        CtlError: They cannot be loaded.
    """
    logging.disable_progress_bar()
    try:
        if not directory.is_dir():  # which transformers would take for a name to download
            raise CtlError(
                f"cannot load a model and its tokenizer from {directory}: it is not a directory;"
                " give one that save_pretrained wrote"
            )
        model = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, local_files_only=True, trust_remote_code=False
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as exc:
        first_line = str(exc).strip().partition("\n")[0]
        raise CtlError(
            f"cannot load a model and its tokenizer from {directory}: {first_line}"
        ) from exc
    return model, tokenizer


def own_text() -> str:
    """Return Python's own documentation, which every machine has."""
    return "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))
