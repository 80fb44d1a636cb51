"""The identity of an engine's KV: everything that makes other KV of equal tokens gives chunks
another name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm import identity as module
from lmcache_core.integrations.vllm.groups import cache_groups
from lmcache_core.integrations.vllm.identity import KVIdentity, contents_fingerprint, identity_of
from lmcache_core.integrations.vllm.options import read_options
from lmcache_core.token_database.hashing import identity_root

from tests.fixtures.vllm_engine import FULL, MLA, Shape, window
from tests.fixtures.vllm_engine.shapes import kv_cache_config, settings, vllm_config
from tests.fixtures.vllm_engine.worlds import embedded, make_model
from tests.releases import NEWEST_VLLM

Change = Callable[[Any], None]
PLAIN = Shape()


def identity(
    model: Path,
    shape: Shape = PLAIN,
    change: Change = lambda config: None,
    release: str = NEWEST_VLLM,
    variables: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> KVIdentity:
    config = vllm_config(shape, model, embedded(**options), 0)
    change(config)
    caches = kv_cache_config(shape)
    read = read_options(config.kv_transfer_config.kv_connector_extra_config, "cpu")
    return identity_of(config, caches, cache_groups(caches), read, release, variables)


def root(of: KVIdentity) -> bytes:
    return identity_root(of.metadata, "")


def setting(path: str, value: object) -> Change:
    def change(config: Any) -> None:
        *way, name = path.split(".")
        for step in way:
            config = getattr(config, step)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("load_config.load_format", "dummy"),
        ("speculative_config", SimpleNamespace(method="eagle", model="draft")),
        ("a_setting_of_tomorrow", True),
        ("load_config.ignore_patterns", ["adapter*"]),
        ("parallel_config.pipeline_parallel_size", 2),
    ],
)
def test_settings_that_make_other_kv_give_other_names(
    model: Path, path: str, value: object
) -> None:
    assert root(identity(model, change=setting(path, value))) != root(identity(model))


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "options",
    [
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su"}},
        {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "of tomorrow"}},
        {
            "architectures": ["Gemma3ForCausalLM"],
            "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {}},
        },
        {"architectures": ["LlamaForCausalLM"], "layers": [{"rope_type": "dynamic"}]},
        {"architectures": ["LlamaForCausalLM", "OfAPlugin"]},
        {"architectures": None},
    ],
)
def test_longest_prompt_counts_where_a_model_may_read_it(
    model: Path, options: dict[str, Any]
) -> None:
    """Given, or from the model's own generation config. More of them are drawn in
    `test_restarts.py`.
    """

    def with_options(config: Any) -> None:
        config.model_config.hf_config = SimpleNamespace(**options)

    def longer(config: Any) -> None:
        with_options(config)
        config.model_config.max_model_len = 8192

    def tuned(config: Any) -> None:
        with_options(config)
        own = staticmethod(lambda: {"attn_temperature_tuning": True})
        type(config.model_config).try_get_generation_config = own

    names = [root(identity(model, change=change)) for change in (with_options, longer, tuned)]
    assert len(set(names)) == 3


def test_setting_without_a_text_or_nested_without_end_is_refused(model: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    unnamed = r"vllm_config\.additional_config.* cannot be named"
    for value, error in (
        (threading.Lock(), unnamed),
        ({"nested": [lambda: 1]}, unnamed),
        (endless, "nested more than"),
    ):
        with pytest.raises(LayoutError, match=error):
            identity(model, change=setting("additional_config", value))


def test_weights_of_drafts_count(model: Path, tmp_path: Path) -> None:
    draft = make_model(tmp_path / "draft")

    def name() -> bytes:
        drafts = settings(
            "SpeculativeConfig",
            method="eagle",
            model=str(draft),
            draft_model_config=settings(
                "ModelConfig", model=str(draft), hf_config=SimpleNamespace(layers=1)
            ),
        )
        return root(identity(model, change=setting("speculative_config", drafts)))

    before = name()
    (draft / "model.safetensors").write_text("other weights")
    assert name() != before


def test_drafts_without_kv_change_nothing(model: Path) -> None:
    for method in ("ngram", "suffix", "medusa"):
        drafts = setting("speculative_config", SimpleNamespace(method=method, model="any"))
        assert root(identity(model, change=drafts)) == root(identity(model))


def test_dummy_weights_are_named_by_their_seed(model: Path) -> None:
    def dummy(seed: int) -> Change:
        def change(config: Any) -> None:
            config.load_config.load_format, config.model_config.seed = "dummy", seed

        return change

    assert root(identity(model, change=dummy(1))) != root(identity(model, change=dummy(2)))
    assert root(identity(model, change=setting("model_config.seed", 1))) == root(identity(model)), (
        "a seed of sampling is none of weights"
    )


def test_other_weights_names_revisions_and_layouts(model: Path, tmp_path: Path) -> None:
    identities = [
        identity(model),
        identity(make_model(tmp_path / "other", "other weights")),
        identity(make_model(tmp_path, name="renamed")),
        identity(model, revision="v2"),
        identity(model, model_name="shared"),
        identity(model, layout="tokens"),
        identity(model, Shape(block_size=8)),
        identity(model, Shape((MLA,))),
        identity(model, Shape((window(6),))),
        identity(model, Shape((FULL, window(6)))),
    ]
    assert len({root(of) for of in identities}) == len(identities)


def test_given_names_of_model_and_revision_replace_the_weights(model: Path, tmp_path: Path) -> None:
    """The user who gives them answers for the weights."""
    other = make_model(tmp_path / "other", "other weights", "renamed")
    named = {"model_name": "shared", "revision": "v1"}
    assert identity(model, **named) == identity(other, **named)


def test_release_and_machine_count_for_blocks_and_not_for_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert root(identity(model, release="0.33.0")) != root(identity(model))
    assert root(identity(model, release="0.33.0", layout="tokens")) == root(
        identity(model, layout="tokens")
    )
    before = identity(model)
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    assert root(identity(model)) != root(before)


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        (setting("attention_config.backend", "FLASHINFER"), None),
        (lambda config: None, "VLLM_ATTENTION_BACKEND"),
        (lambda config: None, "VLLM_KV_CACHE_LAYOUT"),
    ],
)
def test_backend_and_layout_count_for_blocks_and_not_for_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: Change, variable: str | None
) -> None:
    before, of_tokens = identity(model), identity(model, layout="tokens")
    if variable is not None:
        monkeypatch.setenv(variable, "HND")
    assert root(identity(model, change=change)) != root(before)
    assert root(identity(model, change=change, layout="tokens")) == root(of_tokens)


def test_layers_of_pipeline_stages_count(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = setting("parallel_config.pipeline_parallel_size", 2)
    before = identity(model, change=staged)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert root(identity(model, change=staged)) != root(before)
    assert identity(model)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("parallel_config.nnodes", 2, "on 2 nodes"),
        ("parallel_config.nnodes_within_dp", 2, "on 2 nodes"),
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size=2"),
        ("parallel_config.prefill_context_parallel_size", 2, "prefill_context_parallel_size=2"),
        ("cache_config.calculate_kv_scales", True, "calculate_kv_scales"),
        ("weight_transfer_config", SimpleNamespace(backend="nccl"), "weight_transfer_config"),
        # vLLM turns its own prefix cache off for such a model, and asks a connector all the same.
        ("model_config.is_prefix_caching_supported", False, "needs every token"),
    ],
)
def test_kv_that_cannot_be_shared_is_refused(
    model: Path, path: str, value: object, complaint: str
) -> None:
    with pytest.raises(LayoutError, match=complaint):
        identity(model, change=setting(path, value))


def test_replicas_may_be_on_several_nodes(model: Path) -> None:
    def change(config: Any) -> None:
        config.parallel_config.nnodes, config.parallel_config.nnodes_within_dp = 2, 1

    assert identity(model, change=change)


def test_weights_that_lie_elsewhere_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LayoutError, match=r'name them with "lmcache.revision"'):
        identity(tmp_path)
    assert root(identity(tmp_path, revision="1")) != root(identity(tmp_path, revision="2"))
    assert identity(tmp_path, change=setting("load_config.load_format", "dummy"))


@pytest.mark.parametrize(
    "change",
    [
        setting("load_config.load_format", "tensorizer"),
        setting("model_config.model_weights", "s3://bucket/model"),
    ],
)
def test_weights_that_are_not_those_of_the_folder_must_be_named(
    model: Path, change: Change
) -> None:
    """What lies in the folder is then not what the engine computes with."""
    with pytest.raises(LayoutError, match=r'name them with "lmcache.revision"'):
        identity(model, change=change)
    assert identity(model, change=change, revision="1")


def test_configuration_from_elsewhere_does_not_name_the_weights(model: Path) -> None:
    def from_hub(config: Any) -> None:
        config.model_config.model = "org/absent"
        config.model_config.hf_config._commit_hash = "0" * 40

    def with_other_config(config: Any) -> None:
        from_hub(config)
        config.model_config.hf_config_path = "org/other"

    assert identity(model, change=from_hub)
    with pytest.raises(LayoutError):
        identity(model, change=with_other_config)


def test_a_worker_does_not_read_the_weights(tmp_path: Path) -> None:
    """All ranks would read the same files; they name no chunks."""
    absent = tmp_path / "absent"
    config, caches = vllm_config(PLAIN, absent, embedded(), 0), kv_cache_config(PLAIN)
    arguments = (
        config,
        caches,
        cache_groups(caches),
        read_options(embedded(), "cpu"),
        NEWEST_VLLM,
        {},
    )
    with pytest.raises(LayoutError):
        identity_of(*arguments)
    of_worker = identity_of(*arguments, is_worker=True)
    assert of_worker.metadata.layout == identity(make_model(tmp_path)).metadata.layout


def test_replicas_share_a_rank_of_which_one_stores(model: Path) -> None:
    of = identity(model, Shape((MLA,), num_ranks=4, replicas=4))
    assert (of.num_ranks, of.replicas) == (1, 4)
    assert [of.rank_of(rank) for rank in range(4)] == [0] * 4
    assert [of.stores(rank) for rank in range(4)] == [True, False, False, False]
    pairs = identity(model, Shape(num_ranks=4, replicas=2))
    assert [pairs.rank_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [pairs.stores(rank) for rank in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("shape", "replicas"), [(Shape((MLA,), num_ranks=2), 2), (Shape(num_ranks=2), 1)]
)
def test_replicas_of_older_releases_are_derived(model: Path, shape: Shape, replicas: int) -> None:
    caches = kv_cache_config(shape)
    del caches.kv_tp_replicas
    config = vllm_config(shape, model, embedded(), 0)
    of = identity_of(
        config, caches, cache_groups(caches), read_options(embedded(), "cpu"), "0.27.1", {}
    )
    assert (of.num_ranks, of.replicas) == (2 // replicas, replicas)


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


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "named"),
    [(False, 0, False), (False, 0.0, False), (False, 4, True), (True, 0, True), (True, 4, True)],
)
def test_contents_that_vllm_only_numbers_have_no_name(
    tmp_path: Path, prefix_caching: bool, cache_gb: float, named: bool
) -> None:
    found = contents_fingerprint(config(tmp_path, prefix_caching, mm_processor_cache_gb=cache_gb))
    assert (found is not None) == named


def test_variables_of_vllm_count_unless_listed(model: Path) -> None:
    plain = root(identity(model))
    assert root(identity(model, variables={"VLLM_MARLIN_INPUT_DTYPE": "int8"})) != plain
    assert root(identity(model, variables={"VLLM_OF_TOMORROW": "1"})) != plain
    assert root(identity(model, variables={"VLLM_PORT": "tcp://10.0.0.1:80"})) == plain
