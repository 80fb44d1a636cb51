"""What an LMCache file becomes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache_core.config import OPTIONS, LMCacheEngineConfig
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_core.config.options import SIDECAR_SETTING
from lmcache_core.config.sources import is_not_ours
from lmcache_ctl.errors import UsageError
from lmcache_ctl.migrate import migration_of
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
        max_local_disk_size=5,
        remote_url="redis://cache:6379",
        remote_serde="cachegen",
        cache_policy="LRU",
        blocking_timeout_secs=5,
    )
    found = migration_of(file)
    assert found.sidecar == {
        "arena_gb": 20,
        "disk_path": "/local/disk/",
        "disk_gb": 5,
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


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"local_disk": None, "max_local_disk_size": 10737418240}, "max_local_disk_size"),
        (
            {"blocking_timeout_secs": 120},
            "blocking_timeout_secs: tier_timeout_s=120: the longest wait on a tier here",
        ),
    ],
    ids=["a tier that is off needs no valid size", "a wait becomes a deadline"],
)
def test_what_becomes_something_else_is_noted(
    options: dict[str, Any], note: str, tmp_path: Path
) -> None:
    found = migration_of(written(tmp_path, **options))
    assert not found.refused
    assert any(note in said for said in found.notes)


def test_sizes_are_said_to_be_per_gpu_where_there_are_any(tmp_path: Path) -> None:
    assert migration_of(written(tmp_path)).notes == ["the file sets nothing"]


def test_what_has_no_effect_here_is_left_out(tmp_path: Path) -> None:
    options = {
        "numa_mode": "auto",
        "internal_api_server_enabled": True,
        "internal_api_server_port_start": 6999,
        "local_disk": False,
        "max_local_cpu_size": 5,
    }
    told = Ctl().text("migrate", written(tmp_path, **options))
    assert f"no effect here, left out: {', '.join(sorted(options)[:2])}" in told
    assert "Refused" not in told


def test_the_known_names_are_listed_once(tmp_path: Path) -> None:
    told = Ctl().text("migrate", written(tmp_path, foo=1, bar=2, chunksize=3), code=1)
    assert told.count("; known: chunk_size, ") == 1
    assert "unknown option 'chunksize'; did you mean 'chunk_size'?" in told


def test_a_size_that_is_not_there_is_to_be_chosen(tmp_path: Path) -> None:
    found = migration_of(written(tmp_path, local_disk="/d/"))
    assert found.sidecar == {"disk_path": "/d/"}
    assert found.chart == {"sidecar": {"config": {}}}
    assert found.to_choose == {
        "arena_gb": "max_local_cpu_size is not in the source",
        "disk_gb": "max_local_disk_size is not in the source",
    }
    said = Ctl().text("migrate", tmp_path / "lmcache.yaml")
    for setting in ("arena_gb", "disk_gb", "sidecar.arenaSize", "sidecar.diskSize"):
        assert f"# {setting} has to be chosen: max_local_" in said
    assert "5.0" not in said


@pytest.mark.parametrize(
    ("size", "gb", "quantity"),
    [
        (5.5, 5.5, "5.5Gi"),
        ("32.0", 32, "32Gi"),
        (" 64 ", 64, "64Gi"),
        (1234567.25, None, None),
        (40000.0625, 40000.0625, "40000.0625Gi"),
        ("5Gi", None, None),
        (0, None, None),
        (True, None, None),
        ([5], None, None),
        (10737418240, None, None),
        (float("inf"), None, None),
    ],
    ids=str,
)
def test_a_size_is_taken_as_it_is_or_refused(
    size: Any, gb: float | None, quantity: str | None, tmp_path: Path
) -> None:
    """A refused one is not replaced by a default."""
    found = migration_of(written(tmp_path, max_local_cpu_size=size))
    assert found.sidecar.get("arena_gb") == gb
    assert found.chart["sidecar"].get("arenaSize") == quantity
    assert ("max_local_cpu_size" in found.to_choose.get("arena_gb", "")) == (gb is None)


HOSTILE = {
    "nothing": b"",
    "not closed": b"[",
    "deep": b"[" * 500,
    "a tag of Python's": b"salt: !!python/object:os.system {}",
    "a number without end": b"chunk_size: 0x" + b"f" * 6000,
    "a name without end": b"? 0x" + b"f" * 6000 + b"\n: 1\n",
    "half a character": b'salt: "\\ud800"\nlocal_disk: "/\\udcff/"\n',
    "names of all kinds": b"1: 2\n2.5: 3\ntrue: 4\nnull: 5\n2020-01-01: 6\n!!binary aGk=: 7\n",
    "its own alias": b"extra_config: &a [*a]",
    "aliases of aliases": b"a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (each, each, b",".join([b"*%c" % (each - 1)] * 10))
        for each in range(ord("b"), ord("n"))
    ),
    "aliases in an option": b"extra_config: [&a [x,x,x,x,x,x,x,x,x,x]"
    + b"".join(
        b", &%c [%s]" % (each, b",".join([b"*%c" % (each - 1)] * 10))
        for each in range(ord("b"), ord("g"))
    )
    + b"]\n",
    "many names": b"".join(b"k%d: 1\n" % number for number in range(600)),
    "a duplicate": b"chunk_size: 3\nchunk_size: 4\n",
    "a manifest of something else": b"kind: Pod\nspec: {containers: [{name: x}]}\n",
    "a connector that is no JSON": b"args: [--kv-transfer-config, '{']\n",
    "a connector that is missing": b"args: [--kv-transfer-config]\n",
    "a script that is not closed": b"args: ['vllm --kv-transfer-config \"{']\n",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_any_file_is_an_answer_or_one_sentence(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_bytes(content)
    code = 2
    with contextlib.suppress(UsageError):
        code = 1 if migration_of(file).refused else 0
    said = Ctl().run("migrate", file, code=code)
    assert said.stdout.encode() or code == 2
    assert len(said.stderr.splitlines()) == (code == 2)
    assert len(said.stderr) < 1000


PASSWORD = "s3cret@/:#?%&+ é"
ENCODED = quote(PASSWORD, "")


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"remote_url": f"redis://u:{ENCODED}@h:1/2"}, f"redis://u:{ENCODED}@h:1/2"),
        ({"remote_url": f"rediss://h:1?password={ENCODED}"}, f"rediss://h:1?password={ENCODED}"),
        (
            {"remote_url": f"redis-sentinel://u:{ENCODED}@h:1,g:2/name"},
            f"redis-sentinel://u:{ENCODED}@h:1,g:2/name",
        ),
        (
            {"remote_url": "resp://h:1", "extra_config": {"username": "u", "password": PASSWORD}},
            f"redis://u:{ENCODED}@h:1",
        ),
        (
            {"remote_url": "resp://h:1", "extra_config": f'{{"password": "{PASSWORD}"}}'},
            f"redis://:{ENCODED}@h:1",
        ),
        (
            {
                "remote_url": "valkey://h:1",
                "extra_config": {"valkey_password": PASSWORD, "valkey_database": 3},
            },
            f"redis://:{ENCODED}@h:1/3",
        ),
        # not carried over
        ({"remote_url": f"redis-cluster://u:{ENCODED}@h:1"}, None),
        ({"remote_url": f"s3://{ENCODED}@bucket?secret={ENCODED}"}, None),
        ({"remote_url": f"u:{ENCODED}@h:1"}, None),
        ({"remote_url": "h:1", "extra_config": f"password={PASSWORD}"}, None),
        ({"extra_config": [{"password": PASSWORD}]}, None),
        ({"remote_url": [{"password": PASSWORD}]}, None),
        (
            {
                "remote_url": "valkey://h:1",
                "extra_config": {"valkey_mode": "cluster", "valkey_password": PASSWORD},
            },
            None,
        ),
        ({"salt": PASSWORD}, None),
        ({"lookup_url": f"http://u:{ENCODED}@h:1"}, None),
        ({"hf_token": PASSWORD}, None),
    ],
    ids=str,
)
def test_a_password_is_carried_over_or_its_option_named_and_never_shown(
    options: Any, url: str | None, tmp_path: Path
) -> None:
    found = migration_of(written(tmp_path, **options))
    assert found.sidecar.get("remote_url") == url
    said = "\n".join([*found.notes, *found.refused, *found.to_choose.values()])
    assert "s3cret" not in said
    for name in options:
        assert name in said
    assert (url is None) == ("s3cret" not in str(found))


def test_credentials_of_variables_are_part_of_the_url(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.env"
    file.write_text(
        "# of LMCache\nexport LMCACHE_REMOTE_URL=resp://\nLMCACHE_RESP_HOST=h\n"
        "LMCACHE_RESP_PORT=6379\nLMCACHE_RESP_USERNAME=u\nLMCACHE_RESP_PASSWORD='s3 cret$x'\n"
        "LMCACHE_CHUNK_SIZE=128 # small\nLMCACHE_LOCAL_CPU=True\nLMCACHE_USE_EXPERIMENTAL=True\n"
        'LMCACHE_SALT="$SALT"\nHF_TOKEN=s3cret\nLMCACHE_CONFIG_FILE=/a.yaml\n'
    )
    found = migration_of(file)
    assert found.sidecar == {"remote_url": "redis://u:s3%20cret%24x@h:6379"}
    assert found.engine == {"chunk_size": 128}
    said = "\n".join([*found.notes, *found.refused])
    assert "s3" not in said.replace(str(file), "")
    for name in ("HF_TOKEN", "LMCACHE_SALT", "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_CONFIG_FILE"):
        assert name in said
    assert len(found.refused) == 1
    file.write_text("LMCACHE_RESP_PASSWORD=s3cret\n")
    [line] = migration_of(file).refused
    assert "resp_password" in line
    assert "s3cret" not in line


@pytest.mark.parametrize(
    ("url", "ours", "said"),
    [
        ("fs://host:0/mnt/kv", "file:///mnt/kv", "fs:// is file:///mnt/kv here"),
        ("fs://host:0/with%41 space", "file:///with%2541%20space", "must exist"),
        ("s3://bucket.region", None, "storage.s3 of the chart"),
        ("valkey://h:1", "redis://h:1", "valkey:// is redis:// here"),
        ("resp://h:1", "redis://h:1", "resp:// is redis:// here"),
        ("unix:///socket", None, "over TCP"),
        ("redis-cluster://h:1,g:1", None, "a cluster is no remote tier here"),
        ("fs://host:0/", None, "write file:///dir"),
        ("http://h:8080", None, "write lm://host:port of the same service"),
        ("mooncakestore://h:1", None, "must be a URL with one of the schemes"),
    ],
)
def test_a_scheme_of_lmcache_becomes_ours_or_has_advice(
    url: str, ours: str | None, said: str, tmp_path: Path
) -> None:
    found = migration_of(written(tmp_path, remote_url=url))
    assert found.sidecar.get("remote_url") == ours
    assert said in "\n".join([*found.notes, *found.refused])


MANIFEST = """
apiVersion: v1
kind: ConfigMap
metadata: {name: lmcache}
data:
  lmcache.yaml: |
    chunk_size: 128
    max_local_cpu_size: "20"
