"""What an LMCache file becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache_core.config import OPTIONS
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_ctl.errors import UsageError
from lmcache_ctl.migrate import CHART_SIZES, IN_CHART, migration_of
from lmcache_sidecar.settings import SidecarSettings

from tests.fixtures.ctl import Ctl

VALUES = Path(__file__).parents[3] / "helm" / "lmcache" / "values.yaml"


def written(directory: Path, **options: Any) -> Path:
    file = directory / "lmcache.yaml"
    file.write_text(yaml.safe_dump(options))
    return file


def test_tiers_become_the_sidecars_and_the_rest_stays_with_the_engine(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        chunk_size=128,
        max_local_cpu_size=20,
        local_disk="file:///local/disk/",
        remote_url="redis://cache:6379",
        remote_serde="cachegen",
        cache_policy="LRU",
        blocking_timeout_secs=5,
    )
    found = migration_of(file)
    assert found.sidecar == {
        "arena_gb": 20,
        "disk_path": "/local/disk/",
        "disk_gb": 5.0,
        "remote_url": "redis://cache:6379",
        "remote_serde": "cachegen",
        "eviction_policy": "lru",
        "tier_timeout_s": 5,
    }
    SidecarSettings(**found.sidecar)
    assert found.engine == {"chunk_size": 128, "tier_timeout_s": 5}
    assert found.chart["sidecar"] == {
        "arenaSize": "20Gi",
        "diskSize": "5Gi",
        "config": {"remote_serde": "cachegen", "eviction_policy": "lru"},
    }
    assert found.chart["modelDefaults"]["connector"]["options"]["lmcache.chunk_size"] == 128
    assert any("per GPU" in note for note in found.notes)
    assert not found.refused


def test_the_chart_has_these_values() -> None:
    values = yaml.safe_load(VALUES.read_text())
    assert set(values["sidecar"]["config"]) >= IN_CHART
    assert set(values["sidecar"]) >= set(CHART_SIZES.values())
    assert values["modelDefaults"]["connector"]["options"] == {}


def test_what_has_no_effect_is_told(tmp_path: Path) -> None:
    idle = {"blend_check_layers": 1, "mp_port": 5555, "remote_serde": "cachegen"}
    found = migration_of(written(tmp_path, chunk_size=128, cache_policy="LRU", **idle))
    assert found.notes[1] == f"left out, without what they belong to: {', '.join(sorted(idle))}"
    assert not found.refused
    given = written(tmp_path, remote_url="redis://h:1", remote_serde="cachegen")
    assert "left out" not in " ".join(migration_of(given).notes)


@pytest.mark.parametrize("name", sorted({*FOREIGN_NAMES, *OPTIONS} - {"local_cpu"}))
def test_no_option_is_dropped_without_a_word(name: str, tmp_path: Path) -> None:
    """With a value that no option has by default."""
    file = written(tmp_path, **{name: "/some/thing"})
    told = Ctl().run("migrate", file, code=migration_of(file).refused != [])
    assert "/some/thing" in told.stdout or name in told.stdout


def test_all_that_is_refused_is_told_at_once(tmp_path: Path) -> None:
    options = {
        "chunk_size": 0,
        "use_layerwise": True,
        "enable_async_loading": True,
        "remote_url": "lm://h:1",
        "remote_serde": "torch",
        "max_local_disc": 4,
        "enable_blending": True,
        "lookup_url": "localhost:8100",
        "local_cpu": False,
    }
    told = Ctl().text("migrate", written(tmp_path, **options), code=1)
    for name in options.keys() - {"local_cpu", "remote_url"}:
        assert f"{name}=" in told or f"{name!r}" in told, name
    assert Ctl().json("migrate", tmp_path / "lmcache.yaml", code=1)["sidecar"] == {
        "arena_gb": 5.0,
        "remote_url": "lm://h:1",
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_local_disk_size": 10, "remote_serde": "cachegen", "disk_fsync": True},
        {"local_disk": "/d/", "local_disk_serde": "lossless", "chunk_ttl_s": 60, "salt": "s"},
    ],
)
def test_the_settings_are_ones_that_a_sidecar_takes(options: Any, tmp_path: Path) -> None:
    found = migration_of(written(tmp_path, **options))
    SidecarSettings(**found.sidecar)
    assert not found.refused
    assert "'s'" not in str(found), "a secret"


def test_what_is_no_configuration_is_a_wrong_call(tmp_path: Path) -> None:
    for content in ("[", "- a"):
        (tmp_path / "x.yaml").write_text(content)
        with pytest.raises(UsageError, match=r"x\.yaml"):
            migration_of(tmp_path / "x.yaml")
