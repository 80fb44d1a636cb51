"""The KV that quality is measured on: the shipped model's own, of text that it was not trained
on; and what it predicts behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from lmcache_demo.model import load_model

from tests.training.corpus import Document, collect_corpus
from tests.training.evaluate import MEASURED_KINDS

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PREFIX_TOKENS, READ_TOKENS, CHUNK_TOKENS = 1024, 512, 256
WINDOW_TOKENS = PREFIX_TOKENS + READ_TOKENS
MAX_WINDOWS_OF_DOCUMENT = 2
"""Windows of one document resemble one another: more of a long one would add little that is new."""
BATCH_WINDOWS = 4


@dataclass(frozen=True)
class Windows:
    """Pieces of held-out text that do not overlap, and the KV of their prefixes.

    Attributes:
        ids: int64 `[n, 1537]`: the prefix, then what is read behind it, then the last token to
            predict.
        documents: int64 `[n]`, which document each is from.
        num_bytes: int64 `[n]`, bytes of UTF-8 of the predicted tokens.
        kv: bf16 `[n, 2, num_layers, 1024, hidden]`; keys as a serving engine keeps them, turned by
            their positions.
    """

    ids: torch.Tensor
    documents: torch.Tensor
    num_bytes: torch.Tensor
    kv: torch.Tensor

    def chunks(self, window: int) -> tuple[torch.Tensor, ...]:
        """The four chunks of a window's prefix, each contiguous, bf16 `[2, num_layers, 256,
        hidden]`.
        """
        return tuple(chunk.contiguous() for chunk in self.kv[window].split(CHUNK_TOKENS, dim=2))

    def batches(self) -> Iterator[list[int]]:
        """The windows' numbers, a few at a time, always the same ones together."""
        numbers = iter(range(len(self.ids)))
        while batch := list(islice(numbers, BATCH_WINDOWS)):
            yield batch


class Reader:
    """The shipped model, computing in float32 on KV that is kept in bfloat16."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.num_layers = int(model.config.num_hidden_layers)
        self._num_heads = int(model.config.num_key_value_heads)

    @classmethod
    def shipped(cls) -> Reader:
        """Of the model in the demo's package."""
        return cls(*load_model("float32"))

    def windows(self, pool: Executor, documents: Sequence[Document] | None = None) -> Windows:
        """Cut documents into windows and compute the KV of each prefix.

        Args:
            pool: Computes; threads, each with a torch of one thread, since what torch's own threads
                share is too little here.
            documents: None for the held-out ones that the model card is measured on.

        Raises:
            ValueError: No document is long enough.
        """
        if documents is None:
            documents = [doc for doc in collect_corpus().held_out if doc.kind in MEASURED_KINDS]
        ids, origins, sizes = [], [], []
        for number, document in enumerate(documents):
            text = self._tokenizer(document.text, add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            tokens = [self._model.config.bos_token_id, *text]
            for begin in range(
                0,
                min(len(tokens) - WINDOW_TOKENS, MAX_WINDOWS_OF_DOCUMENT * WINDOW_TOKENS),
                WINDOW_TOKENS,
            ):
                window = tokens[begin : begin + WINDOW_TOKENS + 1]
                ids.append(window)
                origins.append(number)
                sizes.append(len(self._tokenizer.decode(window[PREFIX_TOKENS + 1 :]).encode()))
        if not ids:
            raise ValueError(
                f"none of {len(documents)} documents has {WINDOW_TOKENS + 1} tokens: give longer"
                " ones"
            )
        table = torch.tensor(ids)
        kv = torch.cat(list(pool.map(self._prefix_kv, table.split(BATCH_WINDOWS))))
        return Windows(table, torch.tensor(origins), torch.tensor(sizes), kv)

    @torch.inference_mode()
    def _prefix_kv(self, ids: torch.Tensor) -> torch.Tensor:
        layers = self._model(
            input_ids=ids[:, :PREFIX_TOKENS], use_cache=True, logits_to_keep=1
        ).past_key_values.layers
        kv = torch.stack(
            [
                torch.stack([getattr(layer, side) for layer in layers], 1)
                for side in ("keys", "values")
            ],
            1,
        )
        return (
            kv.transpose(3, 4).flatten(4).to(torch.bfloat16)
        )  # [batch, 2, layers, heads, tokens, size] -> [..., tokens, hidden]

    @torch.inference_mode()
    def log_probs(self, ids: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """What the model expects at each of the 512 places behind the prefix, every earlier token
        of the text being given.

        Args:
            ids: int64 `[batch, 1537]`.
            kv: bf16 `[batch, 2, num_layers, 1024, hidden]`, of the prefix; only this is read of it.

        Returns:
            float32 `[batch, 512, vocabulary]`, natural logarithms.
        """
        from transformers import DynamicCache

        heads = kv.float().unflatten(-1, (self._num_heads, -1)).transpose(3, 4).contiguous()
        cache = DynamicCache()
        for layer in range(self.num_layers):
            cache.update(heads[:, 0, layer], heads[:, 1, layer], layer)
        logits = self._model(
            input_ids=ids[:, PREFIX_TOKENS:WINDOW_TOKENS], past_key_values=cache, use_cache=True
        ).logits
        return F.log_softmax(logits.float(), -1)
