"""What is read out of a sidecar's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_ctl.asking import MAX_ANSWER_BYTES
from lmcache_ctl.codec.stats import CodecStats, ProfileErrors, fetch_stats, print_stats, read_stats
from lmcache_ctl.errors import CtlError
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind
from lmcache_ctl.settings import CtlSettings

from tests.fixtures.http_server import Handler, served

URL = "http://sidecar:8083"
METRICS = b"""# TYPE lmcache_build_info gauge
lmcache_build_info{service="lmcache-sidecar",version="0.1.0"} 1.0
# TYPE lmcache_codec_encoded_chunks_total counter
lmcache_codec_encoded_chunks_total{serde="cachegen"} 4.0
lmcache_codec_encoded_raw_bytes_total{serde="cachegen"} 4.0e+06
lmcache_codec_encoded_bytes_total{serde="cachegen"} 1e+06
lmcache_codec_encode_microseconds_total{serde="cachegen"} 2000.0
lmcache_codec_unencoded_chunks_total{serde="cachegen"} 1.0
lmcache_codec_decoded_chunks_total{serde="lossless"} 2.0
lmcache_codec_decoded_raw_bytes_total{serde="lossless"} 3000.0
lmcache_codec_decoded_bytes_total{serde="lossless"} 2000.0
lmcache_codec_decode_microseconds_total{serde="lossless"} 0.0
lmcache_codec_encoded_chunks_total{serde="idle"} 0.0
# TYPE lmcache_codec_last_max_relative_error gauge
lmcache_codec_last_max_relative_error{profile="cachegen/standard"} 0.25
lmcache_codec_worst_rms_relative_error{profile="cachegen/standard"} 0.5
"""
TIERS = json.dumps(
    {
        "tiers": {
            "memory": {"num_chunks": 4},
            "storage": {
                "encoded_chunks": 4,
                "encoded_raw_bytes": 100,
                "encoded_bytes": 50,
                "encode_microseconds": 10,
            },
        }
    }
).encode()


def test_counters_become_ratio_and_speed() -> None:
    stats = read_stats(URL, METRICS, (200, TIERS))
    cachegen, lossless = stats.serdes
    assert (
        cachegen.name,
        cachegen.encoded.num_chunks,
        cachegen.num_kept_raw,
        cachegen.decoded.num_chunks,
    ) == ("cachegen", 4, 1, 0)
    assert (cachegen.encoded.raw_bytes, cachegen.encoded.encoded_bytes, cachegen.encoded.ratio) == (
        4_000_000,
        1_000_000,
        4.0,
    )
    assert cachegen.encoded.raw_bytes_per_s == pytest.approx(2e9)
    assert (cachegen.decoded.ratio, cachegen.decoded.raw_bytes_per_s) == (None, None)
    assert (lossless.decoded.ratio, lossless.decoded.raw_bytes_per_s) == (1.5, None)
    [remote] = stats.tiers
    assert (remote.name, remote.encoded.ratio, remote.encoded.raw_bytes_per_s) == (
        "storage",
        2.0,
        pytest.approx(1e7),
    )
    assert stats.errors == [
        ProfileErrors("cachegen/standard", last_max_relative=0.25, worst_rms_relative=0.5)
    ]
    assert stats.tiers_hidden == ""


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, b"", "--token-file"),
        (403, b"", "--token-file"),
        (404, b"", "Not Found"),
        (200, b"[]", "another version"),
        (200, b"\xff", "version"),
    ],
)
def test_figures_by_tier_may_be_missing(
    status: int, body: bytes, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = read_stats(URL, METRICS, (status, body))
    assert stats.tiers == []
    assert told in stats.tiers_hidden
    print_stats(stats)
    assert "No figures by tier" in capsys.readouterr().out


@pytest.mark.parametrize(
    "metrics", [b"", b"up 1\n", b"<html></html>", b"\xff\xfe", b"lmcache_build_info{ 1"]
)
def test_others_answers_are_refused(metrics: bytes) -> None:
    with pytest.raises(CtlError, match="/metrics is not"):
        read_stats(URL, metrics, (200, TIERS))


def test_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_stats(read_stats(URL, METRICS, (200, TIERS)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cachegen", "encoded", "4", "3.8", "MiB", "976.6", "KiB", "4.00x", "2.00", "1"] in lines
    assert ["lossless", "decoded", "2", "2.9", "KiB", "2.0", "KiB", "1.50x", "-"] in lines
    assert ["storage", "encoded", "4", "100", "B", "50", "B", "2.00x", "0.01", "0"] in lines
    assert ["cachegen/standard", "25.00%", "-", "-", "50.00%"] in lines


def test_nothing_done_yet(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(read_stats(URL, METRICS.split(b"# TYPE lmcache_codec")[0], (200, b'{"tiers":{}}')))
    assert "nothing has been encoded or decoded" in capsys.readouterr().out


class Service(Handler):
    """Answers as a sidecar that wants a token for its tiers."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            status, body = 200, METRICS
        elif self.path == "/v1/tiers":
            status, body = (
                (200, TIERS) if self.headers.get("Authorization") == "Bearer s3cret" else (401, b"")
            )
        elif self.path == "/long/metrics":
            status, body = 200, b"#" * (MAX_ANSWER_BYTES + 1)
        else:
            status, body = 404, b""
        self.answer(status, body)


@pytest.fixture
def service() -> Iterator[str]:
    with served(Service) as url:
        yield url


def fetch(url: str, token: Path | None = None) -> CodecStats:
    return Reach(CtlSettings(sidecar_urls=(url,), token_file=token, timeout_s=60)).ask_one(
        Kind.SIDECAR, fetch_stats
    )


def test_a_token_opens_the_figures_by_tier(service: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    assert fetch(service).tiers == []
    assert [tier.name for tier in fetch(service + "/", token).tiers] == ["storage"]


@pytest.mark.parametrize(
    ("path", "told"), [("/elsewhere", "answers /metrics with .Not Found."), ("/long", "more than")]
)
def test_strange_answers(service: str, path: str, told: str) -> None:
    with pytest.raises(CtlError, match=told):
        fetch(service + path)
