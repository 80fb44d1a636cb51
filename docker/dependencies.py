"""Print what the packages of this repository need from outside, so that an image can install it in
a layer of its own.

Reads nothing but `pyproject.toml` files, so the layer is made again only when one of them (or a
pin) changes. Extras that one of the packages asks of another are followed. Standard library only:
it runs before anything is installed.

Usage: python dependencies.py FOLDER[EXTRA,…] … > requirements.txt
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

REQUIREMENT = re.compile(r"\s*(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<extras>[^\]]*)\])?(?P<rest>.*)")
FOLDER = re.compile(r"(?P<folder>[^\[]+)(?:\[(?P<extras>[^\]]*)\])?")


def external_requirements(arguments: list[str]) -> list[str]:
    """List the requirements of some packages that are not among these packages.

    Args:
        arguments: Folders with a `pyproject.toml`, each with the extras to install, as in
            `libs/core[redis]`.

    Returns:
        Requirements in order, each once.

    Raises:
        ValueError: An extra is asked for that a package does not have.
    """
    projects: dict[str, dict[str, Any]] = {}
    wanted: list[tuple[str, frozenset[str]]] = []
    for argument in arguments:
        match = FOLDER.fullmatch(argument)
        if match is None:
            raise ValueError(f"{argument!r} is not of the form FOLDER or FOLDER[EXTRA,…]")
        project = tomllib.loads(
            (Path(match["folder"]) / "pyproject.toml").read_text(encoding="utf-8")
        )["project"]
        projects[_normal(project["name"])] = project
        wanted.append((_normal(project["name"]), _extras(match["extras"])))
    found: dict[str, None] = {}
    seen: set[tuple[str, str]] = set()
    while wanted:
        name, extras = wanted.pop(0)
        for extra in ("", *sorted(extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for requirement in _declared(projects[name], extra):
                match = REQUIREMENT.fullmatch(requirement)
                if match is not None and _normal(match["name"]) in projects:
                    wanted.append((_normal(match["name"]), _extras(match["extras"])))
                else:
                    found[requirement] = None
    return list(found)


def _declared(project: dict[str, Any], extra: str) -> list[str]:
    if not extra:
        return list(project.get("dependencies", []))
    optional = project.get("optional-dependencies", {})
    if extra not in optional:
        raise ValueError(f"{project['name']} has no extra {extra!r}")
    return list(optional[extra])


def _extras(text: str | None) -> frozenset[str]:
    return frozenset(part.strip() for part in (text or "").split(",") if part.strip())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    try:
        print("\n".join(external_requirements(sys.argv[1:])))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"dependencies.py: {error}")
