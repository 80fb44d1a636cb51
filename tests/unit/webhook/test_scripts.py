"""A shell's script that is `vllm serve …` and nothing else gets the argument; every other script
stays as it is.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.injection.sidecar import offloading_config, transfer_config

from tests.fixtures.pods import Pod, container, pod

SHELLS = ("sh", "bash")
ARGUMENT = ["--kv-transfer-config", json.dumps(transfer_config(), separators=(",", ":"))]
SPACE = " \t\n\\"
FOLDED = """
exec vllm serve \\
  "meta-llama/Llama-3.1-8B" \\
  --compilation-config '{"level": 3}' \\
  --chat-template "it is \\"so\\""
"""


def reviewed(options: InjectionOptions, **members: Any) -> Pod | None:
    """The container of a pod after its injection; None if the pod was declined."""
    document = pod(container(**members))
    outcome = review_pod(options, document, "team-a")
    if outcome.verdict == "declined":
        return None
    assert outcome.verdict == "injected", outcome.reason
    engine: Pod = jsonpatch.apply_patch(document, outcome.operations)["spec"]["containers"][0]
    return engine


@pytest.mark.parametrize(
    "script",
    [
        "vllm serve m",
        " /opt/venv/bin/vllm  serve\tm --port 8000\n",
        "exec vllm serve m",
        "vllm serve m --trust-remote-code --max_num_batched_tokens 1024\n\n",
        "vllm serve 'a;b' --served-model-name \"x && y > z\" '#' '`'",
        "python3 -m vllm.entrypoints.openai.api_server --model=m",
        "vllm serve m \\\n",
        FOLDED,
    ],
)
def test_a_script_of_that_one_command_gets_the_argument(
    script: str, options: InjectionOptions
) -> None:
    for line in (
        {"command": ["sh", "-c", script]},
        {"command": ["/bin/bash", "-ec", script], "args": []},
        {"command": ["/bin/sh", "-c"], "args": [script]},
        {"command": ["bash", "-e", "-x"], "args": ["-uc", script]},
        {"args": ["/usr/bin/dash", "-c", script]},
    ):
        engine = reviewed(options, **line)
        assert engine is not None
        before = [*line.get("command", []), *line.get("args", [])]
        *shell, edited = [*engine.get("command", []), *engine.get("args", [])]
        assert shell == before[:-1]
        assert edited == f"{script.rstrip(SPACE)} {shlex.join(ARGUMENT)}"
        assert [len(engine.get(name) or []) for name in ("command", "args")] == [
            len(line.get(name) or []) for name in ("command", "args")
        ]


@pytest.mark.parametrize(
    "script",
    [
        "vllm serve m; true",
        "vllm serve m &",
        "vllm serve m && echo",
        "vllm serve m | tee log",
        "vllm serve m > log",
        "vllm serve m 2>&1",
        "vllm serve m < /dev/null",
        "vllm serve m <<EOF\nx\nEOF",
        "vllm serve m # a comment",
        "vllm serve m #",
        "vllm serve m\necho",
        "vllm serve m\n--port 8000",
        "vllm serve $(cat model)",
        "vllm serve `cat model`",
        'vllm serve "`cat model`"',
        "vllm serve $MODEL",
        'vllm serve "${MODEL}"',
        "vllm serve '$(MODEL)'",
        "vllm serve m \\",
        "vllm serve m \\\n \\ ",
        "vllm serve m\\;",
        "vllm serve 'm",
        'vllm serve "m',
        'vllm serve "m\\"',
        "vllm serve *",
        "vllm serve {a,b}",
        "vllm serve ~/m",
        "(vllm serve m)",
        "{ vllm serve m; }",
        "! vllm serve m",
        "if vllm serve m; then true; fi",
        "cd /tmp && vllm serve m",
        "source venv; vllm serve m",
        "export A=1\nvllm serve m",
        "PYTHONPATH=/mine vllm serve m",
        "env -i vllm serve m",
        "sudo vllm serve m",
        "exec -c vllm serve m",
        "exec exec vllm serve m",
        "echo vllm serve m",
        "x=/opt/vllm serve m",
        "exec x=1/vllm serve m",
        "vllm serve m\r\n",
        "vllm serve m\x0becho",
        "vllm serve m\u00a0n",
        "bash -c 'vllm serve m'",
        "vllm bench serve; vllm serve m",
        "'vllm serve' m",
    ],
)
def test_any_other_script_stays_as_it_is(script: str, options: InjectionOptions) -> None:
    assert reviewed(options, command=["sh", "-c", script]) is None


@pytest.mark.parametrize(
    "line",
    [
        ["sh", "-lc"],  # its profile may set PYTHONPATH
        ["sh", "-ic"],
        ["sh", "-s"],
        ["bash", "--norc", "-c"],
        ["ssh", "host", "sh", "-c"],
        ["fish", "-c"],
        ["sh", "-c", "-c"],
        ["sh", "-c", "true"],
    ],
)
def test_any_other_shell_keeps_its_script(line: list[str], options: InjectionOptions) -> None:
    assert reviewed(options, command=[*line, "vllm serve m"]) is None


def test_words_after_a_script_are_not_arguments_of_vllm(options: InjectionOptions) -> None:
    assert reviewed(options, command=["sh", "-c", "vllm serve m"], args=["--port", "1"]) is None


@pytest.mark.parametrize(
    "script",
    [
        "vllm serve m --kv-transfer-config '{}'",
        "python3 -m dynamo.vllm --connector nixl",
        "python3 -m dynamo.vllm --is-prefill-worker",
        "python3 -m huggingfaceserver --backend=huggingface",
    ],
)
def test_what_is_refused_in_words_is_refused_in_a_script(
    script: str, options: InjectionOptions
) -> None:
    document = pod(container(command=["sh", "-c", script]))
    words = pod(container(command=shlex.split(script)))
    reason = review_pod(options, document, "team-a").reason
    assert reason == review_pod(options, words, "team-a").reason
    assert reason.startswith("not injected: the container vllm ")


def test_kubernetes_expands_nothing_in_the_argument() -> None:
    """`$(NAME)` would become the value of a variable, quotes and all."""
    for config in (transfer_config(), offloading_config(8)):
        assert "$" not in json.dumps(config)


WORDS = r"""\ ' " # ; & && | > < ( ) ` $ $( ${ ! * ? [ ] { } ~ = m --port 8000 -c EOF 'a;b' "\"e\""
    '' vllm serve exec echo true VLLM=1 é"""
SPACED = (" ", "\t", "\n", "\\\n", "\r", "\x0b", "\u00a0", "\x7f")
PIECES = st.sampled_from([*WORDS.split(), *SPACED, "a b", "<<EOF\n", '"c d"', "vllm serve"])
SCRIPTS = st.tuples(
    st.sampled_from(["vllm serve m ", "exec vllm serve ", "vllm serve", "", " "]),
    st.lists(PIECES, max_size=12),
).map(lambda parts: parts[0] + "".join(parts[1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vllm that prints its arguments."""
    made = tmp_path_factory.mktemp("scripts")
    program = made / "vllm"
    program.write_text('#!/bin/sh\nprintf "called"\nprintf "\\\\0%s" "$@"\n')
    program.chmod(0o755)
    return made


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(SCRIPTS)
@example(FOLDED)
def test_an_edited_script_runs_as_before_with_one_more_argument(
    options: InjectionOptions, folder: Path, script: str
) -> None:
    """Real shells say which scripts are one command; nothing but accepted ones is run."""
    engine = reviewed(options, command=["sh", "-c", script])
    assume(engine is not None and "args" not in engine)
    assert engine is not None
    (edited,) = engine["command"][2:]
    for shell in SHELLS:
        before, after = (
            subprocess.run(
                [shell, "-c", text],
                cwd=folder,
                env={"PATH": f"{folder}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
                capture_output=True,
                timeout=60,
                check=False,
            )
            for text in (script, edited)
        )
        assert before.stdout.startswith(b"called\0serve"), before
        assert after.stdout == b"\0".join([before.stdout, *map(str.encode, ARGUMENT)])
        assert (before.stderr, before.returncode) == (after.stderr, after.returncode) == (b"", 0)
