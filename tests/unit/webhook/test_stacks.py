"""Pods of other stacks: which run vLLM, and how LMCache's connector is replaced in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.injection.sidecar import offloading_config, transfer_config

from tests.fixtures import reviews
from tests.fixtures.pods import CONNECTOR_IN_A_SCRIPT, Pod, container, pod
from tests.fixtures.reviews import STATUS, declined

STACKS = Path(__file__).parents[2] / "fixtures" / "stacks"
REPLACE = {"lmcache.io/replace-connector": "true"}
V1 = '{"kv_connector": "LMCacheConnectorV1"}'
SECRET = {"secretKeyRef": {"name": "redis", "key": "url"}}


def stack(name: str, **annotations: str) -> Pod:
    document: Pod = yaml.safe_load((STACKS / f"{name}.yaml").read_text())
    named = {f"lmcache.io/{key.replace('_', '-')}": text for key, text in annotations.items()}
    document["metadata"].setdefault("annotations", {}).update(named)
    return document


def injected(options: InjectionOptions, document: Pod) -> tuple[Pod, str]:
    """The engine's container and the status, of a pod that Kubernetes takes."""
    changed = reviews.injected(options, document)
    kubernetes_validate.validate(changed, "1.33", strict=True)
    return changed["spec"]["containers"][0], changed["metadata"]["annotations"][STATUS]


def config_of(engine: Pod) -> Any:
    assert engine["args"][-2] == "--kv-transfer-config"
    return json.loads(engine["args"][-1])


@pytest.mark.parametrize("name", ["kserve-huggingface", "kserve-llm-serve", "dynamo"])
def test_servers_that_wrap_vllm_get_the_argument(name: str, options: InjectionOptions) -> None:
    engine, _ = injected(options, stack(name))
    assert config_of(engine) == transfer_config()
    assert engine["args"][:-2] == stack(name)["spec"]["containers"][0]["args"]


def test_a_script_that_reads_a_variable_gets_the_connector_in_it(options: InjectionOptions) -> None:
    engine, status = injected(options, stack("kserve-llm"))
    before = stack("kserve-llm")["spec"]["containers"][0]
    assert engine["command"] == before["command"]
    assert "args" not in engine
    values = {one["name"]: one.get("value") for one in engine["env"]}
    assert values["VLLM_ADDITIONAL_ARGS"] == f"--max-model-len 8192 {CONNECTOR_IN_A_SCRIPT}"
    assert "its script gets the connector in the variable VLLM_ADDITIONAL_ARGS" in status

    bare = stack("kserve-llm")
    del bare["spec"]["containers"][0]["env"]
    engine, _ = injected(options, bare)
    assert {"name": "VLLM_ADDITIONAL_ARGS", "value": CONNECTOR_IN_A_SCRIPT} in engine["env"]

    other = stack("kserve-llm")
    command = other["spec"]["containers"][0]["command"]
    command[2] = command[2].replace("VLLM_ADDITIONAL_ARGS", "OTHERS")
    assert "starts its engine in a shell script" in declined(options, other)


def test_a_script_may_look_for_the_option_without_giving_it(options: InjectionOptions) -> None:
    """KServe's script offloads KV itself only where a user asks for that."""
    document = stack("kserve-llm")
    command = document["spec"]["containers"][0]["command"]
    assert command[2].count("--kv-transfer-config") == 3, "in a comment and in two patterns"
    injected(options, document)
    given = """KV_TRANSFER_ARGS="--kv-transfer-config '{}'\""""
    command[2] = command[2].replace('  KV_TRANSFER_ARGS=""', f"  {given}")
    assert "is given --kv-transfer-config already" in declined(options, document)


@pytest.mark.parametrize(
    ("script", "is_read"),
    [
        ('vllm serve m "$VLLM_ADDITIONAL_ARGS"', True),
        ("# $VLLM_ADDITIONAL_ARGS was here\nvllm serve m", False),
        ("vllm serve m $VLLM_ADDITIONAL_ARGS_2", False),
        ("vllm serve m ${VLLM_ADDITIONAL_ARGS:---port 1}", False),
        ("export VLLM_ADDITIONAL_ARGS=-x\nvllm serve m $VLLM_ADDITIONAL_ARGS", False),
        ('VLLM_ADDITIONAL_ARGS+=" -x"; vllm serve m $VLLM_ADDITIONAL_ARGS', False),
    ],
)
def test_a_script_must_pass_the_variable_on(
    script: str, is_read: bool, options: InjectionOptions
) -> None:
    """Elsewhere the connector would not arrive, or hide the script's own arguments."""
    document = pod(container(command=["sh", "-c", script]))
    if is_read:
        assert "in the variable VLLM_ADDITIONAL_ARGS" in injected(options, document)[1]
    else:
        assert "starts its engine in a shell script" in declined(options, document)


