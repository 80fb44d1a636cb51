"""The injection webhook in the chart: what the API server is told, who may do what, and what
pods would get from these settings.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import jsonpatch
import pytest
from lmcache_servicekit.settings import load_settings
from lmcache_sidecar.settings import SidecarSettings
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.injection.pod import amount_of
from lmcache_webhook.reviews import REVIEW_TIMEOUT_S
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures import pods
from tests.fixtures.pods import plain
from tests.helm.conftest import MODEL, MODELS, MUTUAL, TLS, both_helms, parsed
from tests.helm.test_secrets import FakeCluster, kubeconfig, run_against

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

__all__ = ["kubeconfig"]
CASES = ["webhook", "webhook-cert-manager"]
ON = {"webhook.enabled": True}
JOBS = ("Job", "CronJob")


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """With a certificate that the chart's own jobs make."""
    return chart.case("webhook")


def configuration(rendering: Rendering) -> Manifest:
    [found] = rendering.of_kind("MutatingWebhookConfiguration")
    return found


def settings_of(rendering: Rendering, folder: Path) -> WebhookSettings:
    """The webhook's own model reads what the pod would see; its paths are moved to `folder`."""
    data = rendering.get("ConfigMap", "webhook")["data"]
    (folder / "template.yaml").write_text(data["template.yaml"])
    config = folder / "config.yaml"
    config.write_text(data["config.yaml"].replace("/etc/lmcache/", f"{folder}/"))
    return load_settings(WebhookSettings, config, {})


def sidecar_of(
    rendering: Rendering, folder: Path, namespace: str, document: Manifest | None = None
) -> tuple[Manifest, SidecarSettings, Manifest]:
    """What a pod of that namespace gets: the pod, and what its sidecar makes of its variables;
    and the container.
    """
    document = document or plain()
    outcome = review_pod(injection_options(settings_of(rendering, folder)), document, namespace)
    assert outcome.verdict == "injected", outcome.reason
    pod: Manifest = jsonpatch.apply_patch(document, outcome.operations)
    container = pod["spec"]["initContainers"][-1]
    fields = {"POD_NAME": "p", "POD_NAMESPACE": namespace, "POD_UID": "u", "POD_IP": "10.1.2.3"}
    given = {
        one["name"]: one.get("value", fields.get(one["name"], "n")) for one in container["env"]
    }
    environ = {
        name: re.sub(r"\$\((\w+)\)", lambda match: fields[match[1]], value)
        for name, value in given.items()
    }
    return pod, load_settings(SidecarSettings, None, environ), container


def credentials_of(pod: Manifest) -> list[Manifest]:
    (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "lmcache-credentials")
    sources: list[Manifest] = volume["projected"]["sources"]
    return sources


def test_it_is_off_unless_asked_for(chart: Chart) -> None:
    assert not [one for one in chart.render().manifests if "webhook" in one["metadata"]["name"]]


def test_the_api_server_waits_for_longer_than_a_review_takes(chart: Chart) -> None:
    too_short = int(REVIEW_TIMEOUT_S)
    assert "webhook" in chart.refuse({"webhook.timeoutSeconds": too_short})
    chart.render({"webhook.timeoutSeconds": too_short + 1})


@pytest.mark.parametrize("case", CASES)
def test_the_api_server_never_waits_for_it_in_vain(chart: Chart, case: str) -> None:
    for webhook in configuration(chart.case(case))["webhooks"]:
        assert webhook["failurePolicy"] == "Ignore"
        assert webhook["timeoutSeconds"] <= 5
        assert webhook["sideEffects"] == "None"
        assert webhook["reinvocationPolicy"] == "IfNeeded"
        assert webhook["admissionReviewVersions"] == ["v1"]
        [rule] = webhook["rules"]
        assert (rule["resources"], rule["operations"]) == (["pods"], ["CREATE"])
        [spared] = webhook["namespaceSelector"]["matchExpressions"]
        assert "kube-system" in spared["values"]


def test_namespaces_can_be_chosen(chart: Chart) -> None:
    chosen = {"webhook.namespaceLabels": {"team": "ml"}, "webhook.excludedNamespaces": ["batch"]}
    for webhook in configuration(chart.render(ON | chosen))["webhooks"]:
        selector = webhook["namespaceSelector"]
        assert selector["matchLabels"] == {"team": "ml"}
        assert selector["matchExpressions"][0]["values"] == ["batch", "kube-system"]