---
apiVersion: v1
kind: Secret
metadata: {name: a}
data: {LMCACHE_SALT: czNjcmV0}
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: vllm
        command: [/bin/sh, -c]
        args:
        - >-
          vllm serve m --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role":
          "kv_both", "kv_connector_extra_config": {"lmcache.cache_policy": "LRU", "other": 1}}'
        env:
        - {name: LMCACHE_LOCAL_DISK, value: /cache/}
        - {name: LMCACHE_MAX_LOCAL_DISK_SIZE, value: "50"}
        - {name: LMCACHE_USE_LAYERWISE, value: "True"}
        - {name: LMCACHE_REMOTE_URL, value: "redis://:$(PASSWORD)@redis:6379"}
        - {name: LMCACHE_REMOTE_SERDE, valueFrom: {configMapKeyRef: {name: a, key: b}}}
        - {name: VLLM_USE_V1, value: "1"}
"""
STACK = """
servingEngineSpec:
  modelSpec:
  - name: llama
    vllmConfig: {maxModelLen: 4096}
    lmcacheConfig:
      enabled: true
      cpuOffloadingBufferSize: "60"
      diskOffloadingBufferSize: 100Gi
      enableController: true
      instanceId: default1
      hf_token: s3cret
    env:
    - {name: LMCACHE_LOCAL_DISK, value: /disk}
