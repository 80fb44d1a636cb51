"""The command that makes a certificate of blending, from a model and a text to the file that an
engine reads.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from lmcache_core.blend.certificate import BlendProfile, CertificateFolder, Quality
from lmcache_core.blend.certify import cut_prompts, main, parser
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.transformers import blend_quality, metadata_of
from lmcache_demo import model as demo_model
from lmcache_demo.model import load_model

MODEL = Path(demo_model.__file__).with_name("assets")
SEPARATOR = "\n---\n"
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
SMALL = ("--prompts", "3", "--documents", "2", "--document-tokens", "64", "--ending-tokens", "16")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code: object
    try:
        code = main(["--model", str(MODEL), "--separator", SEPARATOR, *SMALL, *arguments])
    except SystemExit as exc:  # argparse's
        code = exc.code
    captured = capsys.readouterr()
    assert isinstance(code, int)
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("dtype", "revision"),
    [("float32", None), ("bfloat16", "v1")],
    ids=["weights as fingerprint", "a revision that engines name"],
)
def test_an_engine_accepts_a_certificate_that_passed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    dtype: Literal["float32", "bfloat16"],
    revision: str | None,
) -> None:
    loose = ("--max-kl", "9", "--min-agreement", "0", "--max-loss", "9", "--dtype", dtype)
    named = () if revision is None else ("--revision", revision)
    code, out, _ = run(capsys, "--certificates", str(tmp_path), "--name", "demo", *loose, *named)
    assert code == 0
    assert "passed" in out
    [file] = tmp_path.iterdir()
    found = json.loads(file.read_bytes())
    assert found["quality"]["num_prompts"] == 3
    assert found["quality"]["num_tokens"] == 3 * 15
    assert 0 < found["quality"]["kl_nats"] < 1
    model, tokenizer = load_model(dtype)
    identity = metadata_of(model, "demo", LMCacheEngineConfig.from_defaults(), revision).revision
    profile = BlendProfile(
        "deviation", 0.15, tuple(tokenizer.encode(SEPARATOR, add_special_tokens=False))
    )
    assert CertificateFolder(tmp_path).reason_against("demo", identity, profile) is None


@pytest.mark.parametrize(
    ("within", "given", "name"),
    [
        ("", "other/../llama/", "llama"),
        ("llama", ".", "assets"),
        ("other", "..", "real"),
    ],
)
def test_a_model_is_named_after_its_place_as_given(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    within: str,
    given: str,
    name: str,
) -> None:
    """A link keeps its name while what it points to changes. Where there is no name, it is that
    of the place.
    """
    measured = Quality(3, 0.5, 45, 0.01, 0.99, 0.0, 0.0)
    monkeypatch.setattr(blend_quality, "measure", lambda *_: measured)
    place = tmp_path / "real"
    (place / "other").mkdir(parents=True)
    for file in MODEL.iterdir():
        (place / file.name).symlink_to(file)
    (place / "llama").symlink_to(MODEL)
    monkeypatch.chdir(place / within)
    _, out, _ = run(capsys, "--certificates", str(tmp_path / "folder"), "--model", given)
    assert out.startswith(f"{name}: ")


def test_a_failed_certificate_is_kept_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "--certificates", str(tmp_path), "--max-kl", "0", "--ratio", "0")
    assert code == 1
    assert "FAILED: divergence" in out
    assert len(list(tmp_path.iterdir())) == 1


def test_full_recompute_passes_tight_bounds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tight = ("--ratio", "1", "--max-kl", "0.001", "--min-agreement", "1", "--max-loss", "0.001")
    code, out, _ = run(capsys, "--certificates", str(tmp_path), *tight)
    assert code == 0, out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--separator", ""), "has no tokens"),
        (("--policy", "best"), "first_of_chunk"),
        (("--document-tokens", "2"), "no room"),
        (("--document-tokens", "4000"), "takes 4096"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
        (("--text", os.devnull), "need at least"),
        (("--model", "some/name"), "it is not a directory"),
        (("--model", "tests/unit"), "cannot load a model"),
    ],
)
def test_unusable_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, str], words: str
) -> None:
    code, _, err = run(capsys, "--certificates", str(tmp_path / "folder"), *arguments)
    assert code in (1, 2)
    assert words in " ".join(err.split())
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        pytest.fail("it measures")

    monkeypatch.setattr(blend_quality, "measure", measure)
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "--certificates", str(tmp_path / "file" / "folder"))
    assert code == 2
    assert "cannot keep the certificate" in err


def test_an_interrupted_command_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Ctrl-C, once the bar on a terminal shows that it measures."""
    command = [
        sys.executable,
        "-m",
        "lmcache_core.blend.certify",
        "--model",
        str(MODEL),
        "--separator",
        SEPARATOR,
        *SMALL,
    ]
    folder = tmp_path / "folder"
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        [*command, "--certificates", str(folder), "--prompts", "5000"], stderr=terminal
    )
    os.close(terminal)
    shown = b""
    try:
        # Not "1/5000": the bar is drawn some times a second, and may pass over a prompt.
        while not re.search(rb" [1-9]\d*/5000", _COLOUR.sub(b"", shown)):
            ready, _, _ = select.select([ours], [], [], 60)
            assert ready, "nothing was shown"
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
    assert b"Traceback" not in shown
    assert not folder.exists()


def test_prompts_are_slices_from_all_over_the_text() -> None:
    tokens, separator = torch.arange(100), torch.tensor([-1, -2])
    lengths = ["--documents", "2", "--document-tokens", "6", "--ending-tokens", "3"]
    cut = parser().parse_args(["--model", "m", "--separator", "s", "--prompts", "4", *lengths])
    first, *_, last = cut_prompts(cut, tokens, separator)
    assert [document.tolist() for document in first.documents] == [
        [0, 1, 2, 3, -1, -2],
        [4, 5, 6, 7, -1, -2],
    ]
    assert first.ending.tolist() == [8, 9, 10]
    assert last.ending.tolist()[-1] in (97, 98, 99)
    with pytest.raises(ConfigError, match="need at least 14"):
        cut_prompts(cut, tokens[:13], separator)
