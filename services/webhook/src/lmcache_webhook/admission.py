"""AdmissionReview, version `admission.k8s.io/v1`: the members that we read and write, by
Kubernetes' names.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

API_VERSION: Literal["admission.k8s.io/v1"] = "admission.k8s.io/v1"
MAX_UID_CHARS = 128
MAX_NAMESPACE_CHARS = 63


class GroupVersionKind(BaseModel):
    """Kind of an object."""

    group: str = ""
    version: str
    kind: str


class AdmissionRequest(BaseModel):
    """What is about to happen."""

    model_config = ConfigDict(extra="ignore")

    uid: str = Field(min_length=1, max_length=MAX_UID_CHARS)
    kind: GroupVersionKind
    namespace: str = Field(default="", max_length=MAX_NAMESPACE_CHARS)
    operation: str = "CREATE"
    dryRun: bool | None = None
    object: dict[str, Any] | None = None


class AdmissionQuestion(BaseModel):
    """The review as it is asked."""

    model_config = ConfigDict(extra="ignore")

    apiVersion: Literal["admission.k8s.io/v1"]
    kind: Literal["AdmissionReview"]
    request: AdmissionRequest


class AdmissionResponse(BaseModel):
    """Always allowed: a pod that cannot have a sidecar runs without one."""

    uid: str
    allowed: Literal[True] = True
    patchType: Literal["JSONPatch"] | None = None
    patch: str | None = Field(default=None, description="JSON patch (RFC 6902), base64")
    warnings: list[str] | None = None


class AdmissionAnswer(BaseModel):
    """The review as it is answered."""

    apiVersion: Literal["admission.k8s.io/v1"] = API_VERSION
    kind: Literal["AdmissionReview"] = "AdmissionReview"
    response: AdmissionResponse
