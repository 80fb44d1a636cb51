"""Trains the byte-level BPE tokenizer; every byte has a token, so that any text survives a round
trip.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT: Final = "<|endoftext|>"
END_OF_TEXT_ID: Final = 0

# Words with at most one leading space, runs of blanks kept whole (indentation), digits one by one.
_SPLIT_PATTERN: Final = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from the texts. Token 0 is the end of text, and nothing is added to an encoded
    text.

    Args:
        vocab_size: Number of tokens, the end-of-text token and the 256 bytes included.
    """
    from tokenizers import Regex

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` as the transformers library loads
    them, version 4 or later.
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # Version 5 writes the class's new name, which version 4 does not know; both know the old one.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.uint16]]:
    """Encode each text with an end-of-text token in front, as uint16 ``[num_tokens + 1]``."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([END_OF_TEXT_ID, *encoding.ids], dtype=np.uint16) for encoding in encodings]
