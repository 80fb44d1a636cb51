"""The injection webhook in the chart: what the API server is told, who may do what, and what
pods would get from these settings.
"""

from __future__ import annotations

import base64
import datetime
import importlib.util
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from lmcache_servicekit.settings import load_settings
from lmcache_sidecar.settings import SidecarSettings
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.pod import amount_of
from lmcache_webhook.reviews import REVIEW_TIMEOUT_S
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures import pods
from tests.fixtures.pods import plain
from tests.fixtures.reviews import injected
from tests.helm.conftest import MODEL, MODELS, MUTUAL, TLS, both_helms, option_of, parsed
from tests.helm.test_operations_release_test import container_of
from tests.helm.test_secrets import install, kubeconfig, run_against

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

__all__ = ["kubeconfig"]
CASES = ["webhook", "webhook-cert-manager"]
ON = {"webhook.enabled": True}
SECRET = "cache-lmcache-webhook-tls"
NAMES = [f"cache-lmcache-webhook.inference.svc{domain}" for domain in ("", ".cluster.local")]


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """With a certificate that Helm generates."""
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
    pod = injected(injection_options(settings_of(rendering, folder)), document, namespace)
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


def names_of(manifests: list[Manifest]) -> set[str]:
    return {one["metadata"]["name"] for one in manifests}


def secrets_of(rendering: Rendering) -> set[str | None]:
    """The Secrets that the webhook's pods mount."""
    volumes = rendering.pod("webhook")["volumes"]
    return {volume.get("secret", {}).get("secretName") for volume in volumes}


def certificate_of(manifests: list[Manifest]) -> dict[str, str]:
    """The generated Secret's data, in base64; its authority is what the API server trusts."""
    [secret] = (one for one in manifests if one["metadata"]["name"] == SECRET)
    assert (secret["kind"], secret["type"]) == ("Secret", "kubernetes.io/tls")
    [found] = (one for one in manifests if one["kind"] == "MutatingWebhookConfiguration")
    bundles = [one["clientConfig"]["caBundle"] for one in found["webhooks"]]
    assert bundles == [secret["data"]["ca.crt"]] * 2
    data: dict[str, str] = secret["data"]
    return data


def shakes_hands(data: dict[str, str], folder: Path, name: str) -> bool:
    """Whether a caller that trusts a Secret's authority takes its certificate for that name."""
    for file, value in data.items():
        (folder / file).write_bytes(base64.b64decode(value))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    client = trusting.wrap_bio(to_client, to_server, server_hostname=name)
    for side in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            side.do_handshake()
    try:
        client.do_handshake()
    except ssl.SSLCertVerificationError:
        return False
    server.do_handshake()
    return True


@both_helms
def test_a_generated_certificate_is_the_services(chart: Chart, helm: str, tmp_path: Path) -> None:
    rendering = chart.case("webhook", helm)
    assert SECRET in secrets_of(rendering)
    data = certificate_of(rendering.manifests)
    assert set(data) == {"ca.crt", "tls.crt", "tls.key"}, "the authority's key is not kept"
    for name in NAMES:
        assert shakes_hands(data, tmp_path, name)
    assert not shakes_hands(data, tmp_path, "cache-lmcache-webhook.other.svc")
    ends = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"])).not_valid_after_utc
    days = (ends - datetime.datetime.now(datetime.UTC)).days
    assert 3648 <= days <= 3650


def test_a_generated_certificate_goes_with_the_release(rendering: Rendering) -> None:
    """An uninstallation removes what is neither a hook nor kept by a policy."""
    [secret] = (one for one in rendering.of_kind("Secret") if one["metadata"]["name"] == SECRET)
    assert "annotations" not in secret["metadata"]


@both_helms
def test_an_upgrade_keeps_a_whole_certificate(chart: Chart, kubeconfig: Path, helm: str) -> None:
    def rendered() -> list[Manifest]:
        answer = run_against(chart, kubeconfig, helm, "--set", "webhook.enabled=true")
        assert answer.returncode == 0, answer.stderr
        return parsed(answer.stdout)

    manifests = rendered()
    first = certificate_of(manifests)
    assert certificate_of(rendered()) != first, "with nothing to keep, it is new"
    [secret] = (one for one in manifests if one["metadata"]["name"] == SECRET)
    install({SECRET: secret})
    assert certificate_of(rendered()) == first
    install({SECRET: secret | {"data": {name: first[name] for name in ("tls.crt", "tls.key")}}})
    other = certificate_of(rendered())
    assert not set(other.values()) & set(first.values()), "no part of another certificate"


