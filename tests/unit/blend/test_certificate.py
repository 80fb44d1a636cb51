"""A model is blended only with a certificate that it passed."""

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


def test_nobody_passes_without_one(folder):
    assert "no certificate" in reason(folder)
    assert "python -m lmcache_core.blend.certify" in reason(folder)


def test_who_passed_may_blend_and_nobody_else(folder):
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
        ("kl_nats", float("nan"), "divergence"),
        ("top1_agreement", 0.949, "94.9%"),
        ("delta_loss_nats", 0.017, "0.0210"),
        ("delta_loss_error", 0.01, "0.0210"),
        ("reused_share", 0.0, "no KV was reused"),
        ("reused_share", float("nan"), "no KV was reused"),
    ],
)
def test_who_failed_may_not(folder, figure, value, words):
    failed = certificate(msgspec.structs.replace(GOOD, **{figure: value}))
    assert failed.reasons
    if value == value:  # JSON has no other
        folder.save(failed)
        assert "failed" in reason(folder)
        assert words in reason(folder)


def test_the_newest_counts(folder):
    folder.save(certificate(msgspec.structs.replace(GOOD, kl_nats=1.0)))
    folder.save(certificate())
    assert reason(folder) is None


def test_a_certificate_under_anothers_name_counts_for_nobody(folder):
    path = folder.save(certificate())
    path.write_bytes(msgspec.json.encode(certificate(identity="weights-2")))
    assert "another model" in reason(folder)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", b" " * 100_000])
def test_damaged_ones_count_as_none_and_it_is_said(folder, data):
    path = folder.save(certificate())
    path.write_bytes(data)
    assert path.name in reason(folder)
    assert "remove it" in reason(folder) or "no certificate" in reason(folder)
    folder.save(certificate())
    assert reason(folder) is None


def test_unknown_fields_are_refused(folder):
    path = folder.save(certificate())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trusted": True}))
    assert "trusted" in reason(folder)


def test_another_format_is_refused(folder):
    path = folder.save(certificate())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    assert "make it again" in reason(folder)


def test_one_that_cannot_be_opened_counts_as_none(folder, tmp_path):
    path = folder.save(certificate())
    path.unlink()
    path.mkdir()
    assert "cannot be read" in reason(folder)
    (tmp_path / "file").write_text("")
    assert "cannot be read" in reason(CertificateFolder(tmp_path / "file"))


def test_it_is_said_what_does_not_fit(folder):
    folder.save(certificate())
    assert "other weights, another dtype or other options" in reason(folder, identity="weights-2")
    assert "only for deviation, 15 % recomputed, separator 5 6;" in reason(
        folder, profile=BlendProfile("deviation", 0.15, (5,))
    )
    assert "only" not in reason(folder, model="another")
    assert "only" not in reason(
        folder, identity="weights-2", profile=BlendProfile("first_of_chunk", 0.0, (5,))
    )
    folder.path_of("a/model", "weights-3", PROFILE).write_bytes(b"{")
    assert "other weights" in reason(folder, identity="weights-2"), "a damaged one says nothing"


def test_a_whole_number_is_the_same_ratio(folder):
    folder.save(certificate(profile=BlendProfile("deviation", 1.0, (5, 6))))
    assert reason(folder, profile=BlendProfile("deviation", 1, (5, 6))) is None


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


def test_writers_that_are_killed_leave_it_whole(folder):
    path = folder.save(certificate())
    arguments = [
        sys.executable,
        "-c",
        SAVE_FOR_EVER,
        str(path.parent),
        msgspec.json.encode(certificate()).decode(),
    ]
    for _ in range(3):
        writers = [subprocess.Popen(arguments, stdout=subprocess.PIPE) for _ in range(2)]
        try:
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.read(20) == b"\n" * 20, "many times, while the other saves too"
                assert reason(folder) is None
        finally:
            for writer in writers:
                writer.kill()
                writer.wait(10)
                assert writer.stdout is not None
                writer.stdout.close()
        assert reason(folder) is None


def test_what_a_killed_writer_left_is_removed_once_it_is_old(folder):
    path = folder.save(certificate())
    old, new = path.with_suffix(".1.part"), path.with_suffix(".2.part")
    for part in (old, new):
        part.write_bytes(b"{")
    os.utime(old, (0, 0))
    folder.save(certificate())
    assert sorted(path.parent.iterdir()) == sorted([path, new])


def test_two_containers_have_one_process_id(folder, monkeypatch):
    """Each writes to a file of its own, though both are process 1."""
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
