"""Every command in the documents is one that the programs know, with options that it has."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from lmcache_ctl.cli import app

from tests.unit.docs.pages import PAGES, ROOT, commands, name_of

CTL = typer.main.get_command(app)
ENDS = re.compile(r"\s(?:\||&|>|2>|&&)(?:\s|$)|[…]| or |;")
SERVICE = re.compile(
    r"(?:^|\s)(lmcache-(?:storage|lookup|broker|sidecar|webhook))((?: --?[\w-]+(?: [\w./$]+)?)*)$"
)
SERVICE_OPTIONS = {"--help", "--version", "--config", "--print-config", "--port-file"}
MAKE = re.compile(r"(?:^|\s)make ((?:[A-Z]+=\S+ )*)([a-z][a-z-]*)\b")
MODULE = re.compile(r"python3? -m ([\w.]+)")


def called(page: Path, program: str) -> Iterator[list[str]]:
    """The arguments of each call of that program on a page."""
    for line in commands(page):
        match = re.match(rf"(?:\w+=\S+ )*{program}(?:\s+(.*))?$", line)
        if match:
            yield shlex.split(ENDS.split(match[1] or "")[0])


def complaint(command: Any, arguments: list[str]) -> str | None:
    """What is wrong with a command line: a command or an option that there is not, a value too
    few or too many.
    """
    options = {
        name: each
        for each in command.params
        for name in (*each.opts, *each.secondary_opts)
        if name.startswith("-")
    }
    positional = [each for each in command.params if each.param_type_name == "argument"]
    rest = list(arguments)
    num_given = 0
    while rest:
        word = rest.pop(0)
        if word == "--help":
            continue
        if word.startswith("-"):
            if word not in options:
                return f"no option {word}"
            if not options[word].is_flag and not rest:
                return f"{word} wants a value"
            rest = rest if options[word].is_flag else rest[1:]
        elif hasattr(command, "commands"):
            return (
                complaint(command.commands[word], rest)
                if word in command.commands
                else f"no command {word}"
            )
        else:
            num_given += 1
    if num_given > len(positional) and not any(each.nargs < 0 for each in positional):
        return f"takes {len(positional)} arguments"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lmcachectl_knows_every_command_and_option(page: Path) -> None:
    for arguments in called(page, "lmcachectl"):
        assert complaint(CTL, arguments) is None, f"lmcachectl {' '.join(arguments)}"


def test_commands_that_do_not_exist_are_found() -> None:
    for wrong in (
        ["--namespace", "a", "status"],
        ["stat"],
        ["status", "--namspace", "a"],
        ["status", "here"],
        ["lookup", "stat"],
    ):
        assert complaint(CTL, wrong) is not None, wrong
    assert sum(len(list(called(page, "lmcachectl"))) for page in PAGES) > 50


def test_every_target_of_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)) | set(
        re.findall(r"\$\(([A-Z]+)\)", makefile)
    )
    found = set()
    for page in PAGES:
        for line in commands(page):
            for given, target in MAKE.findall(line):
                found.add(target)
                assert target in targets, f"{name_of(page)}: make {target}"
                assert {each.partition("=")[0] for each in given.split()} <= variables, (
                    f"{name_of(page)}: make {given}"
                )
    assert {"demo", "test", "check"} <= found


def test_make_help_lists_what_can_be_made() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [declared] = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    phony = set(declared.replace("\\\n", " ").split())
    listed = set(re.findall(r"^([a-z][a-z-]*):.*## \S", makefile, re.MULTILINE))
    assert listed <= phony
    assert phony == set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert len(listed) <= 15


def test_services_have_the_options_that_they_are_called_with() -> None:
    num_calls = 0
    for page in PAGES:
        for line in commands(page):
            for _, options in SERVICE.findall(line):
                num_calls += 1
                assert set(re.findall(r"--[\w-]+", options)) <= SERVICE_OPTIONS, (
                    f"{name_of(page)}: {line}"
                )
    assert num_calls > 10


def test_every_module_that_is_run_exists() -> None:
    found = {module for page in PAGES for line in commands(page) for module in MODULE.findall(line)}
    ours = {module for module in found if module.startswith(("lmcache_", "tests."))}
    assert ours
    for module in ours:
        assert importlib.util.find_spec(module) is not None, module