def test_cert_manager_does_it_instead(chart: Chart) -> None:
    rendering = chart.case("webhook-cert-manager")
    assert SECRET not in names_of(rendering.of_kind("Secret"))
    [certificate] = rendering.of_kind("Certificate")
    assert configuration(rendering)["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": f"inference/{certificate['metadata']['name']}"
    }
    assert certificate["spec"]["dnsNames"] == NAMES
    [issuer] = rendering.of_kind("Issuer")
    assert certificate["spec"]["issuerRef"]["name"] == issuer["metadata"]["name"]
    assert certificate["spec"]["secretName"] in secrets_of(rendering)
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
    assert "mine" in secrets_of(rendering)
    assert not rendering.of_kind("Certificate")
    assert SECRET not in names_of(rendering.of_kind("Secret"))


def check_of(rendering: Rendering) -> Manifest:
    return rendering.get("Pod", "webhook-check")


def test_helm_waits_until_the_webhook_answers_through_its_service(rendering: Rendering) -> None:
    """As it answers the API server: at that name, trusted by that authority. It is given less time
    than Helm takes by default (5 minutes), so that Helm shows which pod has failed.
    """
    pod = check_of(rendering)
    assert pod["metadata"]["annotations"] == {
        "helm.sh/hook": "post-install,post-upgrade",
        "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
    }
    assert pod["spec"]["activeDeadlineSeconds"] < 300
    container = container_of(pod)
    assert container["image"] == rendering.container("webhook")["image"]
    module = container["command"][-1]
    assert importlib.util.find_spec(module), "it is in the webhook's image"
    [one, other] = configuration(rendering)["webhooks"]
    service = one["clientConfig"]["service"]
    host = f"{service['name']}.inference.svc"
    assert container["args"] == [host, "inference", "$(AUTHORITY)"]
    assert (host in NAMES, service["port"]) == (True, 443)
    assert one["clientConfig"] == other["clientConfig"]
    [authority] = container["env"]
    assert authority["name"] == "AUTHORITY"
    source = authority["valueFrom"]["secretKeyRef"]
    [secret] = (one for one in rendering.of_kind("Secret") if one["metadata"]["name"] == SECRET)
    assert source == {"name": SECRET, "key": "ca.crt"}
    assert secret["data"]["ca.crt"] == one["clientConfig"]["caBundle"]


def test_the_check_trusts_whom_the_api_server_trusts(chart: Chart) -> None:
    [authority] = check_of(chart.case("webhook-cert-manager"))["spec"]["containers"][0]["env"]
    [certificate] = chart.case("webhook-cert-manager").of_kind("Certificate")
    assert authority["valueFrom"]["secretKeyRef"] == {
        "name": certificate["spec"]["secretName"],
        "key": "ca.crt",
    }
    mine = {"webhook.certificate.existingSecret": "mine", "webhook.certificate.caBundle": "QUJD"}
    [authority] = check_of(chart.render(ON | mine))["spec"]["containers"][0]["env"]
    assert authority["value"] == "ABC"


def test_the_check_may_be_left_out(chart: Chart) -> None:
    without = chart.render(ON | {"webhook.startupCheck.enabled": False})
    assert not [one for one in without.manifests if "webhook-check" in one["metadata"]["name"]]


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


def test_injected_vllm_publishes_as_that_of_models_does(chart: Chart, tmp_path: Path) -> None:
    events = {"enabled": True, "port": 6000, "replayPort": 6001}
    rendering = chart.render(ON | MODELS | {"kvEvents": events})
    [engine] = sidecar_of(rendering, tmp_path, "inference")[0]["spec"]["containers"]
    own = rendering.pod("vllm-tiny")["containers"][0]
    told, theirs = (option_of(one, "--kv-events-config") for one in (engine, own))
    assert told == {name: value for name, value in theirs.items() if name != "topic"}
    assert {one["containerPort"] for one in engine["ports"]} == {6000, 6001}


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
    _, _, theirs = sidecar_of(rendering, tmp_path, "inference", document)
    for found in (rendering.container("sidecar"), theirs):
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
    own = rendering.pod("vllm-tiny")
    one, other = (
        option_of(spec["containers"][0], "--kv-transfer-config") for spec in (pod["spec"], own)
    )
    assert one == other
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
        labels = {"matchLabels": {"lmcache.io/injected": "true"}}
        assert rule["from"] == [{"namespaceSelector": {}, "podSelector": labels}]
        assert rule["ports"] == [{"port": port, "protocol": "TCP"}]
        assert spec["podSelector"] == found[component]["podSelector"]
        assert ("Egress" in spec["policyTypes"]) == (component == "vllm"), (
            "pulls go both ways between sidecars"
        )
    assert found["webhook"]["egress"] == []
    [served] = found["webhook"]["ingress"]
    assert served == {"ports": [{"port": 8443, "protocol": "TCP"}]}
