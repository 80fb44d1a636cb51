"""Every kernel, compiled for this GPU, against its reference or the CPU codec."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from lmcache_core.serde.chunk_codec import Profile

from tests.gpu.pytests import ROOT, run_pytest
from tests.gpu.report import Report, WrongBytes
from tests.gpu.wrong_bytes import WRONG_BYTES

CHECKS = ROOT / "tests/unit/kernels/interpreted"
KERNELS = {
    "paged_copy": ("check_paged_copy.py",),
    "rope_rotate": ("check_rope_rotate.py",),
    "blend_select": ("check_blend_select.py",),
    "cachegen_decode": (
        "check_codec_streams.py",
        "check_codec_device.py",
        "check_encoded_loads.py",
    ),
}
"""Files of checks, by package of kernels; those that compile most come first."""
PROCESSES = ("-n", "8", "--dist", "worksteal")
"""Kernels are compiled one after the other in each; there are some 200 specialisations."""
DRY = ("check_rope_rotate.py",)
"""Interpreted in a dry run; the others take minutes there, and run in the unit tests."""


def described() -> list[str]:
    """Kernels and profiles that are checked."""
    return [*KERNELS, *(f"cachegen:{profile}" for profile in Profile)]


def run(report: Report) -> None:
    """Run the checks, file by file: one that cannot run costs no other."""
    errors = []
    for file in DRY if report.is_dry else itertools.chain(*KERNELS.values()):
        try:
            check(report, CHECKS / file)
        except RuntimeError as exc:
            errors.append(str(exc))
    if errors:
        raise RuntimeError("\n".join(errors))


def check(report: Report, *tests: Path | str) -> None:
    """Run checks with pytest.

    Raises:
        WrongBytes: A comparison of one failed.
        RuntimeError: One failed otherwise, or they could not run.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if report.is_dry:
        env["TRITON_INTERPRET"] = "1"
    options = () if report.is_dry else PROCESSES
    done = run_pytest(ROOT / "pyproject.toml", *options, *tests, env=env)
    name, last = Path(str(tests[0])).name, done.stdout.strip().splitlines()[-1:]
    if done.returncode:
        error = WrongBytes if done.returncode == WRONG_BYTES else RuntimeError
        raise error(f"{name}: {(done.stdout + done.stderr)[-4000:]}")
    report.note(name, text="".join(last))
