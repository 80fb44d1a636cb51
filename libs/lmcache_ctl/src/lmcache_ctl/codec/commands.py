"""`lmcachectl codec`: what codecs did, what they wrote, and what they can do here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmcache_ctl.options import ONE_SIDECAR, reaches
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind

EXIT_DAMAGED = 1
DEFAULT_TOKENS = 512
MAX_TOKENS = 1 << 15


def checked_profiles(profiles: list[str]) -> list[str]:
    """Return these profiles, or all if none is named; refuse an unknown one."""
    from lmcache_core.serde import CODEC_NAMES

    for profile in profiles:
        if profile not in CODEC_NAMES:
            raise typer.BadParameter(f"{profile!r} is none of {', '.join(CODEC_NAMES)}")
    return profiles or list(CODEC_NAMES)


@reaches(Kind.SIDECAR, ONE_SIDECAR)
def stats(reach: Reach, output: Output = OutputFormat.TABLE) -> None:
    """Show what the codecs of a sidecar did since its start.

    Bytes before and after, how many times smaller, and speed in GB (10^9 raw
    bytes) a second of the codec's own time. Errors as encoders measured them:
    the largest, relative to the largest value of its token or channel (max),
    and root mean squares, relative to those of what was stored (rms).
    """
    from lmcache_ctl.codec.stats import fetch_stats, print_stats

    show(reach.ask_one(Kind.SIDECAR, fetch_stats), output, print_stats)


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="Record files, or directories with such (*.kvr) below them."
        ),
    ],
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show what record files hold: those of a disk tier, or of a file:// remote tier.

    Whose KV it is, how it is encoded, and whether it is whole; nothing is
    decoded, nothing changed. Exits with 1 when a file is not a whole record.
    """
    from lmcache_ctl.codec.records import inspect_file, print_files, record_files

    files = [inspect_file(path) for path in record_files(paths)]
    show(files, output, print_files)
    if any(file.fault for file in files):
        raise typer.Exit(EXIT_DAMAGED)


def measure(
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic", help="Synthetic KV in the shape of Llama-3.1-8B (the default)."
        ),
    ] = False,
    kv: Annotated[
        Path | None,
        typer.Option(
            help=(
                r"A safetensors file; each tensor is \[sides, layers, tokens, channels], sides"
                r" being keys and values."
            )
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face model's directory: the KV that it computes of a text."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="A profile to measure; may be given several times.", show_default="all"),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1, max=MAX_TOKENS, help="Most tokens to measure on, in chunks of 256."),
    ] = DEFAULT_TOKENS,
    threads: Annotated[
        int,
        typer.Option(
            min=0, max=256, help="Threads for one chunk; 0: as many as there are processors."
        ),
    ] = 0,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Measure on this machine how small, how exact and how fast each profile is.

    Use KV of your own model where you can: synthetic KV shows the speed, but
    not how well a model's KV compresses. The effect of errors on answers is
    not measured.
    """
    sources = {"--synthetic": synthetic, "--kv": kv, "--model": model}
    chosen = [name for name, given in sources.items() if given]
    if len(chosen) > 1:
        names = " and ".join(chosen)
        raise typer.BadParameter(f"{names} exclude one another: give one source of KV")
    profiles = checked_profiles(profile or [])
    from lmcache_ctl.codec.kv import load_kv
    from lmcache_ctl.codec.measure import MeasuredKv, measure_profile, print_measurements

    found = load_kv(kv, model, tokens)
    measured = [measure_profile(found, profile, threads) for profile in profiles]
    show(MeasuredKv(found.source, found.num_tokens, measured), output, print_measurements)