cacheserverSpec: {servicePort: 81}
"""


def test_options_are_found_in_manifests(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(MANIFEST)
    found = migration_of(file)
    assert found.sidecar == {
        "arena_gb": 20,
        "disk_gb": 50,
        "disk_path": "/cache/",
        "eviction_policy": "lru",
    }
    assert found.engine == {"chunk_size": 128}
    assert not found.to_choose
    refused = "\n".join(found.refused)
    assert any("left out: use_layerwise" in note for note in found.notes)
    for name in ("LMCACHE_SALT", "LMCACHE_REMOTE_URL", "LMCACHE_REMOTE_SERDE"):
        assert name in refused
    assert "unknown option" not in refused
    assert "s3cret" not in str(found)
    assert "lmcache.io/replace-connector" in "\n".join(found.notes)
    assert "other" in "\n".join(found.notes)


def test_options_are_found_in_values_of_production_stack(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(STACK)
    found = migration_of(file)
    assert found.sidecar == {"arena_gb": 60, "disk_path": "/disk"}
    assert found.to_choose == {"disk_gb": "max_local_disk_size is refused"}
    refused = "\n".join(found.refused)
    assert "max_local_disk_size='100Gi'" in refused
    assert "enable_controller=True" in refused
    assert "unknown option" not in refused
    notes = "\n".join(found.notes)
    for said in ("cacheserverSpec", "hf_token", "lmcache.io/replace-connector"):
        assert said in notes
    assert "s3cret" not in str(found)


CONNECTOR = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("content", "engine", "said"),
    [
        ("services: {vllm: {environment: [LMCACHE_CHUNK_SIZE=128, A=b]}}", {"chunk_size": 128}, ""),
        (
            "kind: Kustomization\nconfigMapGenerator: [{literals: [LMCACHE_CHUNK_SIZE=128]}]",
            {"chunk_size": 128},
            "",
        ),
        (
            "args:\n- |\n  export LMCACHE_CHUNK_SIZE=128 LMCACHE_SALT=$SALT\n  exec vllm serve m\n",
            {"chunk_size": 128},
            "LMCACHE_SALT: is expanded",
        ),
        (
            "env: [{name: LMCACHE_REMOTE_URL, value: 'lm://{{ .Release.Name }}:1'}]",
            {},
            "LMCACHE_REMOTE_URL: is expanded at env[0], not here",
        ),
        (
            "environment: {LMCACHE_CHUNK_SIZE: '128', LMCACHE_SALT: '${SALT}'}",
            {"chunk_size": 128},
            "LMCACHE_SALT: is expanded",
        ),
        ("args:\n- LMCACHE_CHUNK_SIZE=128 vllm 'serve\n", {}, "a script that cannot be read"),
        (
            f'kv-transfer-config: \'{CONNECTOR[:-1]}, "kv_connector_extra_config":'
            ' {"lmcache.chunk_size": 128}}\'\nmodel: m\n',
            {"chunk_size": 128},
            "",
        ),
        (
            "args: [--kv-transfer-config.kv_connector, LMCacheConnectorV1]",
            {},
            "--kv-transfer-config.kv_connector: only JSON after --kv-transfer-config is read",
        ),
        (
            f"args: [--kv-transfer-config, '{CONNECTOR}']\nenvFrom: [{{secretRef: {{name: a}}}}]",
            {},
            "envFrom: its variables are not read; migrate what it names, too",
        ),
        (
            "command: [lmcache, server, --l1-size-gb, '60']",
            {},
            "command[2]: options of lmcache server are not read; its --l1-size-gb is arena_gb here",
        ),
        (
            "args: [-c, lmcache server --l1-size-gb=60]",
            {},
            "args[1][2]: options of lmcache server are not read; its --l1-size-gb is arena_gb here",
        ),
    ],
)
def test_what_sets_options_elsewhere_is_read_or_named(
    content: str, engine: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """As in Compose, Kustomize, scripts, vLLM's own file, and LMCache's server."""
    file = tmp_path / "deployment.yaml"
    file.write_text(content)
    found = migration_of(file)
    assert found.engine == engine
    assert said in "\n".join([*found.notes, *found.refused])


def test_what_an_annotation_says_sets_nothing(tmp_path: Path) -> None:
    """`kubectl` keeps a manifest in one, people write remarks."""
    file = tmp_path / "pod.yaml"
    metadata = {"annotations": {"why": "LMCACHE_CHUNK_SIZE=512 was slower"}}
    env = [{"name": "LMCACHE_CHUNK_SIZE", "value": "128"}]
    file.write_text(json.dumps({"kind": "Pod", "metadata": metadata, "env": env}))
    found = migration_of(file)
    assert (found.engine, found.refused) == ({"chunk_size": 128}, [])


def test_an_option_with_two_values_is_neither(tmp_path: Path) -> None:
    """As of a prefill and a decode deployment."""
    file = tmp_path / "values.yaml"
    entry = "- env: [{{name: LMCACHE_CHUNK_SIZE, value: '{}'}}]\n"
    file.write_text("".join(map(entry.format, (128, 256, 128))))
    found = migration_of(file)
    assert not found.engine
    assert len(found.refused) == 2
    assert all("chunk_size" in line for line in found.refused)


def test_another_role_and_another_connector_are_named(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    of = {"lmcache.chunk_size": 128, "lmcache.mp.port": 1}
    ours = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_producer"}
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "NixlConnector"},
                ours | {"kv_connector_extra_config": of},
            ]
        },
    }
    file.write_text(yaml.safe_dump({"args": ["--kv-transfer-config", json.dumps(several)]}))
    found = migration_of(file)
    assert found.engine == {"chunk_size": 128}
    assert not found.refused
    notes = "\n".join(found.notes)
    for said in ("kv_role='kv_producer': keep", "MultiConnector", "NixlConnector", "lmcache.mp"):
        assert said in notes


# --- Any configuration --------------------------------------------------------------------------

CHOSEN = {"arena_gb": 1.0, "disk_gb": 1.0, "lookup_url": "http://h:1", "broker_url": "http://h:1"}
CHART = jsonschema.Draft7Validator(
    json.loads((VALUES.parent / "values.schema.json").read_text(encoding="utf-8"))
)
NAMES = sorted({*OPTIONS, *FOREIGN_NAMES})
URLS = st.sampled_from(
    [
        *("lm://h:1", "lm+tls://h:1,g:2", "redis://u:p%40@h:1/2?ttl_s=3", "redis-sentinel://h:1"),
        *("resp://h:1", "valkey://h:1/0", "fs://h:0/a b/", "file:///a/", "s3://b", "https://h:1"),
        *("http://h:1", "http://u:p@h:1", "localhost:8201", "lm://", "://", "http://[", "h:0"),
    ]
)
# In names, what is before an @ or after a question mark is masked.
TEXTS = st.text(
    st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"], exclude_characters="@?"),
    max_size=8,
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXTS,
    URLS,
    st.sampled_from(["5", "5Gi", "5.5", "True", "null", "/d/", "file:///d/", "lru", "LRU", "x/y"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(TEXTS, TEXTS, max_size=2),
)


def fitting(name: str) -> st.SearchStrategy[Any]:
    """Values that the option takes, if it is one of ours."""
    if name not in OPTIONS:
        return ODD
    option = OPTIONS[name]
    if option.choices:
        return st.sampled_from(option.choices)
    low, high = option.limits
    kinds: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(int(low), int(high)),
        float: st.floats(low, high),
        str: URLS | st.sampled_from(["/a", "/b", "x" * 300]),
    }
    return kinds[option.kind]


CONFIGURATIONS = st.lists(
    st.sampled_from(list(OPTIONS)) | st.sampled_from(NAMES) | TEXTS, max_size=8, unique=True
).flatmap(lambda names: st.fixed_dictionaries({name: fitting(name) | ODD for name in names}))


BECOMES = {
    "max_local_cpu_size": "arena_gb",
    "max_local_cache_size": "arena_gb and disk_gb",
    "max_local_disk_size": "disk_gb",
    "local_device": "disk_path",
    "blocking_timeout_secs": "tier_timeout_s",
    "cache_policy": "eviction_policy",
}


def derived(value: Any) -> list[Any]:
    """What a value of the source may become: itself, or the same in our form."""
    if not isinstance(value, str):
        return [value]
    forms: list[Any] = [value, value.lower(), value.removeprefix("file://")]
    forms += [value.strip().lower() == "true"] if value.strip().lower() in ("true", "false") else []
    with contextlib.suppress(ValueError):
        forms.append(float(value))
    for scheme, ours in (("resp://", "redis://"), ("valkey://", "redis://")):
        forms += [value.replace(scheme, ours, 1)]
    if value.startswith("fs://"):
        forms.append("file://" + quote(value.partition(":0")[2]))
    return forms


def accepted(found: Any) -> Any:
    """A migration whose results are taken by what reads them."""
    chosen = {name: CHOSEN.get(name, "/chosen") for name in found.to_choose}
    SidecarSettings(**chosen | found.sidecar)
    LMCacheEngineConfig.from_defaults(**{"remote_url": None, "sidecar_socket": "/s"} | found.engine)
    CHART.validate(found.chart)
    return found


def check(file: Path, source: dict[str, Any], place: Place) -> int:
    """Check what a source becomes; returns the exit code that the command must have."""
    file.write_text(place(source), encoding="utf-8")
    try:
        found = accepted(migration_of(file))
    except UsageError:
        assert not source.keys() & set(NAMES)
        return 2
    possible = [each for value in source.values() for each in derived(value)]
    for setting, value in {**found.sidecar, **found.engine}.items():
        assert any(value == each for each in possible), (setting, value)
    said = "\n".join([*found.notes, *found.refused, *found.to_choose.values()])
    carried = {**found.sidecar, **found.engine}
    for name, value in source.items():
        instead = OPTIONS[name].beside_sidecar if name in OPTIONS else ""
        settings = [name, *BECOMES.get(name, instead.removeprefix(SIDECAR_SETTING)).split(" and ")]
        is_carried = any(carried.get(each) in derived(value) for each in settings)
        assert is_carried or name in said or repr(name)[1:-1] in said, name
    return 1 if found.refused else 0


Place = Callable[[dict[str, Any]], str]


def as_file(source: dict[str, Any]) -> str:
    return json.dumps(source)  # which is YAML


def as_variables(source: dict[str, Any]) -> str:
    """Of a container: null is no value, all others are texts."""
    variables = [
        {"name": f"LMCACHE_{name.upper()}"} | ({} if value is None else {"value": str(value)})
        for name, value in source.items()
    ]
    return json.dumps({"kind": "Pod", "env": variables})


def as_connector(source: dict[str, Any]) -> str:
    extra = {f"lmcache.{name}": value for name, value in source.items()}
    config = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    return json.dumps({"kind": "Pod", "args": ["--kv-transfer-config", json.dumps(config)]})


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=10)
@given(data=st.data())
def test_every_option_of_ours_is_carried_over_or_named(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With values that it takes."""
    source = {name: data.draw(fitting(name).filter(lambda value: value != OPTIONS[name].default))}
    check(tmp_path_factory.getbasetemp() / "any.yaml", source, as_file)


