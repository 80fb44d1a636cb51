"""Judge whether codec profiles may be used for some KV."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
from lmcache_core.errors import ConfigError

from lmcache_ctl.codec.kv import Kv
from lmcache_ctl.codec.measure import Measurement, measure_profile
from lmcache_ctl.errors import CtlError
from lmcache_ctl.output import UNKNOWN, Columns, error_text, print_table, print_text, ratio_text


class CodecBounds(msgspec.Struct, frozen=True):
    """The bounds that a profile must meet.

    Attributes:
        max_error: Largest root mean square error, relative to what was stored.
        min_ratio: Smallest ratio of bytes before to bytes after.
    """

    max_error: float
    min_ratio: float


class CodecVerdict(msgspec.Struct, frozen=True):
    """One profile.

    Attributes:
        profile: Its name.
        has_passed: Whether it may be used.
        reasons: Why not; empty if it may.
        measurement: What was measured; None where that failed.
    """

    profile: str
    has_passed: bool
    reasons: list[str]
    measurement: Measurement | None


class CodecCertificate(msgspec.Struct, frozen=True):
    """What was certified, by which version, and on which machine.

    Attributes:
        source: Where the KV comes from.
        num_tokens: How many tokens of it.
        bounds: The bounds that the profiles had to meet.
        core_version: Of the library whose codecs these are.
        machine: Processor architecture and system, which floating point follows from.
        verdicts: In the order of the request.
    """

    source: str
    num_tokens: int
    bounds: CodecBounds
    core_version: str
    machine: str
    verdicts: list[CodecVerdict]

    @property
    def has_passed(self) -> bool:
        """Whether all profiles have."""
        return all(verdict.has_passed for verdict in self.verdicts)


def certify_codecs(kv: Kv, profiles: Sequence[str], bounds: CodecBounds) -> CodecCertificate:
    """Measure each profile and judge it.

    Args:
        kv: Of at least one token.
        profiles: Names that `create_codec` knows, but not `naive`.
        bounds: The bounds that they must meet.

    Raises:
        ConfigError: A package that a codec needs is missing.
    """
    verdicts = [_judge(kv, profile, bounds) for profile in profiles]
    machine = f"{platform.machine()} {platform.system()}"
    return CodecCertificate(
        kv.source, kv.num_tokens, bounds, version("lmcache-core"), machine, verdicts
    )


def _judge(kv: Kv, profile: str, bounds: CodecBounds) -> CodecVerdict:
    try:
        found = measure_profile(kv, profile)
    except ConfigError:
        raise
    except CtlError as exc:  # a codec without loss that lost something
        return CodecVerdict(profile, False, [str(exc)], None)
    reasons = reasons_against(found, bounds)
    return CodecVerdict(profile, not reasons, reasons, found)


def reasons_against(found: Measurement, bounds: CodecBounds) -> list[str]:
    """Return why a profile with these measurements may not be used; empty if it may."""
    reasons = []
    if found.rms_relative is None:
        reasons.append("its error cannot be measured: values of such a dtype are not read here")
    elif found.rms_relative > bounds.max_error:
        reasons.append(
            f"error {found.rms_relative:.1%} is above {bounds.max_error:.1%}: take a profile with"
            " less loss"
        )
    if found.ratio < bounds.min_ratio:
        reasons.append(
            f"{found.ratio:.2f} times smaller, and {bounds.min_ratio:.2f} is wanted: naive costs no"
            " time"
        )
    return reasons


def print_certificate(found: CodecCertificate) -> None:
    """Print a line for each profile, then why those that failed did."""
    title = (
        f"{found.source}: {found.num_tokens} tokens; lmcache-core {found.core_version},"
        f" {found.machine}"
    )
    rows = []
    for verdict in found.verdicts:
        cells = (UNKNOWN, UNKNOWN)
        if (measured := verdict.measurement) is not None:
            cells = (ratio_text(measured.ratio), error_text(measured.rms_relative))
        rows.append((verdict.profile, "passed" if verdict.has_passed else "FAILED", *cells))
    print_table(title, Columns(("profile", "", "ratio", "rms error"), left=2), rows)
    for verdict in found.verdicts:
        for reason in verdict.reasons:
            print_text(f"{verdict.profile}: {reason}")
