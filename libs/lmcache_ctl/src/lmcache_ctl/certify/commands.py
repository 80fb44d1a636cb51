"""`lmcachectl certify`: gates that something must pass before it is used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from lmcache_core.blend.certificate import BlendCertificate, CertificateFolder, QualityBounds
from lmcache_core.config import BLEND_POLICIES
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import takes
from lmcache_ctl.output import (
    Columns,
    Output,
    OutputFormat,
    print_table,
    print_text,
    progress,
    show,
)

DEFAULT_CERTIFICATES = Path("lmcache-certificates")
DEFAULT_BOUNDS = QualityBounds()
_MODEL, _TEXT, _BOUNDS = "What is certified", "What it is measured on", "What it must keep to"


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


class ModelDtype(StrEnum):
    """Dtype of the weights in memory."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class BlendedModel:
    """A model as an engine loads and blends it.

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
            _MODEL,
            "Name under which the model's KV is shared.",
            show_default="the directory's name",
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
        ModelDtype, _option(_MODEL, "Dtype of the weights in the engine; auto: as they are stored.")
    ] = ModelDtype.AUTO
    policy: Annotated[
        str, _option(_MODEL, f"Which tokens are recomputed: {', '.join(BLEND_POLICIES)}.")
    ] = BLEND_POLICIES[0]
    ratio: Annotated[
        float, _option(_MODEL, "Share of the reused tokens to recompute.", min=0, max=1)
    ] = 0.15

    def __post_init__(self) -> None:
        if self.policy not in BLEND_POLICIES:
            raise UsageError(f"--policy {self.policy}: known are {', '.join(BLEND_POLICIES)}")


@dataclass(frozen=True)
class PromptCut:
    """The text, and how it is cut into prompts.

    Adjacent slices become documents; the model predicts the text after them.
    """

    text: Annotated[
        Path | None, _option(_TEXT, "Held-out text, UTF-8.", show_default="Python's documentation")
    ] = None
    prompts: Annotated[int, _option(_TEXT, "Prompts to measure on.", min=2, max=100_000)] = 50
    documents: Annotated[int, _option(_TEXT, "Documents in each prompt.", min=1, max=1000)] = 3
    document_tokens: Annotated[
        int, _option(_TEXT, "Tokens of each document, the separator included.", min=2)
    ] = 256
    ending_tokens: Annotated[
        int, _option(_TEXT, "Tokens after the documents, which are predicted.", min=2)
    ] = 64


@dataclass(frozen=True)
class BlendBounds:
    """The bounds that blending must meet; by default `QualityBounds`."""

    max_kl: Annotated[float, _option(_BOUNDS, "Largest mean divergence, in nats.", min=0)] = (
        DEFAULT_BOUNDS.max_kl_nats
    )
    min_agreement: Annotated[
        float, _option(_BOUNDS, "Least share of equal choices.", min=0, max=1)
    ] = DEFAULT_BOUNDS.min_top1_agreement
    max_loss: Annotated[
        float, _option(_BOUNDS, "Largest growth of the loss, nats a token.", min=0)
    ] = DEFAULT_BOUNDS.max_delta_loss_nats


@takes(wanted=BlendedModel, cut=PromptCut, bounds=BlendBounds)
def blend(
    wanted: BlendedModel,
    cut: PromptCut,
    bounds: BlendBounds,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Certify that a model may be blended: measure it against full recompute.

    Slices of the text become documents, whose KV is computed one by one and
    reused. The model predicts the text after them, which is compared with its
    predictions without reuse. The certificate is kept whether the model passed
    or not; engines read it, and blend only if it passed. It holds for one
    name, weights, dtype, policy, ratio and separator. Progress goes to
    standard error. Exits with 1 when the model failed.
    """
    from lmcache_ctl.certify.blend import certify_blend

    certificates = wanted.certificates
    _check_can_be_kept(certificates)
    quality = QualityBounds(bounds.max_kl, bounds.min_agreement, bounds.max_loss)
    with progress(MofNCompleteColumn(), TimeRemainingColumn()) as (_, bars):
        task = None if bars is None else bars.add_task("prompts", total=cut.prompts)

        def tell(num_done: int) -> None:
            if bars is not None and task is not None:
                bars.update(task, completed=num_done)

        found = certify_blend(wanted, cut, quality, tell)
    try:
        path = CertificateFolder(certificates).save(found)
    except OSError as exc:
        raise CtlError(f"cannot keep the certificate in {certificates}: {exc}") from exc
    show(found, output, lambda certificate: _print_blend_certificate(certificate, path))
    if found.reasons:
        raise typer.Exit(1)


def _check_can_be_kept(certificates: Path) -> None:
    """Refuse an unwritable folder before minutes are spent; create nothing yet."""
    wanted = certificates.absolute()
    try:
        there = next(path for path in (wanted, *wanted.parents) if path.exists())
        is_directory = there.is_dir()
    except OSError as exc:
        raise CtlError(f"cannot keep the certificate in {certificates}: {exc.strerror}") from exc
    if not is_directory or not os.access(there, os.W_OK | os.X_OK):
        raise CtlError(
            f"cannot keep the certificate in {certificates}: {there} is not a directory that may be"
            " written to"
        )


def _print_blend_certificate(found: BlendCertificate, path: Path) -> None:
    """Print what was measured and its bounds, why it failed if it did, and where it is kept."""
    quality, bounds = found.quality, found.bounds
    rows = [
        (
            "divergence of the next token",
            f"{quality.kl_nats:.4f} nats",
            f"at most {bounds.max_kl_nats:g}",
        ),
        (
            "same first choice",
            f"{quality.top1_agreement:.1%}",
            f"at least {bounds.min_top1_agreement:.0%}",
        ),
        (
            "growth of the loss",
            f"{quality.delta_loss_nats:+.4f} ± {quality.delta_loss_error:.4f} nats",
            f"at most {bounds.max_delta_loss_nats:g}, with twice its error",
        ),
    ]
    title = (
        f"{found.model_name}: {found.profile}; {quality.num_prompts} prompts,"
        f" {quality.reused_share:.0%} of their tokens reused"
    )
    headings = ("blended against full recompute", "measured", "bound")
    print_table(title, Columns(headings, left=3), rows)
    for reason in found.reasons:
        print_text(f"FAILED: {reason}")
    if not found.reasons:
        print_text("passed")
    print_text(f"kept as {path}")
