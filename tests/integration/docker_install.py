"""The Dockerfiles, step by step without a container engine: the same copies and the same commands,
in a folder of their own.

What it cannot show is the base image; what it does show is that the files named exist, that the
dependency layer is complete (the packages are installed with --no-deps after it), and that the
entry point starts without torch, as the user of the image and, where this machine lets us, with
everything read-only but one folder.

Not called test_…: the installations take about two minutes. `make docker-lint` names this file.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import hcl2
import pytest
from lmcache_core.memory import ArenaAllocator, SharedArena
from lmcache_core.mover import Attach, MoverClient

from tests.fixtures.dockerfile import PAYLOAD, REPOSITORY, VENV, Build, parse, unreadable
from tests.fixtures.sealed import USER, can_seal, protect, sealed
from tests.fixtures.shared_arena import create_shared_arena
from tests.fixtures.waiting import until, wait_until

SERVICES = {
    "storage": "cache_storage",
    "lookup": "lookup",
    "broker": "p2p_broker",
    "sidecar": "sidecar",
    "webhook": "webhook",
}
IMAGES = [*SERVICES, "mover", "payload"]
# The one image that is made by another's Dockerfile, with this argument.
CODEC_IMAGE = "sidecar-codec"
CODEC_ARGUMENTS = {"VARIANT": "-codec"}
# For tests, not published, and far from lean: vLLM and PyTorch.
TEST_IMAGE = "vllm-cpu-tiny"
START_TIMEOUT_S = 60
BASE_MB = 130  # python:3.12-slim, unpacked
MAX_IMAGE_MB = 250
MAX_CODEC_IMAGE_MB = 475  # the compiler alone is 180
MAX_MOVER_IMAGE_MB = 350  # NIXL's libraries are 116, numpy is 45
# Settings with which a service starts in any folder, next to others.
SMALL = {
    "storage": {
        "LM_PORT": "0",
        "MEMORY_GB": "0.0625",
        "DISK_PATH": "{folder}/disk",
        "DISK_GB": "0.0625",
    },
    "sidecar": {
        "LM_PORT": "0",
        "ARENA_GB": "0.0625",
        "ARENA_PATH": "{folder}/arena",
        "SOCKET_PATH": "{folder}/sidecar.sock",
    },
    # Discovery loads the half of Kubernetes' client that is left; there is no answer.
    "broker": {
        "DISCOVERY": "kubernetes",
        "KUBERNETES_SERVICE": "sidecars",
        "KUBERNETES_NAMESPACE": "lmcache",
        "KUBERNETES_API_URL": "http://127.0.0.1:9",
    },
    "webhook": {"SIDECAR_IMAGE": "lmcache-sidecar:0.1.0", "PAYLOAD_IMAGE": "lmcache-payload:0.1.0"},
}


@pytest.fixture
def house() -> Iterator[Path]:
    """A folder that the image's user may look into, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="lmcache-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def megabytes(tree: Path) -> float:
    return (
        sum(
            path.lstat().st_size
            for path in tree.rglob("*")
            if path.is_file() and not path.is_symlink()
        )
        / 1e6
    )


def test_every_image_is_tested_and_baked() -> None:
    names = {
        path.name.removesuffix(".Dockerfile")
        for path in (REPOSITORY / "docker").glob("*.Dockerfile")
    }
    assert names == {*IMAGES, TEST_IMAGE}
    bake = hcl2.loads((REPOSITORY / "docker-bake.hcl").read_text(encoding="utf-8"))
    variables = {
        name.strip('"'): body["default"]
        for block in bake["variable"]
        for name, body in block.items()
    }
    assert {image.strip('"') for image in variables["IMAGES"]} == {*IMAGES, CODEC_IMAGE}
    targets = {name.strip('"'): body for block in bake["target"] for name, body in block.items()}
    assert targets["image"]["dockerfile"] == '"docker/${trimsuffix(image, "-codec")}.Dockerfile"'
    assert targets["image"]["args"] == {
        "VARIANT": '${image == "sidecar-codec" ? "-codec" : null}',
        "TORCH": '${image == "vllm-cpu-tiny" ? TORCH : null}',
    }
    groups = {name.strip('"'): body for block in bake["group"] for name, body in block.items()}
    in_cluster = {one.strip('"') for one in groups["cluster-test"]["targets"]}
    assert in_cluster == {*IMAGES, TEST_IMAGE} - {"mover"}
    assert targets["contents"]["attest"] == ['"type=sbom"']


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_the_image_is_lean_and_unprivileged(image: str) -> None:
    stages = parse(REPOSITORY / "docker" / f"{image}.Dockerfile")
    assert len(stages) == 2
    final = stages[-1]
    assert {stage.base for stage in stages} == {"python:3.12-slim"}
    assert final.all("USER") == [f"{USER}:{USER}"]
    entry_point, tree = (
        (f"{PAYLOAD}/install", PAYLOAD) if image == "payload" else (f"lmcache-{image}", VENV)
    )
    assert [json.loads(argument) for argument in final.all("ENTRYPOINT")] == [[entry_point]]
    assert final.all("COPY") == [f"--from=build {tree} {tree}"]
    assert not {"RUN", "ADD", "HEALTHCHECK", "CMD", "SHELL"} & {
        instruction for instruction, _ in final.steps
    }
    assert "PYTHONDONTWRITEBYTECODE=1" in " ".join(final.all("ENV"))
    name = "sidecar$VARIANT" if image == "sidecar" else image
    [title] = [
        argument for argument in final.all("LABEL") if f'image.title="lmcache-{name}"' in argument
    ]
    assert title.count("org.opencontainers.image.") == 4


