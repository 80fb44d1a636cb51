"""Scripts with an argument put into them do what they did before, with that argument: a real shell runs them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_webhook.injection.shell import MAX_SERVERS, add_to_servers

from tests.fixtures.pods import SCRIPT_OF_A_RAY_LEADER, SCRIPT_OF_KSERVE

WORDS = ["--kv-transfer-config.kv_role=kv_both", "--kv-transfer-config.kv_connector_extra_config.sidecar_socket=/run/lmcache/s.sock"]
SHELLS = [shell for shell in ("sh", "bash", "dash") if shutil.which(shell)]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A `vllm` and a `python3` that write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("vllm", "python3"):
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\nimport json, os, sys\nopen(os.environ['CALLS'], 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def calls_of(script: str, programs: Path, shell: str = "sh", **variables: str) -> list[list[str]]:
    """How the script called its programs."""
    calls = programs.parent / "calls"
    calls.write_text("")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), **variables}
    subprocess.run([shell, "-c", script], env=env, check=True, timeout=30, capture_output=True)
    return [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "script",
    [
        "vllm serve m --port 8000",
        "vllm serve m",
        "exec vllm serve m --port 8000 2>&1",
        "vllm serve \\\n  m \\\n  --port 8000",
        "cd /tmp && vllm serve 'a b' --port 8000; true",
        'vllm serve "$MODEL"/x --port "8000"',
        'vllm serve "${MODEL:-no model}" --port 8000',
        "vllm serve $(echo m) --port 8000",
        "vllm serve a\\ b --port 8000",
        'eval "vllm serve $MODEL --port 8000"',
        'eval "vllm serve $MODEL" && echo "done"',
        'eval "vllm serve \\"a b\\" --port 8000"',
        "sh -c 'vllm serve m --port 8000'; echo 'x'",
        "sh -c 'vllm serve m'",
        'COMMAND="vllm serve m --port 8000"; $COMMAND',
        'COMMAND="vllm serve m"; eval $COMMAND',
        "(vllm serve m) | cat",
        "vllm serve m &\nwait",
        "# vllm serve nothing\nvllm serve m # vllm serve nothing",
        "echo don\\'t; vllm serve m",
        "vllm serve --model m --port 8000",
        "vllm serve",
        "python3 -m vllm.entrypoints.openai.api_server --model m",
        "python3 -u -m vllm.entrypoints.cli.main serve m --port 8000",
        "vllm serve `echo m` --port 8000",
        'vllm serve "${NOTHING:-"a b"}" --port 8000',
        'vllm serve "$(echo "a b")" --port 8000',
        'vllm serve "${A:-${B:-"a b"}}" --port 8000',
        '[ "$MODEL" = "vllm serve" ] || vllm serve m --port 8000',
        "echo 'starting vllm serve'; vllm serve m",
    ],
)
def test_the_call_gets_the_words_and_is_otherwise_the_same(script: str, shell: str, programs: Path) -> None:
    changed = add_to_servers(script, WORDS)
    assert changed is not None
    before = calls_of(script, programs, shell, MODEL="mm")
    after = calls_of(changed, programs, shell, MODEL="mm")
    assert len(before) == len(after) == 1
    assert [word for word in after[0] if word not in WORDS] == before[0]
    assert [word for word in after[0] if word in WORDS] == WORDS
    positional = [word for word in before[0] if not word.startswith("-")]
    model = "serve" if "serve" not in before[0] or len(positional) < 2 else before[0][before[0].index("serve") + 1]
    if "serve" in before[0] and not model.startswith("-") and model != "serve":
        assert after[0].index(model) < after[0].index(WORDS[0]), "argparse finds the model only before options"


def test_both_branches_of_a_script_get_them(programs: Path) -> None:
    changed = add_to_servers(SCRIPT_OF_KSERVE, WORDS)
    assert changed is not None
    assert changed.count(WORDS[0]) == 2
    for index in "01":
        ready = changed.replace("$(LWS_LEADER_ADDRESS)", "leader")  # Kubernetes does that
        [call] = calls_of(ready, programs, LWS_WORKER_INDEX=index)
        assert call[:4] == ["serve", "meta-llama/Llama-3.1-8B", *WORDS]


def test_what_comes_before_the_server_stays(programs: Path) -> None:
    changed = add_to_servers(SCRIPT_OF_A_RAY_LEADER, WORDS)
    assert changed is not None
    assert changed.startswith(SCRIPT_OF_A_RAY_LEADER.partition("--port")[0].rstrip())
    assert f"api_server {' '.join(WORDS)} --port 8080" in changed


@pytest.mark.parametrize(
    "script",
    [
        "",
        "bash start.sh",
        "pip install vllm; my-vllm serve m",
        "vllm bench serve",
        "# vllm serve m",
        "vllm server",
        "vllm; serve",
        "vllm serve-x",
        'COMMAND="vllm serve"; $COMMAND m',
        "sh -c 'vllm serve '\\''a b'\\'' --port 8000'",
        'vllm serve "m --port 8000',
        "vllm serve m`",
    ],
)
def test_scripts_that_do_not_start_the_server_are_left_alone(script: str) -> None:
    assert add_to_servers(script, WORDS) is None


def test_too_many_places_are_none() -> None:
    assert add_to_servers("vllm serve m\n" * MAX_SERVERS, WORDS) is not None
    assert add_to_servers("vllm serve m\n" * (MAX_SERVERS + 1), WORDS) is None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["vllm", " ", "serve", "m", '"', "'", "\\", "\n", "#", "$(", ")", "${", "}", "-m", "--x", ";", "`", "é"]),
        max_size=30,
    )
)
def test_any_text_keeps_every_character(pieces: list[str]) -> None:
    script = "".join(pieces)
    changed = add_to_servers(script, WORDS)
    if changed is not None:
        assert changed.replace(" " + " ".join(WORDS), "") == script


def test_long_scripts_take_little_time() -> None:
    """As long as a pod may be, and as unkind as they get."""
    for piece in ("vllm serve \\\n", '"', "$(", "'vllm serve ", "\\", "${{", 'vllm serve "$(', "vllm " + " " * 1000, "-m \\\n", "#\n"):
        script = piece * (300_000 // len(piece))
        started = time.process_time()
        add_to_servers(script, WORDS)
        add_to_servers(f"vllm serve {script[:100_000]}", WORDS)
        assert time.process_time() - started < 5, piece


def test_calls_in_comments_are_not_counted() -> None:
    assert add_to_servers("# vllm serve m\n" * (MAX_SERVERS + 1) + "vllm serve m", WORDS) is not None