def test_a_variable_that_envfrom_may_bring_is_not_hidden(options: InjectionOptions) -> None:
    document = stack("kserve-llm")
    [engine] = document["spec"]["containers"]
    engine["envFrom"] = [{"configMapRef": {"name": "arguments"}}]
    assert "--max-model-len 8192 --kv" in str(injected(options, document)[0]["env"])
    del engine["env"]
    assert "envFrom may bring VLLM_ADDITIONAL_ARGS" in declined(options, document)


def test_a_connector_after_a_script_is_replaced_by_plain_words(options: InjectionOptions) -> None:
    """vLLM reads `--kv-transfer-config.kv_connector_extra_config.chunk_size=512` as a member."""
    for extra, is_plain in (({"lmcache.chunk_size": 512}, True), ({"lmcache.salt": "a b"}, False)):
        config = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
        document = stack("kserve-llm", replace_connector="true")
        document["spec"]["containers"][0]["args"] = ["--kv-transfer-config", json.dumps(config)]
        if not is_plain:
            assert "cannot go through a script" in declined(options, document)
            continue
        engine, _ = injected(options, document)
        [words] = [one["value"] for one in engine["env"] if one["name"] == "VLLM_ADDITIONAL_ARGS"]
        option = "--kv-transfer-config.kv_connector_extra_config.chunk_size=512"
        *others, socket = CONNECTOR_IN_A_SCRIPT.split()
        assert words.split() == ["--max-model-len", "8192", *others, option, socket]
        assert engine["args"] == []


def test_status_for_ray_names_its_configuration(options: InjectionOptions) -> None:
    wanted = f"put into engine_kwargs kv_transfer_config: {json.dumps(transfer_config())}"
    reason = declined(options, stack("kuberay"))
    assert "the container ray-worker runs Ray" in reason
    assert "name it in lmcache.io/container" in reason
    assert reason.endswith(wanted)
    engine, status = injected(options, stack("kuberay", container="ray-worker"))
    assert engine["args"] == stack("kuberay")["spec"]["containers"][0]["args"]
    assert {"name": "PYTHONPATH", "value": "/opt/lmcache/python"} in engine["env"]
    assert status.endswith(wanted)


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("kserve-huggingface", ["--backend=huggingface"], "leave out --backend=huggingface"),
        ("dynamo", ["--connector", "nixl"], "is given --connector, by which Dynamo"),
        ("dynamo", ["--disaggregation-mode=decode"], "is a prefill or decode worker of Dynamo"),
    ],
)
def test_wrappers_that_would_not_use_the_connector(
    name: str, words: list[str], text: str, options: InjectionOptions
) -> None:
    document = stack(name)
    document["spec"]["containers"][0]["args"] += words
    assert text in declined(options, document)


@pytest.mark.parametrize(
    ("value", "is_declined"),
    [
        ({"value": "kvbm nixl"}, True),
        ({"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}, True),
        ({"value": "none"}, False),
    ],
)
def test_dynamos_variable_is_its_option(
    value: dict[str, Any], is_declined: bool, options: InjectionOptions
) -> None:
    document = stack("dynamo")
    document["spec"]["containers"][0]["env"].append({"name": "DYN_CONNECTOR", **value})
    if is_declined:
        assert "is given DYN_CONNECTOR, by which Dynamo" in declined(options, document)
    else:
        injected(options, document)


def test_production_stacks_connector_is_replaced_on_request(options: InjectionOptions) -> None:
    reason = declined(options, stack("production-stack"))
    assert (
        "remove that to have it set here, or set lmcache.io/replace-connector:"
        ' "true" to have LMCacheConnectorV1 replaced' in reason
    )
    engine, status = injected(options, stack("production-stack", replace_connector="true"))
    before = stack("production-stack")["spec"]["containers"][0]
    assert engine["command"] == before["command"][:-2]
    assert config_of(engine) == transfer_config()
    assert [one["name"] for one in engine["env"] if one["name"].startswith("LMCACHE_")] == [
        "LMCACHE_USE_EXPERIMENTAL",
        "LMCACHE_LOG_LEVEL",
        "LMCACHE_LMCACHE_INSTANCE_ID",
    ], "options that the connector refuses with a sidecar are removed"
    assert status == (
        "injected: the container vllm shares 20 GiB of memory with its sidecar, tenant a; replaced"
        " LMCacheConnectorV1, not carried over: LMCACHE_LOCAL_CPU, LMCACHE_REMOTE_URL,"
        " LMCACHE_REMOTE_SERDE"
    )


def test_the_multiprocess_connector_is_replaced_too(options: InjectionOptions) -> None:
    engine, status = injected(options, stack("lmcache-mp", replace_connector="true"))
    assert engine["args"][:-2] == ["meta-llama/Llama-3.1-8B-Instruct", "--port", "8000"]
    assert config_of(engine) == transfer_config({"chunk_size": 512, "tier_timeout_s": 10})
    assert "shares 4 GiB" in status
    assert "replaced LMCacheMPConnector" in status
    assert status.endswith("not carried over: lmcache.mp.host, lmcache.mp.port")


def test_offloading_tier_instead_of_the_connector(options: InjectionOptions) -> None:
    """What LMCache's options set in a connector has no counterpart there."""
    chosen = {"connector": "offloading-tier", "host_memory_gb": "16"}
    for name in ("kserve-huggingface", "dynamo"):
        assert config_of(injected(options, stack(name, **chosen))[0]) == offloading_config(16)
    engine, status = injected(options, stack("lmcache-mp", replace_connector="true", **chosen))
    assert config_of(engine) == offloading_config(16)
    assert status.endswith("lmcache.mp.host, lmcache.mp.port, chunk_size, tier_timeout_s")
    _, status = injected(options, stack("kuberay", container="ray-worker", **chosen))
    assert status.endswith(f"kv_transfer_config: {json.dumps(offloading_config(16))}")
    assert json.dumps(offloading_config(16)) in declined(options, stack("kuberay", **chosen))
    reason = declined(options, stack("kserve-llm", **chosen))
    assert "through a script, which offloading-tier cannot go through: set lmcache.io/con" in reason


def replaceable(extra: dict[str, Any], *variables: dict[str, Any], **annotations: str) -> Pod:
    config = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra})
    named = {f"lmcache.io/{name.replace('_', '-')}": text for name, text in annotations.items()}
    one = container(
        command=["vllm", "serve", "m", "--kv_transfer_config"],
        args=[config, "--port", "8000"],
        env=list(variables),
    )
    return pod(one, annotations=REPLACE | named)