TRY_TO_WRITE = """
import os, pathlib, sys
for place in map(pathlib.Path, sys.argv[1:]):
    try:
        (place / "written").write_text("by the entry point")
    except OSError:
        continue
    print(place)
print(os.getuid(), os.getgid(), os.getgroups())
"""


def test_what_an_entry_point_writes_is_noticed(house: Path) -> None:
    """Else an image that writes to its root file system would pass here."""
    tree, folder = house / VENV.lstrip("/"), house / "writable"
    tree.mkdir(parents=True)
    folder.mkdir()
    protect(tree)
    places = [
        str(place)
        for place in (
            tree,
            house,
            folder,
            Path(tempfile.gettempdir()),
            "/var/tmp",
            "/dev/shm",
            Path.cwd(),
        )
    ]
    line = sealed([sys.executable, "-I", "-c", TRY_TO_WRITE, *places], house, folder)
    answer = subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    *written, identity = answer.stdout.splitlines()
    for place in written:
        Path(place, "written").unlink()
    assert str(folder) in written
    if can_seal():
        assert (written, identity) == ([str(folder)], f"{USER} {USER} []")
    else:
        assert os.geteuid() == 0 or str(tree) not in written


@pytest.mark.timeout(600)
@pytest.mark.parametrize("image", sorted([*SERVICES, CODEC_IMAGE]))
def test_the_image_installs_and_starts(image: str, house: Path) -> None:
    has_codecs = image == CODEC_IMAGE
    service = image.removesuffix("-codec")
    build = Build(house, CODEC_ARGUMENTS if has_codecs else None)
    stage = parse(REPOSITORY / "docker" / f"{service}.Dockerfile")[0]
    assert f"./services/{SERVICES[service]}" in stage.all("RUN")[-1]
    build.run(stage)
    tree = house / VENV.lstrip("/")
    assert unreadable(tree) == []
    binaries = tree / "bin"
    version = build.shell([str(binaries / f"lmcache-{service}"), "--version"])
    assert version.startswith(f"lmcache-{service} 0.1.0")
    (packages,) = (tree / "lib").glob("python3.*/site-packages")
    names = {
        one.name.lower().replace("_", "-")
        for one in importlib.metadata.distributions(path=[str(packages)])
    }
    assert {"lmcache-core", "lmcache-servicekit", f"lmcache-{service}"} <= names
    assert not {"torch", "triton", "transformers", "pytest", "pip"} & names
    assert {"numba", "numpy"} & names == ({"numba", "numpy"} if has_codecs else set())
    build.shell([sys.executable, "-m", "pip", "--python", str(binaries / "python"), "check"])
    assert bool(list((packages / "lmcache_core").rglob("*.nbi"))) == has_codecs, (
        "machine code of the codecs"
    )
    assert (packages / "lmcache_core/serde/__pycache__/lmcache-processor").exists() == has_codecs, (
        "for nodes of other kinds too"
    )
    size = BASE_MB + megabytes(tree)
    print(f"lmcache-{image}: about {size:.0f} MB, of which {BASE_MB} are the base")
    assert size < (MAX_CODEC_IMAGE_MB if has_codecs else MAX_IMAGE_MB)
    protect(tree)
    if service == "sidecar" and not has_codecs:
        ask_for_codecs(binaries / "lmcache-sidecar", house)
    serve(
        binaries / f"lmcache-{service}",
        service,
        house,
        {"PEER_SERDE": "lossless"} if has_codecs else {},
    )


@pytest.mark.timeout(600)
def test_the_mover_installs_and_attaches(house: Path) -> None:
    build = Build(house)
    build.run(parse(REPOSITORY / "docker" / "mover.Dockerfile")[0])
    tree, folder = house / VENV.lstrip("/"), house / "started"
    assert unreadable(tree) == []
    command = tree / "bin/lmcache-mover"
    assert build.shell([str(command), "--version"]).startswith("lmcache-mover 0.1.0")
    (packages,) = (tree / "lib").glob("python3.*/site-packages")
    assert not {"torch", "nixl_ep_cu12"} & {path.name for path in packages.iterdir()}
    size = BASE_MB + megabytes(tree)
    print(f"lmcache-mover: about {size:.0f} MB, of which {BASE_MB} are the base")
    assert size < MAX_MOVER_IMAGE_MB
    protect(tree)
    folder.mkdir()
    arena = create_shared_arena(folder / "arena", 1 << 20)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)  # for the image's user
    line = sealed([str(command), "--socket", str(folder / "socket")], house, folder)
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), **variables_of("mover")}
    with subprocess.Popen(line, cwd=folder, env=env | {"UCX_TLS": "tcp"}) as mover:
        try:
            asyncio.run(attached(folder / "socket", arena))
        finally:
            mover.kill()


