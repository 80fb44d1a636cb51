"""The options of `lmcachectl certify blend`, in groups, and the decorator that gives them to the
command.
"""

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
_MODEL, _TEXT, _BOUNDS = "What is certified", "What it is measured on", "What it must keep to"


class ModelDtype(StrEnum):
    """Of the weights in memory."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class Certified:
    """What is to be certified: a model as an engine has it, and how it is blended there.

    Raises:
        UsageError: There is no such policy.
    """

    model: Annotated[
        Path,
        typer.Option(
            help="A Hugging Face model's directory, with its tokenizer.", rich_help_panel=_MODEL
        ),
    ]
    separator: Annotated[
        str,
        typer.Option(
            help="Text that ends each document; engines are given its token ids.",
            rich_help_panel=_MODEL,
        ),
    ]
    certificates: Annotated[
        Path,
        typer.Option(
            help="Folder for the certificate: blend_certificates of engines.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT_CERTIFICATES
    name: Annotated[
        str | None,
        typer.Option(
            help="Under which the model's KV is shared.",
            show_default="the directory's name",
            rich_help_panel=_MODEL,
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            help="Revision of the weights, where engines name one.",
            show_default="the weights' fingerprint",
            rich_help_panel=_MODEL,
        ),
    ] = None
    dtype: Annotated[
        ModelDtype,
        typer.Option(
            help="Of the weights in the engine; auto: as they are stored.", rich_help_panel=_MODEL
        ),
    ] = ModelDtype.AUTO
    policy: Annotated[
        str,
        typer.Option(
            help=f"Which tokens are computed anew: {', '.join(BLEND_POLICIES)}.",
            rich_help_panel=_MODEL,
        ),
    ] = BLEND_POLICIES[0]
    ratio: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the reused tokens that is.", rich_help_panel=_MODEL
        ),
    ] = 0.15

    def __post_init__(self) -> None:
        if self.policy not in BLEND_POLICIES:
            raise UsageError(f"--policy {self.policy}: known are {', '.join(BLEND_POLICIES)}")


@dataclass(frozen=True)
class Cut:
    """The text, and how it becomes prompts: neighbouring slices are documents, and what follows
    them is to be predicted.
    """

    text: Annotated[
        Path | None,
        typer.Option(
            help="Held-out text, UTF-8.",
            show_default="Python's documentation",
            rich_help_panel=_TEXT,
        ),
    ] = None
    prompts: Annotated[
        int, typer.Option(min=2, max=100_000, help="Prompts to measure on.", rich_help_panel=_TEXT)
    ] = 50
    documents: Annotated[
        int, typer.Option(min=1, max=1000, help="Documents of each.", rich_help_panel=_TEXT)
    ] = 3
    document_tokens: Annotated[
        int,
        typer.Option(
            min=2, help="Tokens of each document, the separator included.", rich_help_panel=_TEXT
        ),
    ] = 256
    ending_tokens: Annotated[
        int,
        typer.Option(
            min=2, help="Tokens behind the documents, which are predicted.", rich_help_panel=_TEXT
        ),
    ] = 64


@dataclass(frozen=True)
class Bounds:
    """What blending must keep to; by default `QualityBounds`."""

    max_kl: Annotated[
        float,
        typer.Option(min=0, help="Largest mean divergence, in nats.", rich_help_panel=_BOUNDS),
    ] = QualityBounds().max_kl_nats
    min_agreement: Annotated[
        float,
        typer.Option(min=0, max=1, help="Least share of equal choices.", rich_help_panel=_BOUNDS),
    ] = QualityBounds().min_top1_agreement
    max_loss: Annotated[
        float,
        typer.Option(
            min=0, help="Largest growth of the loss, nats a token.", rich_help_panel=_BOUNDS
        ),
    ] = QualityBounds().max_delta_loss_nats


def takes_fields_of(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of data classes as options; it is called with the data classes.

    Args:
        groups: Of each parameter of the command that is a group, its class, whose fields are
            annotated as typer reads them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = {group: [one.name for one in fields(kind)] for group, kind in groups.items()}
        own = [
            one
            for one in inspect.signature(command, eval_str=True).parameters.values()
            if one.name not in groups
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = {
                group: groups[group](**{name: given.pop(name) for name in names[group]})
                for group in groups
            }
            command(**made, **given)

        parameters = [one for kind in groups.values() for one in _parameters_of(kind)]
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        run.__dict__.pop("__wrapped__")  # typer reads the signature below, not that of the command
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _parameters_of(kind: type) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    own = inspect.signature(kind).parameters.values()
    return [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in own
    ]