def variable(name: str, value: str) -> dict[str, Any]:
    return {"name": f"LMCACHE_{name}", "value": value}


def sizes_of(options: InjectionOptions, document: Pod) -> tuple[str, str | None]:
    sidecar = reviews.injected(options, document)["spec"]["initContainers"][-1]
    values = {one["name"]: one.get("value") for one in sidecar["env"]}
    return values["LMCACHE_SIDECAR_ARENA_GB"], values.get("LMCACHE_SIDECAR_DISK_GB")


def test_sizes_become_the_sidecars(options: InjectionOptions) -> None:
    disk = {"lmcache.local_disk": "/data/kv/", "lmcache.max_local_disk_size": 50}
    cpu = variable("MAX_LOCAL_CPU_SIZE", "20")
    assert sizes_of(options, replaceable(disk, cpu)) == ("20", "50")
    assert sizes_of(options, replaceable({"lmcache.max_local_cpu_size": 8}, cpu)) == ("8", None), (
        "the command line wins"
    )
    assert sizes_of(options, replaceable(disk, cpu, arena_gb="2", disk_gb="0")) == ("2", None), (
        "an annotation wins"
    )
    assert sizes_of(options, replaceable({"lmcache.max_local_cpu_size": 0.001})) == ("0.0625", None)
    old = [variable("LOCAL_DEVICE", "file:///kv/"), variable("MAX_LOCAL_CACHE_SIZE", "30")]
    assert sizes_of(options, replaceable({}, *old)) == ("4", "30")
    assert injected(options, replaceable({}, *old))[1].endswith("over: LMCACHE_LOCAL_DEVICE")
    assert "set lmcache.io/arena-gb to less" in declined(
        options, replaceable({"lmcache.max_local_cpu_size": 100})
    )


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("MAX_LOCAL_CPU_SIZE", []),
        ("MAX_LOCAL_DISK_SIZE", [variable("LOCAL_DISK", "/data/")]),
        ("LOCAL_DEVICE", [variable("MAX_LOCAL_CACHE_SIZE", "30")]),
    ],
)
def test_a_size_that_the_webhook_cannot_see_keeps_lmcache(
    name: str, others: list[Any], options: InjectionOptions
) -> None:
    source = {"configMapKeyRef": {"name": "sizes", "key": "size"}}
    unseen = {"name": f"LMCACHE_{name}", "valueFrom": source}
    reason = declined(options, replaceable({}, *others, unseen))
    assert f"the sidecar's size depends on LMCACHE_{name}" in reason
    assert "write it as a value" in reason
    given = replaceable({f"lmcache.{name.lower()}": "cpu" if "DEV" in name else 9}, *others, unseen)
    injected(options, given)


