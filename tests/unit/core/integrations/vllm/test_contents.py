"""What multimodal contents become for a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations.vllm.identity import contents_fingerprint


def config(model: Path, prefix_caching: bool = True, **options: Any) -> SimpleNamespace:
    """vLLM's, of a model that sees."""
    seeing = SimpleNamespace(
        model=str(model),
        multimodal_config=SimpleNamespace(**{"mm_processor_cache_gb": 4, **options}),
    )
    return SimpleNamespace(
        model_config=seeing, cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching)
    )


def test_model_of_text_has_no_fingerprint() -> None:
    of_text = SimpleNamespace(
        model_config=SimpleNamespace(model="m", multimodal_config=None), cache_config=None
    )
    assert contents_fingerprint(of_text) == ""
    assert contents_fingerprint(SimpleNamespace(model_config=SimpleNamespace(model="m"))) == ""


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"max_pixels": 1000}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"mm_encoder_fp8_scale_path": "scales.json"},
        {"video_pruning_rate": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_processor_count(tmp_path: Path, options: dict[str, Any]) -> None:
    assert contents_fingerprint(config(tmp_path, **options)) != contents_fingerprint(
        config(tmp_path)
    )
    assert contents_fingerprint(config(tmp_path, **options)) == contents_fingerprint(
        config(tmp_path, **options)
    )


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "video_preprocessor_config.json", "scales.json"]
)
def test_files_of_the_processor_count(tmp_path: Path, name: str) -> None:
    found = [contents_fingerprint(config(tmp_path))]
    scales = {"mm_encoder_fp8_scale_path": str(tmp_path / name)} if name == "scales.json" else {}
    for text in ("{}", '{"do_normalize": false}'):
        (tmp_path / name).write_text(text)
        found.append(contents_fingerprint(config(tmp_path, **scales)))
    assert len(set(found)) == 3


def test_folder_of_these_files_does_not_count(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "preprocessor_config.json").write_text("{}")
    assert contents_fingerprint(config(tmp_path / "here")) == contents_fingerprint(
        config(tmp_path / "there")
    )


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "named"),
    [(False, 0, False), (False, 0.0, False), (False, 4, True), (True, 0, True), (True, 4, True)],
)
def test_contents_that_vllm_only_numbers_have_no_name(
    tmp_path: Path, prefix_caching: bool, cache_gb: float, named: bool
) -> None:
    found = contents_fingerprint(config(tmp_path, prefix_caching, mm_processor_cache_gb=cache_gb))
    assert (found is not None) == named