TWO_TOKENS = {"remote_url": "lm://h:1", "remote_token_file": "/a", "peer_token_file": "/b"}


@pytest.mark.parametrize("place", [as_file, as_connector])
@given(source=CONFIGURATIONS, output=st.sampled_from(["table", "json", "yaml"]))
@example(output="table", source={"distributed_url": "lm://h:1", "peer_tls_key_file": "/k"})
@example(output="table", source={"distributed_url": "lm://h:1", "peer_tls_cert_file": "/c"})
@example(output="table", source=TWO_TOKENS)
def test_any_configuration_is_carried_over_or_named(
    place: Place, source: dict[str, Any], output: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every value of the result is the source's, all that takes them takes the result, and it is
    shown in every format.
    """
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    code = check(file, source, place)
    said = Ctl().run("migrate", file, "-o", output, code=code)
    assert said.stdout.encode() or code == 2


# --- Every name in every form ---------------------------------------------------------------------

AROUND = {
    "local_disk": "/tier/",
    "max_local_cpu_size": 3,
    "max_local_disk_size": 4,
    "remote_url": "redis://tier:1",
}
"""Tiers, without which some options mean nothing."""
UNITS = ("5Gi", "30s", "80%")


PLACES = pytest.mark.parametrize("place", [as_file, as_variables])


def values_of(name: str) -> list[Any]:
    """Two that the option takes and that are no texts; of LMCache's names, two that it may."""
    if name not in OPTIONS:
        return [True, 0.5]
    option = OPTIONS[name]
    kinds = {bool: [True, False], int: list(map(int, option.limits)), float: list(option.limits)}
    return kinds.get(option.kind, [])


class Migrations:
    """Migrates sources from one place; whatever comes out is checked by what reads it."""

    def __init__(self, file: Path, place: Place) -> None:
        self._file, self._place = file, place

    def __call__(self, source: dict[str, Any]) -> Any:
        self._file.write_text(self._place(source), encoding="utf-8")
        return accepted(migration_of(self._file))


@pytest.fixture
def migrations(tmp_path: Path, place: Any) -> Migrations:
    return Migrations(tmp_path / "any.yaml", place)


def around(name: str) -> dict[str, Any]:
    """The tiers without what a name sets, or means."""
    known = FOREIGN_NAMES.get(name)
    meant = (known.translate(5, {}) if known is not None else None) or {}
    return {each: value for each, value in AROUND.items() if each not in (name, *meant)}


def carried(found: Any) -> tuple[Any, ...]:
    return found.sidecar, found.engine, found.chart


@PLACES
def test_null_is_as_if_the_name_were_not_there(migrations: Migrations) -> None:
    for name in NAMES:
        found = migrations(around(name) | {name: None})
        assert not found.refused, name
        assert carried(found) == carried(migrations(around(name))), name


def test_quotes_change_nothing(tmp_path: Path) -> None:
    """Around a number or a truth value; variables have no others."""
    plain, quoted = (Migrations(tmp_path / "a.yaml", place) for place in (as_file, as_variables))
    for name in NAMES:
        for value in values_of(name):
            found = plain(around(name) | {name: value})
            text = f" {value} ".lower()
            for other in (plain(around(name) | {name: text}), quoted(around(name) | {name: value})):
                assert carried(other) == carried(found), (name, value)
                assert bool(other.refused) == bool(found.refused), (name, value)


@PLACES
@pytest.mark.parametrize("text", UNITS)
def test_a_value_in_another_unit_is_never_guessed(text: str, migrations: Migrations) -> None:
    """It is refused, unless the option has no effect here."""
    for name in NAMES:
        if name in OPTIONS and OPTIONS[name].kind is str:
            continue
        source = around(name) | {name: text}
        found = migrations(source)
        assert carried(found) == carried(migrations(around(name))), name
        assert name in "\n".join([*found.notes, *found.refused])
        known = FOREIGN_NAMES.get(name)
        asks_nothing = known is not None and known.translate(text, source) == {}
        has_no_effect = asks_nothing or (known is not None and known.is_tuning)
        assert bool(found.refused) != has_no_effect, (name, found.refused)


@PLACES
def test_an_unknown_name_is_refused(place: Any, migrations: Migrations) -> None:
    known = carried(migrations(AROUND))
    for name in (f"{each}_x" for each in NAMES):
        found = migrations(AROUND | {name: 5})
        assert carried(found) == known, name
        said = "\n".join(found.refused)
        if place is as_variables and is_not_ours(f"LMCACHE_{name.upper()}", "5"):
            said = "\n".join(found.notes)  # of a service; an engine in the same pod may see it
        assert name in said or name.upper() in said


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_any_bytes_are_an_answer_or_one_sentence(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    with contextlib.suppress(UsageError):
        migration_of(file)