@pytest.mark.parametrize(
    ("extra", "variables", "dropped"),
    [
        ({"lmcache.sidecar_socket": "/elsewhere"}, [], "lmcache.sidecar_socket"),
        # The chart of production-stack passes these for prefill and decode.
        (
            {"discard_partial_chunks": False, "lmcache_rpc_port": "producer1"},
            [],
            "discard_partial_chunks, lmcache_rpc_port",
        ),
        # A Secret may hold the address of LMCache's server.
        ({}, [{"name": "LMCACHE_REMOTE_URL", "valueFrom": SECRET}], "LMCACHE_REMOTE_URL"),
    ],
)
def test_options_that_do_not_apply_are_dropped_and_named(
    extra: dict[str, Any], variables: list[Any], dropped: str, options: InjectionOptions
) -> None:
    engine, status = injected(options, replaceable(extra, *variables))
    assert config_of(engine) == transfer_config()
    assert [one["name"] for one in engine["env"]] == ["PYTHONPATH"]
    assert status.endswith(f"not carried over: {dropped}")


def test_members_of_the_configuration_are_kept_or_named(options: InjectionOptions) -> None:
    config = json.loads(V1) | {
        "kv_role": "kv_producer",
        "engine_id": "e1",
        "kv_port": 14580,
        "kv_rank": None,
        "kv_load_failure_policy": "fail",
        "later": ["x"],
    }
    document = pod(
        container(args=["--kv-transfer-config", json.dumps(config)]), annotations=REPLACE
    )
    engine, status = injected(options, document)
    kept = {"kv_role": "kv_producer", "engine_id": "e1", "kv_port": 14580}
    assert config_of(engine) == transfer_config() | kept
    assert status.endswith("not carried over: kv_load_failure_policy, later")


def test_variables_that_the_webhook_cannot_see_keep_lmcache(options: InjectionOptions) -> None:
    """They may name LMCache's server or file, with which our connector does not start."""
    document = replaceable({})
    [engine] = document["spec"]["containers"]
    engine["envFrom"] = [{"configMapRef": {"name": "lmcache"}}]
    assert "list in env what the container needs of them" in declined(options, document)
    engine["envFrom"] = []
    assert "replaced LMCacheConnectorV1" in injected(options, document)[1]


@pytest.mark.parametrize(
    ("extra", "variables", "text"),
    [
        ({"lmcache.use_layerwise": True}, [], "KV moves by chunk, not by layer"),
        ({"lmcache.no_such_option": 1}, [], "unknown option 'no_such_option'"),
        ({"lmcache.max_local_cpu_size": "20GB"}, [], "max_local_cpu_size='20GB': must be"),
        ({}, [variable("ENABLE_CONTROLLER", "True")], "use the lookup service and the broker"),
        ({}, [variable("CONFIG_FILE", "/etc/lmcache.yaml")], "cannot see the file that"),
        ({f"lmcache.o{i}": 1 for i in range(129)}, [], "a mapping of at most 128 options"),
        ({"lmcache.extra_config": "x" * 20_000}, [], "at most 16384 characters"),
    ],
)
def test_options_that_have_no_counterpart_decline_with_the_fix(
    extra: dict[str, Any], variables: list[Any], text: str, options: InjectionOptions
) -> None:
    assert text in declined(options, replaceable(extra, *variables))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (V1.replace("}", ', "kv_connector_extra_config": 1}'), "must be a mapping"),
        (V1.replace("V1", "V7"), "remove that to have it set here"),
        ("[" * 1000, "remove that to have it set here"),
    ],
)
def test_connectors_that_are_not_replaced(
    config: str, text: str, options: InjectionOptions
) -> None:
    for words in (["--kv-transfer-config", config], [f"--kv-transfer-config={config}"]):
        document = pod(container(args=words), annotations=REPLACE)
        assert text in declined(options, document)
    in_a_script = ["sh", "-c", f"vllm serve m --kv-transfer-config '{V1}'"]
    document = pod(container(command=in_a_script), annotations=REPLACE)
    assert declined(options, document).endswith("remove that to have it set here")


def test_the_annotation_alone_changes_nothing(options: InjectionOptions) -> None:
    engine, status = injected(options, pod(container(args=["m"]), annotations=REPLACE))
    assert config_of(engine) == transfer_config()
    assert "replaced" not in status
    wrong = {"lmcache.io/replace-connector": "yes"}
    assert "replace-connector='yes': write true or false" in declined(
        options, pod(container(args=["m"]), annotations=wrong)
    )


def test_an_allocator_with_which_vllm_refuses_connectors(options: InjectionOptions) -> None:
    for conf, is_refused in (
        ("max_split_size_mb:64,expandable_segments:True", True),
        ("expandable_segments:False", False),
    ):
        allocator = {"name": "PYTORCH_CUDA_ALLOC_CONF", "value": conf}
        document = pod(container(args=["m"], env=[allocator]))
        if is_refused:
            assert "leave expandable_segments:True out" in declined(options, document)
        else:
            injected(options, document)
