"""A model is blended only with a certificate that it passed."""

from __future__ import annotations

import json

import msgspec
import pytest
from lmcache_core.blend.certificate import BlendCertificate, BlendProfile, CertificateFolder, Quality, QualityBounds
from lmcache_core.errors import ConfigError

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
    assert "lmcachectl certify blend" in reason(folder)


def test_who_passed_may_blend_and_nobody_else(folder):
    path = folder.save(certificate())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert reason(folder) is None
    assert "no certificate" in reason(folder, identity="weights-2")
    assert "no certificate" in reason(folder, model="another")
    for other in (BlendProfile("deviation", 0.1, (5, 6)), BlendProfile("none", 0.15, (5, 6)), BlendProfile("deviation", 0.15, (5,))):
        assert "no certificate" in reason(folder, profile=other)


@pytest.mark.parametrize(
    ("figure", "value", "words"),
    [
        ("kl_nats", 0.0501, "divergence"),
        ("kl_nats", float("nan"), "divergence"),
        ("top1_agreement", 0.949, "94.9%"),
        ("delta_loss_nats", 0.017, "0.0210"),
        ("delta_loss_error", 0.01, "0.0210"),
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
def test_damaged_ones_are_refused(folder, data):
    path = folder.save(certificate())
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=path.name):
        reason(folder)


def test_unknown_fields_are_refused(folder):
    path = folder.save(certificate())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trusted": True}))
    with pytest.raises(ConfigError, match="trusted"):
        reason(folder)
