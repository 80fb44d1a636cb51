"""A model is blended only with a certificate that it passed for exactly its weights and options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from lmcache_core.blend.certificate import (
    BlendCertificate,
    BlendProfile,
    CertificateFolder,
    Quality,
    QualityBounds,
)

PROFILE = BlendProfile("deviation", 0.15, (5, 6))
GOOD = Quality(20, 400, 0.01, 0.99, 0.001, 0.002, 0.9)


def certificate(quality=GOOD, **changed):
    made = BlendCertificate(1, "a/model", "weights-1", PROFILE, QualityBounds(), quality, "0.1.0")
    return msgspec.structs.replace(made, **changed)


def reason(folder, model="a/model", identity="weights-1", profile=PROFILE):
    return folder.reason_against(model, identity, profile)


@pytest.fixture
def folder(tmp_path):
    return CertificateFolder(tmp_path / "certificates")


def test_without_a_certificate_blending_is_refused_with_the_command(folder):
    assert "no certificate" in reason(folder)
    assert "python -m lmcache_core.blend.certify" in reason(folder)


def test_a_certificate_is_for_one_model_its_weights_and_one_profile(folder):
    path = folder.save(certificate(profile=BlendProfile("deviation", 1.0, (5, 6))))
    assert reason(folder, profile=BlendProfile("deviation", 1, (5, 6))) is None
    path.unlink()
    path = folder.save(certificate())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert reason(folder) is None
    assert "no certificate" in reason(folder, identity="weights-2")
    assert "no certificate" in reason(folder, model="another")
    for other in (
        BlendProfile("deviation", 0.1, (5, 6)),
        BlendProfile("first_of_chunk", 0.15, (5, 6)),
        BlendProfile("deviation", 0.15, (5,)),
    ):
        assert "no certificate" in reason(folder, profile=other)


@pytest.mark.parametrize(
    ("figure", "value", "words"),
    [
        ("kl_nats", 0.0501, "divergence"),
        ("top1_agreement", 0.949, "94.9%"),
        ("delta_loss_nats", 0.017, "0.0210"),
        ("delta_loss_error", 0.01, "0.0210"),
        ("reused_share", 0.0, "no KV was reused"),
    ],
)
def test_a_figure_out_of_bounds_fails(folder, figure, value, words):
    folder.save(certificate(msgspec.structs.replace(GOOD, **{figure: value})))
    assert "failed" in reason(folder)
    assert words in reason(folder)
    assert certificate(msgspec.structs.replace(GOOD, **{figure: float("nan")})).reasons


def test_a_certificate_under_the_name_of_another_is_refused(folder):
    path = folder.save(certificate())
    path.write_bytes(msgspec.json.encode(certificate(identity="weights-2")))
    assert "another model" in reason(folder)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b" " * 100_000])
def test_a_damaged_certificate_counts_as_none_and_is_named(folder, data):
    path = folder.save(certificate())
    path.write_bytes(data)
    assert path.name in reason(folder)
    folder.save(certificate())
    assert reason(folder) is None


@pytest.mark.parametrize(
    ("change", "words"), [({"trusted": True}, "trusted"), ({"format_version": 2}, "make it again")]
)
def test_another_format_is_refused(folder, change, words):
    path = folder.save(certificate())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert words in reason(folder)


def test_a_certificate_that_cannot_be_opened_counts_as_none(folder, tmp_path):
    path = folder.save(certificate())
    path.unlink()
    path.mkdir()
    assert "cannot be read" in reason(folder)
    (tmp_path / "file").write_text("")
    assert "cannot be read" in reason(CertificateFolder(tmp_path / "file"))


def test_the_reason_names_what_does_not_fit(folder):
    folder.save(certificate())
    assert "other weights, another dtype or other options" in reason(folder, identity="weights-2")
    assert "only for deviation, 15 % recomputed, separator 5 6;" in reason(
        folder, profile=BlendProfile("deviation", 0.15, (5,))
    )
    assert "only" not in reason(folder, model="another")
    folder.path_of("a/model", "weights-3", PROFILE).write_bytes(b"{")
    assert "other weights" in reason(folder, identity="weights-2"), "a damaged one is ignored"


SAVE_FOR_EVER = """
import sys
from pathlib import Path
import msgspec
from lmcache_core.blend.certificate import BlendCertificate, CertificateFolder
made = msgspec.json.decode(sys.argv[2], type=BlendCertificate)
while True:
    CertificateFolder(Path(sys.argv[1])).save(made)
    print(flush=True)
"""


def test_killed_writers_leave_a_certificate_whole(folder):
    path = folder.save(certificate())
    arguments = [
        sys.executable,
        "-c",
        SAVE_FOR_EVER,
        str(path.parent),
        msgspec.json.encode(certificate()).decode(),
    ]
    writers = [subprocess.Popen(arguments, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout.read(20) == b"\n" * 20, "many times, while the other saves too"
            assert reason(folder) is None
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert reason(folder) is None


def test_an_old_file_of_a_killed_writer_is_removed(folder):
    path = folder.save(certificate())
    old, new = path.with_suffix(".1.part"), path.with_suffix(".2.part")
    for part in (old, new):
        part.write_bytes(b"{")
    os.utime(old, (0, 0))
    folder.save(certificate())
    assert sorted(path.parent.iterdir()) == sorted([path, new])


def test_containers_with_the_same_process_id_write_to_different_files(folder, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    parts = set()
    replace = Path.replace

    def noted(part, target):
        parts.add(part.name)
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", noted)
    folder.save(certificate())
    folder.save(certificate())
    assert len(parts) == 2
