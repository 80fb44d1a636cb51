"""Exit codes and where text goes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import typer
from lmcache_ctl.cli import COMMANDS, GROUPS, app, examples_of, main

CTL = typer.main.get_command(app)
WORDS = [words.split() for words in COMMANDS]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("command", [[], *[[group] for group in GROUPS]])
def test_every_group_shows_its_usage(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--help", "-h"):
        assert run(*command, option) == 0
        said = capsys.readouterr()
        assert "Usage: lmcachectl " + " ".join(command) in said.out
        assert said.err == ""


@pytest.mark.parametrize("command", WORDS, ids=" ".join)
def test_every_command_shows_its_usage_and_examples_that_it_takes(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(*command, "-h") == 0
    said, err = capsys.readouterr()
    assert err == ""
    assert "Usage: lmcachectl " + " ".join(command) in said
    taking: Any = CTL
    for word in command:
        taking = taking.commands[word]
    examples = examples_of(" ".join(command))
    assert examples
    for example in examples:
        assert f"lmcachectl {example}" in said
        formats = re.search(r"table\|(wide\|name\|)?json\|yaml", said)
        assert (formats is not None) is (command != ["dashboard"]), "it opens a browser"
        words = shlex.split(example.partition(" < ")[0])
        assert words[: len(command)] == command
        taking.make_context("lmcachectl", words[len(command) :])


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("lmcachectl 0.")
    assert run("version", "--client") == 0
    assert capsys.readouterr().out.startswith("lmcachectl 0.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lookup", "prefix"], "CHUNK_ID"),
        (["lookup", "locations", "x"], "'x' is not a chunk id"),
        (["lookup", "status", "-o", "xml"], "'--output' / '-o': 'xml' is not one of"),
        (["lookup", "status", "--url", "localhost:8083"], "an address begins with http://"),
        (["status", "--lookup-url", "http://h:1", "--timeout", "0"], "0: must be a number above 0"),
        (["status", "--tls", "/nowhere/ca.pem"], "/nowhere/ca.pem"),
        (
            ["status", "-n", "x", "--kubeconfig", "/nowhere/kubeconfig"],
            "no usable kubeconfig (no such file) in kubeconfig=/nowhere/kubeconfig: give another",
        ),
        (["lookup", "status", "--token-file", "/nowhere/token"], "'/nowhere/token' cannot be read"),
        (
            ["explain", "ab" * 32, "--token-file", "/nowhere/token"],
            "'/nowhere/token' cannot be read",
        ),
        (["explain", "deadbeef"], "'deadbeef' is not a chunk hash: 64 lowercase hex digits"),
        (["pin", "deadbeef"], "'deadbeef' is not a chunk hash: 64 lowercase hex digits"),
        (["explain"], "give chunk hashes or --tokens, --prompt"),
        (["explain", "ab" * 32, "--tokens", "-"], "give chunk hashes or --tokens, --prompt"),
        (["explain", "--prompt", "/nowhere/p"], "cannot read /nowhere/p"),
        (["explain", "--prompt", "/dev/null"], "/dev/null is empty: write the prompt"),
        (["explain", "--request", "x", "--vllm-url", "http://h:1"], "--vllm-url tokenizes text"),
        (["explain", "--tokens", "/dev/null"], "/dev/null is empty: write token ids"),
        (["unknown"], "unknown"),
        *(
            ([*words.split(), "-A"], "No such option: -A")
            for words in ("drain sidecar", "undrain sidecar", "pin", "evict sidecar", "dashboard")
        ),
        (["status", "-A", "--lookup-url", "http://h:1"], "leave out --namespace and addresses"),
    ],
)
def test_called_wrongly(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(*arguments) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """It is what people wait for first."""
    program = (
        "import sys\nfrom lmcache_ctl.cli import main\ntry:\n    main(['lookup', 'status',"
        " '--help'])\nexcept SystemExit:\n    pass\nprint('HEAVY', sorted({'numpy', 'numba',"
        " 'torch', 'transformers', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lmcachectl d", {"dashboard", "doctor", "drain"}),
        ("lmcachectl lookup ", {"status", "tenants", "prefix", "locations", "route"}),
        ("lmcachectl status --out", {"--output"}),
    ],
)
def test_a_shell_completes_commands_and_options(
    words: str,
    expected: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_LMCACHECTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    run()
    assert set(capsys.readouterr().out.split()) == expected


CONTEXT = (
    "current-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nclusters: [{name:"
    " c, cluster: {server: 'http://127.0.0.1:9'}}]\n"
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [", "no usable kubeconfig (it is damaged)"),
        (b"hello", "no usable kubeconfig (it is damaged)"),
        (b"contexts: !!bool x", "no usable kubeconfig (it is damaged)"),
        (bytes(range(128, 256)), "no usable kubeconfig (it is damaged)"),
        (b"", "file is empty"),
        (b"kind: Config\ncontexts: 7\n", "no usable kubeconfig"),
        (
            CONTEXT.replace("clusters: [{name: c", "clusters: [{name: d").encode(),
            "Expected object with name c",
        ),
        (
            (
                CONTEXT
                + "users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1,"
                " command: /nowhere/login}}}]"
            ).encode(),
            "no usable kubeconfig (no credentials: ",
        ),
    ],
)
def test_a_damaged_kubeconfig_is_reported(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubeconfig").write_bytes(content)
    assert run("status", "--kubeconfig", str(tmp_path / "kubeconfig")) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert f" in kubeconfig={tmp_path}/kubeconfig: " in output.err
    assert output.err.count("\n") == 1


def printed_to(output: IO[str]) -> tuple[int, str]:
    """The exit code and the complaint of a command that cannot print there."""
    command = [sys.executable, "-m", "lmcache_ctl", "status", "-o", "json"]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def test_a_full_disk_is_an_error_in_one_line() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        said = "lmcachectl: cannot print: No space left on device\n"
        assert printed_to(full) == (1, said)


def test_a_reader_that_has_gone_costs_no_message() -> None:
    near, far = os.pipe()
    os.close(near)
    with os.fdopen(far, "w") as pipe:
        assert printed_to(pipe) == (1, "")


def test_ctrl_c_ends_it_without_a_word_while_it_still_imports() -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "lmcache_ctl", "status"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "typer" not in (line := process.stderr.readline()):
        assert line, "it imports that"
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
