"""The commands of `lmcachectl certify`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from lmcache_core.blend.certificate import CertificateFolder, QualityBounds

from lmcache_ctl.certify.blend_options import Bounds, Certified, Cut, takes_fields_of
from lmcache_ctl.codec.commands import DEFAULT_TOKENS, MAX_TOKENS, checked_profiles
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.examples import examples_of
from lmcache_ctl.output import Output, OutputFormat, show

DEFAULT_MAX_ERROR = 0.15
DEFAULT_MIN_RATIO = 1.0

app = typer.Typer(
    no_args_is_help=True,
    help="Gates that something must pass before it is used: exit code 1 when it does not.",
)


@app.command(epilog=examples_of("certify codec"))
def codec(
    kv: Annotated[
        Path | None, typer.Option(help="A safetensors file with KV, as `codec measure` reads it.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face model's directory: the KV that it computes of a text."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="A profile to certify; may be given several times.", show_default="all"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, help="Of how many tokens at most.")
    ] = DEFAULT_TOKENS,
    max_error: Annotated[
        float, typer.Option(min=0, max=1, help="Largest error (root mean square, relative).")
    ] = DEFAULT_MAX_ERROR,
    min_ratio: Annotated[
        float, typer.Option(min=0, help="How many times smaller it must at least be.")
    ] = DEFAULT_MIN_RATIO,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Certify that codec profiles fit this KV, on this machine.

    A profile without loss must give back every bit; one with loss must stay
    within --max-error; all must be at least --min-ratio times smaller. Without
    --kv or --model made-up KV is used, which certifies the machine and not a
    model. What errors do to answers is not measured.
    """
    if kv is not None and model is not None:
        raise UsageError("--kv and --model exclude one another: give one source of KV")
    profiles = checked_profiles(profile or [])
    from lmcache_ctl.certify.gate import Bounds, certify
    from lmcache_ctl.certify.tables import print_certificate
    from lmcache_ctl.codec.kv import load_kv

    found = certify(load_kv(kv, model, tokens), profiles, Bounds(max_error, min_ratio))
    show(found, output, print_certificate)
    if not found.has_passed:
        raise typer.Exit(1)


@app.command(epilog=examples_of("certify blend"))
@takes_fields_of(wanted=Certified, cut=Cut, bounds=Bounds)
def blend(wanted: Certified, cut: Cut, bounds: Bounds, output: Output = OutputFormat.TABLE) -> None:
    """Certify that a model may be blended: measure it against full recompute.

    Slices of the text become documents, whose KV is computed one by one and
    reused; what follows them in the text is predicted, and compared with what
    the model predicts without reuse. The certificate is kept whether it was
    passed or not; engines read it, and blend only with one that was. It holds
    for one name, weights, dtype, policy, ratio and separator. Progress goes to
    standard error. Exits with 1 when the model failed.
    """
    from lmcache_ctl.certify.blend import certify
    from lmcache_ctl.certify.progress import progress_of_prompts
    from lmcache_ctl.certify.tables import print_blend_certificate

    _check_can_be_kept(wanted.certificates)
    with progress_of_prompts(cut.prompts) as progress:
        found = certify(
            wanted,
            cut,
            QualityBounds(bounds.max_kl, bounds.min_agreement, bounds.max_loss),
            progress,
        )
    try:
        path = CertificateFolder(wanted.certificates).save(found)
    except OSError as exc:
        raise CtlError(f"cannot keep the certificate in {wanted.certificates}: {exc}") from exc
    show(found, output, lambda certificate: print_blend_certificate(certificate, path))
    if found.reasons:
        raise typer.Exit(1)


def _check_can_be_kept(certificates: Path) -> None:
    """Before minutes are spent on what cannot be written; nothing is made yet."""
    try:
        there = next(
            path
            for path in (certificates.absolute(), *certificates.absolute().parents)
            if path.exists()
        )
        is_directory = there.is_dir()
    except OSError as exc:
        raise CtlError(f"cannot keep the certificate in {certificates}: {exc.strerror}") from exc
    if not is_directory or not os.access(there, os.W_OK | os.X_OK):
        raise CtlError(
            f"cannot keep the certificate in {certificates}: {there} is no directory that may be"
            " written to"
        )
