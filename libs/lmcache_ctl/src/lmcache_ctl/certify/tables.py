"""What `lmcachectl certify` prints for people."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.blend.certificate import BlendCertificate

from lmcache_ctl.certify.gate import Certificate
from lmcache_ctl.output import UNKNOWN, Columns, error_text, print_table, print_text, ratio_text


def print_certificate(found: Certificate) -> None:
    """A line for each profile, then why those that failed did."""
    title = (
        f"{found.source}: {found.num_tokens} tokens; lmcache-core {found.core_version},"
        f" {found.machine}"
    )
    rows = []
    for verdict in found.verdicts:
        measured = verdict.measurement
        cells = (
            (UNKNOWN, UNKNOWN)
            if measured is None
            else (ratio_text(measured.ratio), error_text(measured.rms_relative))
        )
        rows.append((verdict.profile, "passed" if verdict.has_passed else "FAILED", *cells))
    print_table(title, Columns(("profile", "", "ratio", "rms error"), left=2), rows)
    for verdict in found.verdicts:
        for reason in verdict.reasons:
            print_text(f"{verdict.profile}: {reason}")


def print_blend_certificate(found: BlendCertificate, path: Path) -> None:
    """What was measured beside its bounds, why it failed if it did, and where it lies."""
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
    print_table(
        title, Columns(("blended against full recompute", "measured", "bound"), left=3), rows
    )
    for reason in found.reasons:
        print_text(f"FAILED: {reason}")
    if not found.reasons:
        print_text("passed")
    print_text(f"kept as {path}")
