"""What passes the gate, and what does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lmcache_core.errors import ConfigError
from lmcache_ctl.certify import codec as gate
from lmcache_ctl.certify.codec import CodecBounds, certify_codecs, reasons_against
from lmcache_ctl.cli import main
from lmcache_ctl.codec.kv import Kv, KvTensor
from lmcache_ctl.codec.measure import measure_profile
from lmcache_ctl.errors import CtlError

LOOSE = CodecBounds(max_error=1.0, min_ratio=1.0)


def gaussian() -> Kv:
    values = np.random.default_rng(3).standard_normal((2, 2, 256, 64), np.float32)
    return Kv("a test", (KvTensor("", "float32", values.view("<u4")),))


def test_a_bound_decides() -> None:
    found = certify_codecs(gaussian(), ["lossless", "cachegen"], LOOSE)
    assert found.has_passed
    error = found.verdicts[1].measurement
    assert error is not None
    assert error.rms_relative is not None
    strict = certify_codecs(
        gaussian(), ["lossless", "cachegen"], CodecBounds(error.rms_relative * 0.99, 1.0)
    )
    assert [verdict.has_passed for verdict in strict.verdicts] == [True, False]
    assert "is above" in strict.verdicts[1].reasons[0]
    small = certify_codecs(gaussian(), ["lossless"], CodecBounds(1.0, 50.0))
    assert "50.00 is wanted" in small.verdicts[0].reasons[0]


def test_an_error_that_cannot_be_measured_does_not_pass() -> None:
    values = np.random.default_rng(3).integers(0, 64, (1, 1, 256, 64), np.uint8)
    found = measure_profile(Kv("a test", (KvTensor("", "uint8", values),)), "lossless", 1)
    assert reasons_against(found, LOOSE) == []
    import msgspec

    [reason] = reasons_against(msgspec.structs.replace(found, rms_relative=None), LOOSE)
    assert "cannot be measured" in reason


def test_a_codec_that_lost_something_fails_and_a_missing_package_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(kv: Kv, profile: str) -> None:
        raise CtlError("what it decoded differs")

    monkeypatch.setattr(gate, "measure_profile", lose)
    [verdict] = certify_codecs(gaussian(), ["lossless"], LOOSE).verdicts
    assert (verdict.has_passed, verdict.reasons, verdict.measurement) == (
        False,
        ["what it decoded differs"],
        None,
    )

    def lack(kv: Kv, profile: str) -> None:
        raise ConfigError("install numba")

    monkeypatch.setattr(gate, "measure_profile", lack)
    with pytest.raises(ConfigError):
        certify_codecs(gaussian(), ["lossless"], LOOSE)


@pytest.mark.parametrize(("max_error", "code"), [("1", 0), ("0.0001", 1)])
def test_the_exit_code_is_the_verdict(
    max_error: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import save_file

    save_file(
        {"kv": np.random.default_rng(3).standard_normal((2, 2, 256, 64), np.float32)},
        tmp_path / "kv.safetensors",
    )
    arguments = [
        "certify",
        "codec",
        "--kv",
        str(tmp_path / "kv.safetensors"),
        "--profile",
        "cachegen:high",
        "--max-error",
        max_error,
    ]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "-o", "json"])
    assert (ended.value.code or 0) == code
    assert json.loads(capsys.readouterr().out)["verdicts"][0]["has_passed"] == (code == 0)
    with pytest.raises(SystemExit):
        main(arguments)
    assert ("passed" if code == 0 else "FAILED") in capsys.readouterr().out