async def attached(path: Path, arena: SharedArena) -> None:
    """Wait until a mover has mapped an arena, and can be reached."""
    attach = Attach(str(arena.path), arena.size, arena.generation)
    client = MoverClient(path, attach, ArenaAllocator(arena.store_view))
    client.open()
    await until(lambda: bool(client.blob), START_TIMEOUT_S)
    await client.close()


@pytest.mark.timeout(600)
def test_the_payload_installs_into_a_volume(house: Path) -> None:
    build = Build(house)
    build.run(parse(REPOSITORY / "docker" / "payload.Dockerfile")[0])
    tree, volume = house / PAYLOAD.lstrip("/"), house / "volume"
    assert unreadable(tree) == []
    volume.mkdir()
    size = BASE_MB + megabytes(tree)
    print(
        f"lmcache-payload: about {size:.0f} MB, of which {BASE_MB} are the base;"
        f" {megabytes(tree / 'python'):.1f} MB go into a pod"
    )
    assert size < MAX_IMAGE_MB
    assert {path.name for path in tree.iterdir()} == {"install", "python"}
    assert {path.name for path in (tree / "python/lmcache_core/bundled").iterdir()} == {
        "cp311",
        "cp312",
        "cp313",
        "cp314",
    }
    for folder in (tree / "python/lmcache_core/bundled").iterdir():
        assert {"msgspec", "xxhash"} <= {path.name for path in folder.iterdir()}
        assert list(folder.rglob(f"*.cpython-{folder.name.removeprefix('cp')}-*.so")), (
            "built for that Python"
        )
    protect(tree)
    # The first line of the script names the image's Python, which need not be where this machine's
    # is.
    command = [sys.executable, "-I", str(tree / "install"), str(volume)]
    said = [build.shell(sealed(command, house, volume)) for _ in range(2)]
    assert said == [
        f"lmcache-payload: {what} {volume}/python\n" for what in ("copied to", "already in")
    ]
    names = {path.name for path in (volume / "python").iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "lmcache_core",
        "lmcache_kernels",
        ".stamp",
    }
    assert all(
        stat.S_IMODE(path.stat().st_mode) in (0o755, 0o644)
        for path in (volume / "python").rglob("*")
    ), "vLLM's user may read it"
    bare = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.append({str(volume / 'python')!r}); {IN_A_BARE_PYTHON}",
    ]
    assert build.shell(bare).split() == ["True", str(volume / "python/lmcache_core/bundled")]


IN_A_BARE_PYTHON = """
from lmcache_core.integrations.vllm import append_missing
is_needed = append_missing()
import msgspec, xxhash, lmcache_core.record, lmcache_core.sidecar, pathlib
print(is_needed, pathlib.Path(xxhash.__file__).parents[2])
""".strip().replace("\n", "; ")


def ask_for_codecs(command: Path, root: Path) -> None:
    """A sidecar without codecs that is to encode ends at once, with a sentence that names the
    image to take.
    """
    folder = root / "asked"
    folder.mkdir()
    env = settings_of("sidecar", folder, {"PEER_SERDE": "lossless"})
    line = sealed([str(command)], root, folder)
    answer = subprocess.run(
        line,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert answer.returncode == 2, answer.stderr
    assert "peer_serde='lossless'" in answer.stderr
    assert "run the image lmcache-sidecar-codec" in answer.stderr
    assert "Traceback" not in answer.stderr


def settings_of(service: str, folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """The environment that a service starts with."""
    settings = {"PORT": "0", **SMALL.get(service, {}), **more}
    env = {
        f"LMCACHE_{service.upper()}_{name}": value.format(folder=folder)
        for name, value in settings.items()
    }
    return env | {"PATH": os.environ["PATH"], "TMPDIR": str(folder), **variables_of(service)}


def variables_of(image: str) -> dict[str, str]:
    """What the image sets, but PATH."""
    words = " ".join(parse(REPOSITORY / "docker" / f"{image}.Dockerfile")[-1].all("ENV")).split()
    return {
        name: value for name, _, value in (word.partition("=") for word in words) if name != "PATH"
    }


def serve(command: Path, service: str, root: Path, more: Mapping[str, str]) -> None:
    """Run the service until it answers, then stop it as Kubernetes does."""
    folder = root / "writable"
    folder.mkdir()
    env = settings_of(service, folder, more)
    ports = folder / "ports.json"
    log = root / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            sealed([str(command), "--port-file", str(ports)], root, folder),
            env=env,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: ports.exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        if can_seal():
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            assert f"Uid:\t{USER}\t{USER}" in status
            assert "CapEff:\t0000000000000000" in status
        port = json.loads(ports.read_text(encoding="utf-8"))["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
            assert json.load(answer) == {"status": "ok"}
        process.terminate()
        assert process.wait(timeout=START_TIMEOUT_S) == 0, log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()
