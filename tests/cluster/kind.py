"""A kind cluster with the chart, vLLM on CPUs and a tiny model: no registry, no GPU.

Standard library only: nothing needs to be installed but docker, kind, helm and kubectl.

Usage: python -m tests.cluster.kind up|down
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.ask import NUM_TOKENS, Answer
from tests.cluster.helm import find_helm
from tests.cluster.names import BASE, MODEL_PODS, MODEL_SERVICE, RELEASE, VALUES, ask_command
from tests.cluster.waiting import ANNOUNCED_S, START_TIMEOUT_S, ClusterError

ROOT = Path(__file__).resolve().parents[2]
CHART = "helm/lmcache"
NAME = "lmcache"
NAMESPACE = "lmcache"
CONTEXT = f"kind-{NAME}"
TAG, REGISTRY = "kind", "localhost"
"""As the values say. No node can pull from there: an image that was not loaded is an error."""
IMAGES = ("storage", "lookup", "broker", "sidecar", "webhook", "payload", "vllm-cpu-tiny")
SECURITY = "pod-security.kubernetes.io/enforce=restricted"
TOOLS = ("docker", "kind", "helm", "kubectl")
BUILD_TIMEOUT_S = 3600
LOAD_TIMEOUT_S = 1200
CALL_TIMEOUT_S = 180
NEXT = f"""
Next, the page that shows which pod holds what (http://localhost:8082/), and the end of it all:
  kubectl --context {CONTEXT} -n {NAMESPACE} port-forward service/{BASE}-broker 8082
  make kind-down
"""


class KindError(Exception):
    """Something is missing or failed; the message is one sentence."""


def run(*command: str, timeout_s: float = CALL_TIMEOUT_S, quiet: bool = False) -> str:
    """Run a command in the root of the repository.

    Args:
        command: Program and arguments.
        timeout_s: Limit on it.
        quiet: Return its output instead of showing it.

    Raises:
        KindError: It failed, or did not end in time.
    """
    environ = {
        **os.environ,
        "TAG": TAG,
        "REGISTRY": REGISTRY,
        # `kind load` cannot read images with attestations.
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
    }
    try:
        answer = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            capture_output=quiet,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise KindError(f"`{' '.join(command)}` was not done after {timeout_s:g} s") from exc
    if answer.returncode != 0:
        detail = f": {(answer.stderr or answer.stdout).strip()[-1000:]}" if quiet else ""
        raise KindError(f"`{' '.join(command[:6])}` failed ({answer.returncode}){detail}")
    return answer.stdout or ""


def kubectl(*words: str, timeout_s: float = CALL_TIMEOUT_S, quiet: bool = True) -> str:
    """Run kubectl in the cluster and the namespace."""
    where = ("--context", CONTEXT, "--namespace", NAMESPACE)
    return run("kubectl", *where, *words, timeout_s=timeout_s, quiet=quiet)


def check_tools() -> None:
    """Raise `KindError` unless all required tools are installed."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise KindError(f"not on PATH: {', '.join(missing)}: install and run it again")
    for command, why in (
        (("docker", "info"), "Docker does not answer: start it"),
        (("docker", "buildx", "version"), "Docker has no buildx: install the plugin"),
    ):
        try:
            run(*command, quiet=True)
        except KindError as exc:
            raise KindError(f"{why} ({exc})") from exc
    try:
        find_helm()
    except ClusterError as exc:
        raise KindError(str(exc)) from exc


def step(text: str) -> None:
    """Print the name of the next step."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def up() -> None:
    """Create the cluster, install the chart, show a hit. Run it again to deploy new images."""
    check_tools()
    step(f"[1/5] cluster {NAME}")
    is_new = NAME not in run("kind", "get", "clusters", quiet=True).split()
    if is_new:
        image = os.environ.get("NODE_IMAGE")
        node = ("--image", image) if image else ()
        run("kind", "create", "cluster", "--name", NAME, *node, "--wait", "180s", timeout_s=600)
    step("[2/5] images: the first build downloads PyTorch and vLLM")
    run("docker", "buildx", "bake", "--load", "cluster-test", timeout_s=BUILD_TIMEOUT_S)
    step("[3/5] images onto the node")
    names = [f"{REGISTRY}/lmcache-{image}:{TAG}" for image in IMAGES]
    run("kind", "load", "docker-image", "--name", NAME, *names, timeout_s=LOAD_TIMEOUT_S)
    step(f"[4/5] release {RELEASE} in namespace {NAMESPACE}")
    install(is_new)
    step("[5/5] a prompt, to one pod and then to another")
    show_hit()
    print(NEXT)


def install(is_new: bool) -> None:
    """Install or upgrade the release, with two pods of the model."""
    run("helm", "dependency", "build", CHART, quiet=True)
    if not kubectl("get", "namespace", NAMESPACE, "--ignore-not-found"):
        kubectl("create", "namespace", NAMESPACE)
    kubectl("label", "--overwrite", "namespace", NAMESPACE, SECURITY)
    release = ("upgrade", "--install", RELEASE, CHART, "--values", VALUES)
    where = ("--namespace", NAMESPACE, "--kube-context", CONTEXT)
    run("helm", *release, *where, "--timeout", "15m", timeout_s=START_TIMEOUT_S + 60, quiet=True)
    if not is_new:  # the tag is the same, so nothing else would start the new images
        for kind in ("statefulset", "deployment"):
            kubectl("rollout", "restart", kind)
    kubectl("scale", f"deployment/{MODEL_SERVICE}", "--replicas", "2")
    for name in kubectl("get", "statefulset,deployment", "-o", "name").split():
        limit = ("--timeout", f"{START_TIMEOUT_S}s")
        kubectl("rollout", "status", name, *limit, timeout_s=START_TIMEOUT_S + 60, quiet=False)


def show_hit() -> None:
    """Send one new prompt to both pods of the model; the second one finds the first one's KV."""
    pods = ready_pods()
    if len(pods) < 2:
        raise KindError(f"only these pods of the model are ready: {pods}")
    seed = random.randrange(1 << 30)
    answers = []
    for pod in pods:
        if answers:
            time.sleep(ANNOUNCED_S)
        ask(pod, seed + 1, 64)  # so that no first request is timed
        answers.append(ask(pod, seed, NUM_TOKENS))
    print(f"\n{'pod':<44}{'ms':>8}  tokens from the cache")
    for pod, answer in zip(pods, answers, strict=True):
        print(f"{pod:<44}{answer.took_ms:>8.0f}  {answer.num_cached} of {answer.num_prompt}")
    if not answers[1].num_cached:
        raise KindError("the second pod did not reuse the first one's KV: see the sidecars' logs")


def ready_pods() -> list[str]:
    """Return the model's pods that are ready and not terminating."""
    listed = json.loads(kubectl("get", "pods", "-l", MODEL_PODS, "-o", "json"))
    return [
        pod["metadata"]["name"]
        for pod in listed["items"]
        if "deletionTimestamp" not in pod["metadata"]
        and all(one["ready"] for one in pod["status"]["containerStatuses"])
    ]


def ask(pod: str, seed: int, num_tokens: int) -> Answer:
    """Ask the vLLM of a pod, from inside."""
    command = ask_command(seed, num_tokens)
    return Answer(**json.loads(kubectl("exec", pod, "-c", "vllm", "--", *command)))


def down() -> None:
    """Delete the cluster."""
    check_tools()
    run("kind", "delete", "cluster", "--name", NAME)


def main(arguments: list[str]) -> int:
    """Run `up` or `down`; 1 and a sentence when that fails."""
    commands = {"up": up, "down": down}
    if len(arguments) != 1 or arguments[0] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        commands[arguments[0]]()
    except KindError as exc:
        print(f"make kind-{arguments[0]}: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
