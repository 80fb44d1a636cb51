"""The options of `lmcachectl certify blend`, in groups, and the decorator that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from lmcache_core.blend.certificate import QualityBounds
from lmcache_core.config import BLEND_POLICIES

from lmcache_ctl.errors import UsageError

DEFAULT_CERTIFICATES = Path("lmcache-certificates")
DEFAULT_BOUNDS = QualityBounds()
_MODEL, _TEXT, _BOUNDS = "What is certified", "What it is measured on", "What it must keep to"


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


class ModelDtype(StrEnum):
    """Of the weights in memory."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class BlendedModel:
    """A model as an engine has it, and how it is blended there.

    Raises:
        UsageError: There is no such policy.
    """

    model: Annotated[Path, _option(_MODEL, "A Hugging Face model's directory, with its tokenizer.")]
    separator: Annotated[
        str, _option(_MODEL, "Text that ends each document; engines are given its token ids.")
    ]
    certificates: Annotated[
        Path, _option(_MODEL, "Folder for the certificate: blend_certificates of engines.")
    ] = DEFAULT_CERTIFICATES
    name: Annotated[
        str | None,
        _option(
            _MODEL, "Under which the model's KV is shared.", show_default="the directory's name"
        ),
    ] = None
    revision: Annotated[
        str | None,
        _option(
            _MODEL,
            "Revision of the weights, where engines name one.",
            show_default="the weights' fingerprint",
        ),
    ] = None
    dtype: Annotated[
        ModelDtype, _option(_MODEL, "Of the weights in the engine; auto: as they are stored.")
    ] = ModelDtype.AUTO
    policy: Annotated[
        str, _option(_MODEL, f"Which tokens are computed anew: {', '.join(BLEND_POLICIES)}.")
    ] = BLEND_POLICIES[0]
    ratio: Annotated[
        float, _option(_MODEL, "Share of the reused tokens that is.", min=0, max=1)
    ] = 0.15

    def __post_init__(self) -> None:
        if self.policy not in BLEND_POLICIES:
            raise UsageError(f"--policy {self.policy}: known are {', '.join(BLEND_POLICIES)}")


@dataclass(frozen=True)
class PromptCut:
    """The text, and how it becomes prompts.

    Neighbouring slices are documents, and what follows them is to be predicted.
    """

    text: Annotated[
        Path | None, _option(_TEXT, "Held-out text, UTF-8.", show_default="Python's documentation")
    ] = None
    prompts: Annotated[int, _option(_TEXT, "Prompts to measure on.", min=2, max=100_000)] = 50
    documents: Annotated[int, _option(_TEXT, "Documents of each.", min=1, max=1000)] = 3
    document_tokens: Annotated[
        int, _option(_TEXT, "Tokens of each document, the separator included.", min=2)
    ] = 256
    ending_tokens: Annotated[
        int, _option(_TEXT, "Tokens behind the documents, which are predicted.", min=2)
    ] = 64


@dataclass(frozen=True)
class BlendBounds:
    """What blending must keep to; by default `QualityBounds`."""

    max_kl: Annotated[float, _option(_BOUNDS, "Largest mean divergence, in nats.", min=0)] = (
        DEFAULT_BOUNDS.max_kl_nats
    )
    min_agreement: Annotated[
        float, _option(_BOUNDS, "Least share of equal choices.", min=0, max=1)
    ] = DEFAULT_BOUNDS.min_top1_agreement
    max_loss: Annotated[
        float, _option(_BOUNDS, "Largest growth of the loss, nats a token.", min=0)
    ] = DEFAULT_BOUNDS.max_delta_loss_nats


def takes_fields_of(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of data classes as options; it is called with the data classes.

    Args:
        groups: Of each parameter of the command that is a group, its class, whose fields are
            annotated as typer reads them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = {
                group: kind(**{one.name: given.pop(one.name) for one in fields(kind)})
                for group, kind in groups.items()
            }
            command(**made, **given)

        parameters = [
            one.replace(annotation=get_type_hints(kind, include_extras=True)[one.name])
            for kind in groups.values()
            for one in inspect.signature(kind).parameters.values()
        ]
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters += [one for one in own if one.name not in groups]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        run.__dict__.pop("__wrapped__")  # typer reads the signature below, not that of the command
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate
