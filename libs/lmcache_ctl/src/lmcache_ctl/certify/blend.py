"""Measure what blending costs a model, and certify it. Needs torch and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lmcache_core.blend.certificate import (
    FORMAT_VERSION,
    BlendCertificate,
    BlendProfile,
    QualityBounds,
)
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.integrations.transformers import metadata_of
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt, measure
from lmcache_core.integrations.transformers.blended import blending_model_of

from lmcache_ctl.errors import CtlError
from lmcache_ctl.model import load_model, own_text

if TYPE_CHECKING:
    from lmcache_ctl.certify.commands import BlendedModel, PromptCut


def certify_blend(
    wanted: BlendedModel, cut: PromptCut, bounds: QualityBounds, progress: Callable[[int], None]
) -> BlendCertificate:
    """Measure blending on a text, and judge it.

    Args:
        wanted: What to certify.
        cut: How to cut the text into prompts.
        bounds: The bounds that blending must meet.
        progress: Called with the number of prompts done.

    Raises:
        CtlError: The model or the text cannot be loaded, or does not fit the cut.
    """
    text = own_text() if cut.text is None else _read(cut.text)
    model, tokenizer = load_model(wanted.model, wanted.dtype)

    def token_ids(text: str) -> torch.Tensor:
        found = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return torch.tensor(found, dtype=torch.int64)

    separator = token_ids(wanted.separator)
    if len(separator) == 0:
        raise CtlError(f"the separator {wanted.separator!r} has no tokens; give one that has")
    tokens = token_ids(text)
    longest = getattr(model.config, "max_position_embeddings", None)
    width = cut.documents * cut.document_tokens + cut.ending_tokens
    if longest is not None and width > longest:
        raise CtlError(
            f"prompts of {width} tokens, and {wanted.model} takes {longest}; take fewer or shorter"
            " documents"
        )
    profile = BlendProfile(wanted.policy, wanted.ratio, tuple(separator.tolist()))
    name = wanted.name or _name_of(wanted.model)
    prompts = cut_prompts(cut, tokens, separator)
    try:
        metadata = metadata_of(model, name, LMCacheEngineConfig.from_defaults(), wanted.revision)
        quality = measure(
            model, prompts, lambda retriever: blending_model_of(model, retriever, profile), progress
        )
    except ValueError as exc:
        raise CtlError(f"{wanted.model} cannot be blended: {exc}") from exc
    figures = (quality.kl_nats, quality.delta_loss_nats, quality.delta_loss_error)
    if not all(map(math.isfinite, figures)):
        raise CtlError(
            f"{wanted.model} in {metadata.kv_dtype_name} does not predict finite numbers; try"
            " another --dtype"
        )
    return BlendCertificate(
        FORMAT_VERSION,
        metadata.model_name,
        metadata.revision,
        profile,
        bounds,
        quality,
        version("lmcache-core"),
    )


def cut_prompts(cut: PromptCut, tokens: torch.Tensor, separator: torch.Tensor) -> list[SplitPrompt]:
    """Cut prompts from across a text.

    Args:
        cut: How long they are, and how many.
        tokens: Token ids of the text, `[num_tokens]`.
        separator: Token ids that end a document.

    Raises:
        CtlError: The text is too short, or a separator leaves a document no room.
    """
    own = cut.document_tokens - len(separator)
    if own < 1:
        raise CtlError(
            f"documents of {cut.document_tokens} tokens have no room after a separator of"
            f" {len(separator)}"
        )
    width = cut.documents * own + cut.ending_tokens
    needed = width + cut.prompts - 1
    if len(tokens) < needed:
        raise CtlError(
            f"the text has {len(tokens)} tokens; {cut.prompts} prompts of {width} need at least"
            f" {needed}"
        )
    step = (len(tokens) - width) // (cut.prompts - 1)
    prompts = []
    for i in range(cut.prompts):
        part = tokens[i * step : i * step + width]
        documents = [
            torch.cat([part[j * own : (j + 1) * own], separator]) for j in range(cut.documents)
        ]
        prompts.append(SplitPrompt(documents, part[cut.documents * own :]))
    return prompts


def _name_of(model: Path) -> str:
    """Return the directory's name as given: a link's own name, not its target's."""
    name = model.absolute().name
    return name if name != ".." else model.resolve().name


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise CtlError(f"cannot read the text {path}: {exc}") from exc
