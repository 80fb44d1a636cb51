"""Schemas of the kinds that are not Kubernetes' own, as far as the chart uses them: their
operators' documentation has more fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jsonschema

if TYPE_CHECKING:
    from tests.helm.conftest import Manifest

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
DURATION: Schema = {
    "type": "string",
    "pattern": (
        "^(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?$"
    ),
}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def strict(required: list[str], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


POD_MONITOR = strict(
    ["selector", "podMetricsEndpoints"],
    jobLabel=TEXT,
    podTargetLabels=many(TEXT),
    selector=strict(["matchLabels"], matchLabels=STRINGS),
    namespaceSelector=strict(["any"], any={"type": "boolean"}),
    podMetricsEndpoints=many(
        strict(
            ["port"],
            port=TEXT,
            path={"type": "string", "pattern": "^/"},
            scheme={"enum": ["http", "https"]},
            interval=DURATION,
            scrapeTimeout=DURATION,
            relabelings=many(
                strict(["targetLabel", "replacement"], targetLabel=TEXT, replacement=TEXT)
            ),
            tlsConfig=strict(
                [],
                ca=strict(["secret"], secret=strict(["name", "key"], name=TEXT, key=TEXT)),
                serverName=TEXT,
                insecureSkipVerify={"type": "boolean"},
            ),
        )
    ),
)
PROMETHEUS_RULE = strict(
    ["groups"],
    groups=many(
        strict(
            ["name", "rules"],
            name=TEXT,
            rules=many(
                strict(
                    ["alert", "expr"],
                    alert={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
                    expr=TEXT,
                    labels=STRINGS,
                    annotations=STRINGS,
                    **{"for": DURATION},
                )
            ),
        )
    ),
)
SCALED_OBJECT = strict(
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=strict(["name"], apiVersion=TEXT, kind=TEXT, name=TEXT),
    pollingInterval={"type": "integer", "minimum": 1},
    cooldownPeriod={"type": "integer", "minimum": 0},
    minReplicaCount={"type": "integer", "minimum": 0},
    maxReplicaCount={"type": "integer", "minimum": 1},
    advanced=strict(
        [],
        restoreToOriginalReplicaCount={"type": "boolean"},
        horizontalPodAutoscalerConfig=strict([], behavior={"type": "object"}),
    ),
    triggers=many(
        strict(
            ["type", "metadata"],
            type=TEXT,
            metricType={"enum": ["Utilization", "AverageValue", "Value"]},
            metadata=STRINGS,
            authenticationRef=strict(
                ["name"],
                name=TEXT,
                kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]},
            ),
        )
    ),
)
NAME = strict(["name"], name=TEXT, namespace=TEXT)
HTTP_ROUTE = strict(
    ["parentRefs", "rules"],
    parentRefs=many(NAME),
    hostnames=many(TEXT),
    rules=many(
        strict(
            ["backendRefs"],
            matches=many({"type": "object"}),
            filters=many({"type": "object"}),
            timeouts=strict([], request=DURATION, backendRequest=DURATION),
            backendRefs=many(
                {
                    "oneOf": [
                        strict(
                            ["kind", "name", "port"],
                            kind={"const": "Service"},
                            name=TEXT,
                            port={"type": "integer"},
                        ),
                        strict(
                            ["group", "kind", "name"],
                            group={"const": "inference.networking.k8s.io"},
                            kind={"const": "InferencePool"},
                            name=TEXT,
                        ),
                    ]
                }
            ),
        )
    ),
)
NUMBER = strict(["number"], number={"type": "integer", "minimum": 1, "maximum": 65535})
INFERENCE_POOL = strict(
    ["selector", "targetPorts", "endpointPickerRef"],
    selector=strict(["matchLabels"], matchLabels=STRINGS),
    targetPorts=many(NUMBER),
    endpointPickerRef=strict(
        ["name", "port"],
        group=TEXT,
        kind=TEXT,
        name=TEXT,
        port=NUMBER,
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
SPECS = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
}


def is_extension(manifest: Manifest) -> bool:
    """Whether this module knows its kind."""
    return (manifest["apiVersion"], manifest["kind"]) in SPECS


def validate(manifest: Manifest) -> None:
    """Raises `jsonschema.ValidationError` for what its operator would refuse, or ignore."""
    jsonschema.validate(manifest["spec"], SPECS[manifest["apiVersion"], manifest["kind"]])
