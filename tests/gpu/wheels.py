"""`python -m tests.gpu.wheels FOLDER`: download what a machine without a package index may lack,
and print how to use it there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRESENT = ("torch", "triton", "numpy", "numba", "safetensors", "transformers")
"""What the machine has, with all that they need; too large to travel."""
CARRIED = (
    "msgspec",
    "xxhash",
    "PyYAML",
    "httpx",
    "fastapi",
    "uvicorn",
    "httptools",
    "prometheus-client",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
)
"""What else all parts need but `vllm`; what they need themselves is downloaded too."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MAX_BYTES = 64 << 20


def command(folder: Path, python: str) -> list[str]:
    """Return the call of pip that downloads them for another Python than this one."""
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    options += ["-c", str(ROOT / "constraints.txt"), "-d", str(folder)]
    return [sys.executable, "-m", "pip", "download", *options, *CARRIED]


def usage(folder: Path) -> str:
    """Return what to run on the machine, in the root of a copy of this repository."""
    sources = sorted(path.relative_to(ROOT) for path in ROOT.glob("*/*/src"))
    path = ":".join(map(str, ["/tmp/site", ".", Path("kernels/src"), *sources]))
    return (
        f"for wheel in {folder}/*.whl; do python3 -m zipfile -e $wheel /tmp/site; done\n"
        f"export PYTHONPATH={path}\n"
        "python3 -m tests.gpu"
    )


def main() -> int:
    """Download, and check that they are small."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of that machine (default: %(default)s)")
    options = parser.parse_args()
    if code := subprocess.run(command(options.folder, options.python), check=False).returncode:
        return code
    num_bytes = sum(wheel.stat().st_size for wheel in options.folder.glob("*.whl"))
    if num_bytes > MAX_BYTES:
        print(f"{num_bytes >> 20} MiB of wheels; the limit is {MAX_BYTES >> 20}", file=sys.stderr)
        return 1
    print(usage(options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
