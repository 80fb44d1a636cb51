"""The commands of `lmcachectl certify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from lmcache_core.blend.certificate import CertificateFolder, QualityBounds
from lmcache_core.config.blend_options import BLEND_POLICIES

from lmcache_ctl.codec.commands import DEFAULT_TOKENS, MAX_TOKENS, checked_profiles
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.examples import examples_of
from lmcache_ctl.output import Output, OutputFormat, show

DEFAULT_MAX_ERROR = 0.15
DEFAULT_MIN_RATIO = 1.0

DEFAULT_CERTIFICATES = Path("lmcache-certificates")

app = typer.Typer(no_args_is_help=True, help="Gates that something must pass before it is used: exit code 1 when it does not.")


@app.command(epilog=examples_of("certify codec"))
def codec(
    kv: Annotated[Path | None, typer.Option(help="A safetensors file with KV, as `codec measure` reads it.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model's directory: the KV that it computes of a text.")] = None,
    profile: Annotated[list[str] | None, typer.Option(help="A profile to certify; may be given several times.", show_default="all")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Of how many tokens at most.")] = DEFAULT_TOKENS,
    max_error: Annotated[float, typer.Option(min=0, max=1, help="Largest error (root mean square, relative).")] = DEFAULT_MAX_ERROR,
    min_ratio: Annotated[float, typer.Option(min=0, help="How many times smaller it must at least be.")] = DEFAULT_MIN_RATIO,
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
def blend(
    model: Annotated[Path, typer.Option(help="A Hugging Face model's directory.")],
    separator: Annotated[str, typer.Option(help="Text that ends each document, as the engine is given its token ids.")],
    certificates: Annotated[Path, typer.Option(help="Folder for the certificate: blend_certificates of engines.")] = DEFAULT_CERTIFICATES,
    name: Annotated[str | None, typer.Option(help="Under which the model's KV is shared.", show_default="the directory's name")] = None,
    text: Annotated[Path | None, typer.Option(help="Held-out text, UTF-8.", show_default="Python's documentation")] = None,
    policy: Annotated[str, typer.Option(help="Which tokens are computed anew: " + ", ".join(BLEND_POLICIES) + ".")] = BLEND_POLICIES[0],
    ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of the reused tokens that is.")] = 0.15,
    prompts: Annotated[int, typer.Option(min=2, max=100_000, help="Prompts to measure on.")] = 50,
    documents: Annotated[int, typer.Option(min=1, max=1000, help="Documents of each.")] = 3,
    document_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each document.")] = 256,
    ending_tokens: Annotated[int, typer.Option(min=2, help="Tokens behind the documents, which are predicted.")] = 64,
    max_kl: Annotated[float, typer.Option(min=0, help="Largest mean divergence, in nats.")] = QualityBounds().max_kl_nats,
    min_agreement: Annotated[float, typer.Option(min=0, max=1, help="Least share of equal choices.")] = QualityBounds().min_top1_agreement,
    max_loss: Annotated[float, typer.Option(min=0, help="Largest growth of the loss, nats.")] = QualityBounds().max_delta_loss_nats,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Certify that a model may be blended: measure it against full recompute.

    Slices of the text become documents, whose KV is computed one by one and
    reused; what follows them in the text is predicted, and compared with what
    the model predicts without reuse. The certificate is kept whether it was
    passed or not; engines read it, and blend only with one that was.
    """
    if policy not in BLEND_POLICIES:
        raise UsageError(f"--policy {policy}: known are {', '.join(BLEND_POLICIES)}")
    try:
        from lmcache_ctl.certify.blend import Certified, Cut, certify
    except ModuleNotFoundError as exc:
        raise CtlError(f"certify blend needs the package {exc.name!r}; install lmcache-ctl[model]") from exc
    from lmcache_ctl.certify.progress import progress_of_prompts
    from lmcache_ctl.certify.tables import print_blend_certificate

    wanted = Certified(model, name, separator, policy, ratio, text)
    with progress_of_prompts(prompts) as progress:
        found = certify(
            wanted, Cut(prompts, documents, document_tokens, ending_tokens), QualityBounds(max_kl, min_agreement, max_loss), progress
        )
    try:
        path = CertificateFolder(certificates).save(found)
    except OSError as exc:
        raise CtlError(f"cannot keep the certificate in {certificates}: {exc}") from exc
    show(found, output, lambda certificate: print_blend_certificate(certificate, path))
    if found.reasons:
        raise typer.Exit(1)
