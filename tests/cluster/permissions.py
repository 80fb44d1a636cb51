"""What the release's service accounts may do, as the cluster decides it: what its roles say, and no
more.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tests.cluster.kube import Cluster, Manifest, mentions, name_of
from tests.cluster.names import INSTANCE

RBAC = "apis/rbac.authorization.k8s.io/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ELSEWHERE = "kube-system"


@dataclass(frozen=True, order=True)
class Access:
    """One thing that an account may do.

    Attributes:
        verb: `get`, for example.
        group: API group.
        resource: `pods`, or with a subresource `pods/exec`.
        name: Of one object; "" for all.
        namespace: "" for the cluster.
    """

    verb: str
    group: str
    resource: str
    name: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        where = f"in {self.namespace}" if self.namespace else "in the cluster"
        return " ".join(word for word in (self.verb, self.resource, self.name, where) if word)

    def review(self, account: Manifest) -> Manifest:
        """Return the SubjectAccessReview of an account."""
        resource, _, subresource = self.resource.partition("/")
        namespace = account["metadata"]["namespace"]
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
        attributes = {
            "verb": self.verb,
            "group": self.group,
            "resource": resource,
            "subresource": subresource,
            "name": self.name,
            "namespace": self.namespace,
        }
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "metadata": {},
            "spec": {
                "user": f"system:serviceaccount:{namespace}:{name_of(account)}",
                "groups": [*groups, "system:authenticated"],
                "resourceAttributes": attributes,
            },
        }


SENSITIVE = (
    Access("get", "", "secrets"),
    Access("list", "", "secrets"),
    Access("create", "", "pods"),
    Access("delete", "", "pods"),
    Access("create", "", "pods/exec"),
    Access("patch", "apps", "deployments"),
    Access("patch", "apps", "statefulsets"),
    Access("create", "rbac.authorization.k8s.io", "rolebindings"),
    Access("*", "*", "*"),
)
"""What would make an account one to steal."""


def permission_problems(cluster: Cluster) -> list[str]:
    """Ask the cluster what every account of the release may do; return what differs from the
    release's roles, one sentence each.
    """
    granted: dict[str, set[Access]] = defaultdict(set)
    for scope, roles, bindings in (
        (cluster.namespace, "roles", "rolebindings"),
        ("", "clusterroles", "clusterrolebindings"),
    ):
        rules = {name_of(one): one["rules"] for one in _of_release(cluster, roles, scope)}
        for binding in _of_release(cluster, bindings, scope):
            for subject in binding["subjects"]:
                granted[subject["name"]] |= set(
                    _accesses(rules.get(binding["roleRef"]["name"], []), scope)
                )
    needed = set[Access]().union(*granted.values())
    asked = needed | {replace(one, namespace=cluster.namespace) for one in SENSITIVE}
    asked |= {replace(one, namespace=ELSEWHERE) for one in asked if one.namespace}
    found = []
    for account in cluster.items(cluster.path("serviceaccounts"), labelSelector=INSTANCE):
        name = name_of(account)
        for one in sorted(asked):
            is_allowed = cluster.call("POST", REVIEWS, one.review(account))["status"]["allowed"]
            if is_allowed != (one in granted[name]):
                which = "may, but need not," if is_allowed else "needs to, but may not,"
                found.append(f"{name} {which} {one}")
    return found


def _of_release(cluster: Cluster, plural: str, scope: str) -> list[Manifest]:
    path = cluster.path(plural, api=RBAC) if scope else f"/{RBAC}/{plural}"
    found = cluster.items(path, labelSelector=INSTANCE)
    return [one for one in found if mentions(one, cluster.namespace)]


def _accesses(rules: Iterable[Manifest], namespace: str) -> Iterator[Access]:
    for rule in rules:
        for parts in itertools.product(
            rule["verbs"], rule["apiGroups"], rule["resources"], rule.get("resourceNames") or [""]
        ):
            yield Access(*parts, namespace=namespace)
