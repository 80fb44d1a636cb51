"""KV that a Hugging Face model computes here. Needs torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name
from lmcache_core.memory.views import bytes_under

from lmcache_ctl.codec.kv import Kv, KvTensor
from lmcache_ctl.errors import CtlError
from lmcache_ctl.model import load_model, own_text


def kv_of_model(directory: Path, num_tokens: int) -> Kv:
    """The KV of the first tokens of Python's own documentation, as the model computes it on this
    machine, in the dtype of its weights.

    Args:
        directory: Model and tokenizer as Hugging Face saves them; nothing is downloaded, and none
            of its code is run.
        num_tokens: How many tokens, or fewer where the model takes no more.

    Raises:
        CtlError: It cannot be loaded, or does not keep the KV of every token.
    """
    model, tokenizer = load_model(directory)
    longest = getattr(model.config, "max_position_embeddings", None) or num_tokens
    with torch.inference_mode():
        ids = torch.tensor(
            [tokenizer.encode(own_text(), verbose=False)[: min(num_tokens, longest)]]
        )
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        sides: list[list[Any]] = [
            [getattr(layer, side, None) for layer in getattr(cache, "layers", [])]
            for side in ("keys", "values")
        ]
        shapes = {None if kv is None else tuple(kv.shape) for side in sides for kv in side}
        expected = {
            shape
            for shape in shapes
            if shape is not None and len(shape) == 4 and shape[2] == ids.shape[1]
        }
        if len(shapes) != 1 or shapes != expected:
            raise CtlError(
                f"{directory}: its layers do not all keep the KV of every token in one shape; only"
                " such models can be measured"
            )
        kv = torch.stack([torch.stack([layer[0] for layer in side]) for side in sides])
        kv = (
            kv.transpose(2, 3).flatten(3).contiguous()
        )  # [sides, layers, heads, tokens, size] -> [sides, layers, tokens, channels]
    name = dtype_name(kv.dtype)
    values = np.frombuffer(bytes_under(kv), f"<u{DTYPE_ITEMSIZE[name]}").reshape(tuple(kv.shape))
    return Kv(f"KV that the model in {directory} computed, {name}", (KvTensor("", name, values),))
