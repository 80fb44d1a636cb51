"""The chart's names in the release of `ci/kind-values.yaml`. Standard library only."""

from __future__ import annotations

from pathlib import Path

RELEASE = "cache"
BASE = f"{RELEASE}-lmcache"
INSTANCE = f"app.kubernetes.io/instance={RELEASE}"
"""Selects every object of the release."""
VALUES = "helm/lmcache/ci/kind-values.yaml"
MODEL = "/opt/model"
"""The model's path in the image, and its served name."""
MODEL_SERVICE = f"{BASE}-vllm-tiny"
INJECTED = {"lmcache.io/injected": "true"}
"""A label that the chart's policies admit and none of them restricts."""


def component(name: str) -> str:
    """Return the selector of a component's pods."""
    return f"{INSTANCE},app.kubernetes.io/component={name}"


MODEL_PODS = component("vllm")
"""The values have one model."""


def ask_command(seed: int, num_tokens: int) -> list[str]:
    """Return the command that asks the vLLM in its own container."""
    script = Path(__file__).with_name("ask.py").read_text(encoding="utf-8")
    where = ["http://127.0.0.1:8000", MODEL]
    return ["python3", "-c", script, *where, str(seed), str(num_tokens)]
