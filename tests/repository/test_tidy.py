"""The house rules that a machine can check. The lists of exceptions may only shrink."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).resolve().parents[2]
SOURCE_DIRS = ("libs", "kernels", "services")
MAX_PARAMETERS = 7
BANNED_MODULE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
UNSAFE_IMPORTS = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec"}

# Where any exception may be caught and not raised again: the task supervisor, and what hands it on
# in a future.
BROAD_EXCEPT_PLACES = {
    "libs/lmcache_core/src/lmcache_core/concurrency/started_pool.py",  # it goes to a future
    "libs/lmcache_core/src/lmcache_core/concurrency/supervisor.py",  # the task supervisor
    "libs/lmcache_core/src/lmcache_core/engine/guard.py",  # the degrading wrapper, on request only
}
# Who may read the environment: settings, the command line's options, the engine's config, and what
# names KV by variables of vLLM's own, or remembers digests in the user's cache directory; and the
# mover, which keeps UCX on loopback unless its variables say otherwise.
ENVIRONMENT_PLACES = re.compile(
    r"(/settings\.py|/lmcache_ctl/options\.py|/lmcache_core/config/sources\.py|/lmcache_mover/worker\.py|/integrations/(vllm/(identity|kv_settings)|sglang/server_settings|file_digests)\.py)$"
)
# Constructors whose parameters the documented API fixes.
DOCUMENTED_PARAMETERS = {"blend", "__init__", "from_defaults", "from_legacy"}


@functools.cache
def sources() -> dict[str, tuple[str, ast.Module]]:
    found = {}
    for top in SOURCE_DIRS:
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            text = path.read_text(encoding="utf-8")
            found[name] = (text, ast.parse(text, name))
    return found


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for name, (_, tree) in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                yield name, node


def test_functions_take_few_parameters() -> None:
    crowded = []
    for name, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        names = [
            a.arg
            for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if a.arg not in ("self", "cls")
        ]
        is_command = names[:1] == ["ctx"] and "lmcache_ctl" in name  # typer makes options of them
        if (
            len(names) > MAX_PARAMETERS
            and not is_command
            and not (node.name in DOCUMENTED_PARAMETERS and "lmcache_core" in name)
        ):
            crowded.append(f"{name}:{node.lineno} {node.name} ({len(names)} parameters)")
    assert not crowded


def test_modules_name_the_thing() -> None:
    assert not [
        name for name in sources() if BANNED_MODULE_NAMES & set(Path(name).with_suffix("").parts)
    ]


def test_no_exception_is_swallowed() -> None:
    broad = []
    for name, node in nodes(ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        caught = (
            {"BaseException"}
            if node.type is None
            else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        )
        reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        if (
            caught & {"Exception", "BaseException"}
            and not reraises
            and name not in BROAD_EXCEPT_PLACES
        ):
            broad.append(f"{name}:{node.lineno}")
    assert not broad


def test_named_places_for_broad_excepts_exist_and_need_it() -> None:
    for name in BROAD_EXCEPT_PLACES:
        assert re.search(r"except (Base)?Exception", sources()[name][0]), (
            f"{name} no longer needs its exception: take it off the list"
        )


def test_only_settings_read_the_environment() -> None:
    readers = [
        f"{name}:{node.lineno}"
        for name, node in nodes(ast.Attribute)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv"), ("os", "putenv")}
        and not ENVIRONMENT_PLACES.search(name)
    ]
    assert not readers


def test_nothing_unpickles_or_executes() -> None:
    unsafe = []
    for name, node in nodes(ast.Import, ast.ImportFrom, ast.Call):
        if isinstance(node, ast.Import):
            modules = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {(node.module or "").split(".")[0]}
        else:
            assert isinstance(node, ast.Call)
            modules = set()
            if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                unsafe.append(f"{name}:{node.lineno} {node.func.id}")
            if (
                isinstance(node.func, ast.Attribute)
                and node.func.attr == "load"
                and ast.unparse(node.func.value) == "torch"
            ):
                safe = [
                    k
                    for k in node.keywords
                    if k.arg == "weights_only"
                    and isinstance(k.value, ast.Constant)
                    and k.value.value is True
                ]
                if not safe:
                    unsafe.append(f"{name}:{node.lineno} torch.load")
        unsafe += [f"{name}:{node.lineno} {module}" for module in modules & UNSAFE_IMPORTS]
    assert not unsafe


def test_listening_on_all_interfaces_is_no_default() -> None:
    assert not [name for name, (text, _) in sources().items() if "0.0.0.0" in text]


def test_comments_leave_no_loose_ends() -> None:
    loose = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|# type: ignore(\s|$)")
    found = [
        f"{name}:{number}"
        for name, (text, _) in sources().items()
        for number, line in enumerate(text.splitlines(), 1)
        if loose.search(line)
    ]
    assert not found


def test_builtin_hash_names_nothing() -> None:
    """`hash()` of text differs between processes; only a `__hash__` may call it."""
    in_hash_methods = {
        id(call)
        for _, method in nodes(ast.FunctionDef)
        if isinstance(method, ast.FunctionDef) and method.name == "__hash__"
        for call in ast.walk(method)
    }
    calls = [
        f"{name}:{node.lineno}"
        for name, node in nodes(ast.Call)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hash"
        and id(node) not in in_hash_methods
    ]
    assert not calls


@pytest.mark.parametrize(
    "name",
    sorted(
        p.relative_to(ROOT).as_posix()
        for d in SOURCE_DIRS
        for p in (ROOT / d).rglob("pyproject.toml")
    ),
)
def test_packages_have_a_readme_and_types(name: str) -> None:
    package = ROOT / name
    assert (package.parent / "README.md").is_file()
    [source] = [path.parent for path in (package.parent / "src").glob("*/__init__.py")]
    assert (source / "py.typed").is_file()


def test_constraints_are_the_only_place_with_pinned_versions_of_others() -> None:
    pinned = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for d in SOURCE_DIRS
        for path in (ROOT / d).rglob("pyproject.toml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r'"(?!lmcache-)[A-Za-z0-9_.\[\],-]+==', line)
    ]
    assert not pinned


def test_no_large_or_binary_file_is_committed() -> None:
    listed = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
        .stdout.decode()
        .split("\0")
    )
    paths = [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    assert not [p for p in paths if p.stat().st_size > 5_000_000]


def test_places_of_long_tests_exist() -> None:
    assert [place for place in LONG if not (ROOT / "tests" / place).exists()] == []