def test_only_pods_that_ask_are_sent(rendering: Rendering) -> None:
    by_label, by_annotation = configuration(rendering)["webhooks"]
    assert by_label["objectSelector"] == {
        "matchExpressions": [{"key": "lmcache.io/inject", "operator": "In", "values": ["true"]}]
    }
    assert "matchConditions" not in by_label
    assert by_annotation["objectSelector"]["matchExpressions"][0]["operator"] == "NotIn", (
        "never twice"
    )
    [condition] = by_annotation["matchConditions"]
    assert condition["expression"].endswith(
        "object.metadata.annotations['lmcache.io/inject'] == 'true'"
    )


def test_the_address_leads_to_the_container(rendering: Rendering, tmp_path: Path) -> None:
    service = rendering.get("Service", "webhook")
    [port] = service["spec"]["ports"]
    pod = rendering.get("Deployment", "webhook")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    settings = settings_of(rendering, tmp_path)
    assert ports == {"https": settings.port, "health": settings.health_port}
    assert port["targetPort"] == "https"
    for webhook in configuration(rendering)["webhooks"]:
        called = webhook["clientConfig"]["service"]
        assert (called["name"], called["namespace"]) == (service["metadata"]["name"], "inference")
        assert (called["path"], called["port"]) == ("/mutate", port["port"])
    assert {
        container[probe]["httpGet"]["port"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    } == {"health"}
    for path in (settings.tls_cert_file, settings.tls_key_file, Path("/etc/lmcache")):
        assert any(str(path).startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_two_replicas_that_are_not_away_together(rendering: Rendering) -> None:
    deployment = rendering.get("Deployment", "webhook")["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert rendering.get("PodDisruptionBudget", "webhook")["spec"]["maxUnavailable"] == 1
    [spread] = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"


def pods_of(rendering: Rendering) -> list[Manifest]:
    """Pod specifications of everything that is the webhook's."""
    jobs = [
        one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one["spec"]
        for one in rendering.of_kind(*JOBS)
    ]
    return [
        one["template"]["spec"] for one in [*jobs, rendering.get("Deployment", "webhook")["spec"]]
    ]


def test_every_pod_is_restricted_and_small(rendering: Rendering) -> None:
    pods = pods_of(rendering)
    assert len(pods) == 3
    for pod in pods:
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        [container] = pod["containers"]
        context = container["securityContext"]
        assert context["runAsUser"] == 10001
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
    assert [pod["automountServiceAccountToken"] for pod in pods] == [True, True, False], (
        "who serves asks the cluster nothing"
    )


def test_the_jobs_may_write_one_secret_and_one_configuration(rendering: Rendering) -> None:
    accounts = {one["metadata"]["name"] for one in rendering.of_kind("ServiceAccount")}
    users = {pod["serviceAccountName"] for pod in pods_of(rendering)}
    assert users <= accounts
    secret = rendering.pod("webhook")["volumes"][1]["secret"]["secretName"]
    for role in rendering.of_kind("Role"):
        if "webhook" not in role["metadata"]["name"]:
            continue
        named, create = role["rules"]
        assert (named["resourceNames"], named["verbs"]) == ([secret], ["get", "update"])
        assert (create["resources"], create["verbs"]) == (["secrets"], ["create"])
    roles = rendering.of_kind("ClusterRole")
    assert len(roles) == 2
    for role in roles:
        [rule] = role["rules"]
        assert rule["resourceNames"] == [configuration(rendering)["metadata"]["name"]]
        assert rule["verbs"] == ["get", "patch"]


def test_the_command_names_what_there_is(rendering: Rendering) -> None:
    for pod in pods_of(rendering)[:2]:
        command, *arguments = pod["containers"][0]["args"]
        named = dict(argument.removeprefix("--").split("=") for argument in arguments)
        assert command == "certificate"
        assert named["service"] == rendering.get("Service", "webhook")["metadata"]["name"]
        assert named["configuration"] == configuration(rendering)["metadata"]["name"]
        assert named["namespace"] == "inference"
        assert int(named["renew-days"]) < int(named["valid-days"])


def test_the_certificate_is_there_before_the_pods(rendering: Rendering) -> None:
    hooks = [
        one
        for one in rendering.manifests
        if "helm.sh/hook" in one["metadata"].get("annotations", {})
        and "webhook" in one["metadata"]["name"]
    ]
    kinds = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    assert {one["kind"] for one in hooks} == kinds | {"NetworkPolicy", "Job"}
    for one in hooks:
        annotations = one["metadata"]["annotations"]
        assert {"pre-install", "pre-upgrade", "post-install", "post-upgrade"} <= set(
            annotations["helm.sh/hook"].split(",")
        )
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        assert (int(annotations["helm.sh/hook-weight"]) == 0) == (one["kind"] == "Job"), (
            "the account is there before the job"
        )


def test_a_job_that_runs_first_names_nothing_that_comes_later(chart: Chart) -> None:
    """Helm creates the release's own objects after the hooks that precede an installation."""
    values = {"webhook.enabled": True, "priorityClass.create": True}
    manifests = chart.render(values).manifests
    hooks = {
        (one["kind"], one["metadata"]["name"]): one
        for one in manifests
        if "pre-install" in one["metadata"].get("annotations", {}).get("helm.sh/hook", "")
    }
    later = {one["metadata"]["name"] for one in manifests} - {name for _, name in hooks}
    assert "inference-cache-lmcache" in later, "the class of priority"
    [job] = (one for (kind, _), one in hooks.items() if kind == "Job")
    pod = job["spec"]["template"]["spec"]
    # The arguments name what the command makes and changes.
    container = {name: one for name, one in pod["containers"][0].items() if name != "args"}
    named = set(re.findall(r"[\w.-]+", str(pod | {"containers": [container]})))
    assert named & later == set()
    [job] = chart.render(values | {"webhook.priorityClassName": "own"}).of_kind("Job")
    assert job["spec"]["template"]["spec"]["priorityClassName"] == "own"


@both_helms
def test_an_upgrade_runs_one_job_where_the_certificate_is_there(
    chart: Chart, kubeconfig: Path, helm: str
) -> None:
    """Each costs the start of a pod, for which the upgrade waits."""

    def events() -> set[frozenset[str]]:
        answer = run_against(chart, kubeconfig, helm, "--set", "webhook.enabled=true")
        assert answer.returncode == 0, answer.stderr
        found = [one["metadata"].get("annotations", {}) for one in parsed(answer.stdout)]
        return {
            frozenset(one["helm.sh/hook"].split(","))
            for one in found
            if "install" in one.get("helm.sh/hook", "")
        }

    after = {"post-install", "post-upgrade", "post-rollback"}
    assert events() == {frozenset(after | {"pre-install", "pre-upgrade", "pre-rollback"})}
    name = "cache-lmcache-webhook-tls"
    FakeCluster.objects[f"secrets/{name}"] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
    }
    assert events() == {frozenset(after)}


def test_the_job_reaches_the_api_server_in_an_upgrade_that_enables_the_webhook(
    rendering: Rendering, chart: Chart
) -> None:
    """It runs before the release's new policies are made, and the default one, which is there
    already, is about its pod too.
    """
    [job] = rendering.of_kind("Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    denied = rendering.get("NetworkPolicy", "default-deny")["spec"]["podSelector"]["matchLabels"]
    assert denied.items() <= labels.items()
    policy = rendering.get("NetworkPolicy", "webhook-cert-hook")
    assert policy["metadata"]["annotations"] == job["metadata"]["annotations"] | {
        "helm.sh/hook-weight": "-10"
    }
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"] == rendering.get("NetworkPolicy", "webhook-cert")["spec"], (
        "the CronJob's pods have the same need"
    )
    assert {443, 6443} <= {
        port["port"]
        for rule in policy["spec"]["egress"]
        for port in rule["ports"]
        if "to" not in rule
    }
    assert chart.render(ON | {"networkPolicy.enabled": False}).of_kind("NetworkPolicy") == []


def test_cert_manager_does_it_instead(chart: Chart) -> None:
    rendering = chart.case("webhook-cert-manager")
    assert not rendering.of_kind(*JOBS, "ClusterRole")
    [certificate] = rendering.of_kind("Certificate")
    assert configuration(rendering)["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": f"inference/{certificate['metadata']['name']}"
    }
    service = rendering.get("Service", "webhook")["metadata"]["name"]
    assert f"{service}.inference.svc" in certificate["spec"]["dnsNames"]
    [issuer] = rendering.of_kind("Issuer")
    assert certificate["spec"]["issuerRef"]["name"] == issuer["metadata"]["name"]
    volumes = rendering.pod("webhook")["volumes"]
    assert certificate["spec"]["secretName"] in {
        volume.get("secret", {}).get("secretName") for volume in volumes
    }
    theirs = chart.render(
        ON
        | {
            "webhook.certificate.certManager": {
                "enabled": True,
                "issuerRef": {"name": "corp", "kind": "ClusterIssuer"},
            }
        }
    )
    assert not theirs.of_kind("Issuer")
    assert theirs.of_kind("Certificate")[0]["spec"]["issuerRef"]["kind"] == "ClusterIssuer"


def test_an_existing_certificate_is_trusted(chart: Chart) -> None:
    rendering = chart.render(
        ON | {"webhook.certificate.existingSecret": "mine", "webhook.certificate.caBundle": "QUJD"}
    )
    webhooks = configuration(rendering)["webhooks"]
    assert [one["clientConfig"]["caBundle"] for one in webhooks] == ["QUJD", "QUJD"]
    assert not rendering.of_kind(*JOBS, "Certificate")


def test_injected_sidecars_are_like_those_of_models(rendering: Rendering, tmp_path: Path) -> None:
    own = rendering.config("vllm-llama")
    pod, settings, container = sidecar_of(rendering, tmp_path, "inference")
    same = "remote_url lookup_url broker_url tenant eviction_policy drain_timeout_s arena_wait_s"
    same += " log_format auth_tokens_file service_token_file ticket_keys_file salt_file socket_path"
    for name in same.split():
        value = getattr(settings, name)
        assert (str(value) if isinstance(value, Path) else value) == own[name], name
    sidecar = rendering.pod("vllm-llama")["initContainers"][-1]
    assert container["image"] == sidecar["image"]
    assert container["lifecycle"] == sidecar["lifecycle"]
    assert container["resources"]["requests"]["cpu"] == sidecar["resources"]["requests"]["cpu"]
    assert settings.verify_hot == "always", "from the template"
    secrets = rendering.of_kind("Secret")
    sources = credentials_of(pod)
    for source in sources:
        [held] = [one for one in secrets if one["metadata"]["name"] == source["secret"]["name"]]
        assert {item["key"] for item in source["secret"]["items"]} <= set(held["data"])


@both_helms
@pytest.mark.parametrize(
    ("limits", "given", "cpu"),
    [
        ({}, {}, "500m"),
        ({"nvidia.com/gpu": 1}, {}, "750m"),
        ({"nvidia.com/gpu": "2"}, {"requests": {}}, "1500m"),
        ({"amd.com/gpu": 8}, {"limits": {"cpu": 8}}, "6"),
        ({"nvidia.com/gpu": 1, "amd.com/gpu": "1"}, {"limits": {"cpu": "1.5"}}, "1500m"),
        ({"nvidia.com/gpu": 8}, {"limits": {"cpu": "4"}}, "4"),
        ({"nvidia.com/gpu": 8}, {"limits": {"cpu": "5999m"}}, "5999m"),
        ({}, {"limits": {"cpu": 0.25}}, "250m"),
        ({"nvidia.com/gpu": 8}, {"requests": {"cpu": "100m"}}, "100m"),
        ({}, {"requests": {"cpu": 2}, "limits": {"cpu": 4}}, "2"),
    ],
)
def test_the_cpu_request_of_a_sidecar_follows_from_the_gpus_of_its_pod(
    chart: Chart, tmp_path: Path, limits: Manifest, given: Manifest, cpu: str, helm: str
) -> None:
    """By one rule for both kinds of sidecar; what the values say wins."""
    values = {"modelDefaults.resources.limits": limits, "sidecar.resources": given}
    rendering = chart.render(ON | MODELS | values, helm=helm)
    document = pods.pod(pods.container(args=["--model", "m"], resources={"limits": limits}))
    _, _, injected = sidecar_of(rendering, tmp_path, "inference", document)
    for found in (rendering.container("sidecar"), injected):
        assert amount_of(found["resources"]["requests"]["cpu"]) == amount_of(cpu)
        limit = given.get("limits", {}).get("cpu")
        assert amount_of(found["resources"]["limits"].get("cpu")) == amount_of(limit)


def test_a_model_may_give_its_sidecar_another_cpu_request(chart: Chart) -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    own = gpus | {"sidecar": {"resources": {"requests": {"cpu": "1"}}}}
    rendering = chart.render({"models": {"a": MODEL | gpus, "b": MODEL | own}})
    for name, cpu in (("a", "3"), ("b", "1")):
        [_, sidecar] = rendering.pod(f"vllm-{name}")["initContainers"]
        assert sidecar["resources"]["requests"]["cpu"] == cpu


def test_injected_pods_have_the_connector_of_models(chart: Chart, tmp_path: Path) -> None:
    values = {"modelDefaults.connector": {"kind": "offloading-tier", "hostMemory": "1536Mi"}}
    rendering = chart.render(ON | MODELS | values)
    pod, _, _ = sidecar_of(rendering, tmp_path, "inference")
    arguments = pod["spec"]["containers"][0]["args"]
    own = rendering.pod("vllm-tiny")
    options = own["containers"][0]["args"]
    assert json.loads(arguments[-1]) == json.loads(
        options[options.index("--kv-transfer-config") + 1]
    )
    [theirs, ours] = (
        next(one["emptyDir"]["sizeLimit"] for one in spec["volumes"] if one["name"] == name)
        for spec, name in ((pod["spec"], "lmcache-shm"), (own, "shm"))
    )
    assert amount_of(theirs) == amount_of(ours)


def test_other_namespaces_have_their_own_secrets(rendering: Rendering, tmp_path: Path) -> None:
    pod, settings, _ = sidecar_of(rendering, tmp_path, "team-a-test")
    assert settings.tenant == "team-a"
    sources = credentials_of(pod)
    assert [source["secret"]["name"] for source in sources] == ["lmcache-tokens", "lmcache-keys"]


@pytest.mark.parametrize("mutual", [False, True])
def test_injected_sidecars_encrypt_where_the_others_do(
    chart: Chart, mutual: bool, tmp_path: Path
) -> None:
    rendering = chart.render(ON | (MUTUAL if mutual else TLS))
    _, settings, container = sidecar_of(rendering, tmp_path, "inference")
    assert settings.lookup_url is not None
    assert settings.lookup_url.startswith("https://")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    names = ["tls_cert_file", "tls_key_file", "tls_ca_file"]
    if mutual:
        names += ["tls_client_ca_file", "tls_client_cert_file", "tls_client_key_file"]
    assert (settings.tls_client_ca_file is not None) == mutual
    assert all(str(getattr(settings, name)).startswith(tuple(mounts)) for name in names)
    assert settings.allow_plaintext is False


def test_the_broker_follows_injected_pods_of_its_namespace(
    rendering: Rendering, tmp_path: Path
) -> None:
    service = rendering.get("Service", "sidecars")
    for namespace, is_followed in (("inference", True), ("team-a-test", False)):
        pod, settings, container = sidecar_of(rendering, tmp_path, namespace)
        assert (
            service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ) == is_followed
        assert settings.instance_id == ("p" if is_followed else f"{namespace}.p")
        assert [one["port"] for one in service["spec"]["ports"]] == [
            one["containerPort"] for one in container["ports"] if one["name"] == "lmcache-lm"
        ]
    broker = rendering.config("broker")
    assert (broker["kubernetes_service"], broker["discovery_tenant"]) == (
        service["metadata"]["name"],
        settings_of(rendering, tmp_path).tenants[0].name,
    )


def test_without_discovery_no_pod_is_labelled_for_it(chart: Chart, tmp_path: Path) -> None:
    without = chart.render(ON | {"broker.discovery.enabled": False})
    pod, settings, _ = sidecar_of(without, tmp_path, "inference")
    assert "lmcache.io/sidecars" not in pod["metadata"]["labels"]
    assert settings.instance_id == "inference.p"


def test_without_tokens_injected_sidecars_show_none(chart: Chart, tmp_path: Path) -> None:
    _, settings, _ = sidecar_of(chart.render(ON | {"auth.enabled": False}), tmp_path, "inference")
    assert settings.service_token_file is None
    assert settings.allow_anonymous


def test_injected_pods_are_let_in_from_other_namespaces(rendering: Rendering) -> None:
    found = rendering.by_name("NetworkPolicy")
    ports = {"storage": 65432, "lookup": 8081, "broker": 8082, "vllm": 65433}
    for component, port in ports.items():
        spec = found[f"{component}-injected"]
        [rule] = spec["ingress"]
        injected = {"matchLabels": {"lmcache.io/injected": "true"}}
        assert rule["from"] == [{"namespaceSelector": {}, "podSelector": injected}]
        assert rule["ports"] == [{"port": port, "protocol": "TCP"}]
        assert spec["podSelector"] == found[component]["podSelector"]
        assert ("Egress" in spec["policyTypes"]) == (component == "vllm"), (
            "pulls go both ways between sidecars"
        )
    assert found["webhook"]["egress"] == []
    [served] = found["webhook"]["ingress"]
    assert served == {"ports": [{"port": 8443, "protocol": "TCP"}]}
