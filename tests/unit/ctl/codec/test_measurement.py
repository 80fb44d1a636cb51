"""Figures against what they are figures of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lmcache_core.record import TensorSpec
from lmcache_core.serde.codec import EncodedPayload, EncodingReport
from lmcache_ctl.cli import main
from lmcache_ctl.codec import measure as measurement
from lmcache_ctl.codec.kv import Kv, KvTensor
from lmcache_ctl.codec.measure import measure_profile
from lmcache_ctl.errors import CtlError

NUM_TOKENS = 300


def kv_of(values: np.ndarray, dtype: str = "float32") -> Kv:
    return Kv("a test", (KvTensor("", dtype, values.view(f"<u{values.itemsize}")),))


def gaussian() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((2, 2, NUM_TOKENS, 64), np.float32)


@pytest.mark.parametrize("profile", ["cachegen", "cachegen:high", "cachegen:low"])
def test_a_lossy_profile(profile: str) -> None:
    result = measure_profile(kv_of(gaussian()), profile, 1)
    assert (result.profile, result.num_chunks, result.num_kept_raw) == (profile, 2, 0)
    assert result.raw_bytes == 2 * 2 * NUM_TOKENS * 64 * 4
    assert (
        result.ratio
        == result.raw_bytes / result.encoded_bytes
        == pytest.approx(32 / result.bits_per_element)
    )
    assert not result.is_equal
    assert result.rms_relative is not None
    said = [
        group.rms_relative for group in result.errors
    ]  # in parts of each token's scale, which here are nearly alike
    assert 0.9 * min(said) <= result.rms_relative <= 1.1 * max(said)
    assert result.encode_bytes_per_s > 0
    assert result.decode_bytes_per_s is not None


def test_lossless_is_equal() -> None:
    result = measure_profile(kv_of(gaussian()), "lossless", 1)
    assert result.is_equal
    assert (result.errors, result.rms_relative) == ([], 0.0)
    assert result.ratio > 1


def test_what_does_not_become_smaller_stays_raw() -> None:
    noise = np.random.default_rng(3).integers(0, 256, (1, 1, NUM_TOKENS, 64), np.uint8)
    result = measure_profile(kv_of(noise, "uint8"), "lossless", 1)
    assert (result.num_chunks, result.num_kept_raw, result.ratio, result.bits_per_element) == (
        2,
        2,
        1.0,
        8.0,
    )
    assert result.decode_bytes_per_s is None
    assert result.is_equal


def test_values_that_are_not_finite_spoil_no_figure() -> None:
    values = gaussian()
    values[0, 0, 0, 0], values[0, 0, 1, 0] = np.nan, np.inf
    result = measure_profile(kv_of(values), "cachegen:low", 1)
    assert result.rms_relative is not None
    assert np.isfinite(result.rms_relative)


class Rounding:
    """A codec that keeps every other byte."""

    serde = "half"

    def __init__(self, lossy: bool) -> None:
        self.lossy = lossy

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def encode(self, tensors: tuple[TensorSpec, ...], payload: memoryview) -> EncodedPayload:
        half = memoryview(bytes(payload[::2]))
        return EncodedPayload(
            half, tensors, "half", "", self.lossy, EncodingReport(4.0, len(payload), len(half))
        )

    def decode(self, header: object, payload: memoryview, out: memoryview) -> None:
        out[::2], out[1::2] = payload, bytes(len(payload))


def test_the_error_is_measured_on_what_was_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this codec every second value is lost, and the encoder does not say so."""
    monkeypatch.setattr(measurement, "create_codec", lambda *_: Rounding(lossy=True))
    values = np.full((1, 1, 8, 2), 3, np.uint8)
    result = measure_profile(kv_of(values, "uint8"), "half")
    assert not result.is_equal
    assert result.rms_relative == pytest.approx(0.5**0.5)
    assert measure_profile(kv_of(values, "float8_e4m3fn"), "half").rms_relative is None


def test_a_lossless_codec_that_loses_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "create_codec", lambda *_: Rounding(lossy=False))
    with pytest.raises(CtlError, match="is said to lose nothing"):
        measure_profile(kv_of(np.full((1, 1, 8, 2), 3, np.uint8), "uint8"), "half")


def test_naive_is_nothing_to_measure() -> None:
    with pytest.raises(CtlError, match="encodes nothing"):
        measure_profile(kv_of(gaussian()), "naive")


@pytest.mark.parametrize("output", ["json", "table"])
def test_the_command(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    data = gaussian()
    header = json.dumps(
        {"kv": {"dtype": "F32", "shape": data.shape, "data_offsets": [0, data.nbytes]}}
    ).encode()
    path = tmp_path / "kv.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "codec",
                "measure",
                "--kv",
                str(path),
                "--profile",
                "lossless",
                "--profile",
                "cachegen",
                "-o",
                output,
            ]
        )
    assert ended.value.code == 0
    told = capsys.readouterr().out
    if output == "json":
        measured = json.loads(told)
        assert measured["num_tokens"] == NUM_TOKENS
        assert [(result["profile"], result["is_equal"]) for result in measured["profiles"]] == [
            ("lossless", True),
            ("cachegen", False),
        ]
        assert measured["profiles"][1]["errors"][0].keys() == {
            "layers",
            "max_relative",
            "rms_relative",
        }
    else:
        rows = {line.split()[0]: line.split() for line in told.splitlines() if line.split()}
        assert rows["lossless"][3:6] == ["0", "0", "yes"]
        assert rows["cachegen"][5] == "no"
        assert rows["cachegen"][3].endswith("%")
        assert f"KV of kv.safetensors: {NUM_TOKENS} tokens, 300.0 KiB" in told
