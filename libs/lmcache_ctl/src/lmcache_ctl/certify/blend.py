"""Measures what blending costs a model, and certifies it. Needs torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from lmcache_core.blend.certificate import FORMAT_VERSION, BlendCertificate, BlendProfile, QualityBounds
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.integrations.transformers import metadata_of
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt, measure
from lmcache_core.integrations.transformers.blended import blending_model_of

from lmcache_ctl.errors import CtlError
from lmcache_ctl.model import load_model, own_text


@dataclass(frozen=True)
class Cut:
    """How a text becomes prompts: neighbouring slices of it are documents, and the next one is what is to be predicted.

    Attributes:
        num_prompts: How many, at least 2.
        num_documents: Documents of each.
        document_tokens: Tokens of each, the separator included.
        ending_tokens: Tokens behind the documents, at least 2.
    """

    num_prompts: int
    num_documents: int
    document_tokens: int
    ending_tokens: int

    def prompts(self, tokens: torch.Tensor, separator: torch.Tensor) -> list[SplitPrompt]:
        """Prompts from all over a text.

        Args:
            tokens: Token ids of the text, `[num_tokens]`.
            separator: Token ids that end a document.

        Raises:
            CtlError: The text is too short, or a document has no room beside its separator.
        """
        own = self.document_tokens - len(separator)
        if own < 1:
            raise CtlError(f"documents of {self.document_tokens} tokens have no room beside a separator of {len(separator)}")
        width = self.num_documents * own + self.ending_tokens
        needed = width + self.num_prompts - 1
        if len(tokens) < needed:
            raise CtlError(f"the text has {len(tokens)} tokens; {self.num_prompts} prompts of {width} need at least {needed}")
        step = (len(tokens) - width) // (self.num_prompts - 1)
        return [self._prompt(tokens[i * step : i * step + width], own, separator) for i in range(self.num_prompts)]

    def _prompt(self, tokens: torch.Tensor, own: int, separator: torch.Tensor) -> SplitPrompt:
        slices = [tokens[i * own : (i + 1) * own] for i in range(self.num_documents)]
        return SplitPrompt([torch.cat([part, separator]) for part in slices], tokens[self.num_documents * own :])


@dataclass(frozen=True)
class Certified:
    """What is to be certified.

    Attributes:
        directory: Model and tokenizer as Hugging Face saves them.
        model_name: Under which the model's KV is shared; None: the directory's name.
        separator: Text that ends each document.
        policy: Which tokens are computed anew.
        recompute_ratio: Share of them.
        text_file: Held-out text of the kind that will be served; None: Python's documentation.
    """

    directory: Path
    model_name: str | None
    separator: str
    policy: str
    recompute_ratio: float
    text_file: Path | None


def certify(wanted: Certified, cut: Cut, bounds: QualityBounds, progress: Callable[[int], None]) -> BlendCertificate:
    """Measure blending on a text, and judge it.

    Args:
        wanted: What is to be certified.
        cut: How the text becomes prompts.
        bounds: What blending must keep to.
        progress: Called with the number of prompts done.

    Raises:
        CtlError: The model or the text cannot be had, or does not fit the cut.
    """
    model, tokenizer = load_model(wanted.directory)
    text = own_text() if wanted.text_file is None else _read(wanted.text_file)
    separator = torch.tensor(tokenizer.encode(wanted.separator, add_special_tokens=False, verbose=False), dtype=torch.int64)
    if len(separator) == 0:
        raise CtlError(f"the separator {wanted.separator!r} has no tokens; give one that has")
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=torch.int64)
    longest = getattr(model.config, "max_position_embeddings", None)
    width = cut.num_documents * cut.document_tokens + cut.ending_tokens
    if longest is not None and width > longest:
        raise CtlError(f"prompts of {width} tokens, and {wanted.directory} takes {longest}; take fewer or shorter documents")
    profile = BlendProfile(wanted.policy, wanted.recompute_ratio, tuple(separator.tolist()))
    try:
        metadata = metadata_of(model, wanted.model_name or wanted.directory.resolve().name, LMCacheEngineConfig.from_defaults())
        quality = measure(model, cut.prompts(tokens, separator), lambda retriever: blending_model_of(model, retriever, profile), progress)
    except (ValueError, AttributeError) as exc:
        raise CtlError(f"{wanted.directory} cannot be blended: {exc}") from exc
    return BlendCertificate(FORMAT_VERSION, metadata.model_name, metadata.revision, profile, bounds, quality, version("lmcache-core"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise CtlError(f"cannot read the text {path}: {exc}") from exc
