{{/* Arguments of the command that makes the certificate. Takes: root. */}}
{{- define "lmcache.webhookCertificateArgs" -}}
{{- $certificate := .root.Values.webhook.certificate -}}
- certificate
- --namespace={{ .root.Release.Namespace }}
- --secret={{ include "lmcache.webhookSecretName" . }}
- --service={{ include "lmcache-common.componentName" (dict "root" .root "component" "webhook") }}
- --configuration={{ include "lmcache.webhookClusterName" . }}
- --valid-days={{ int $certificate.validDays }}
- --renew-days={{ int $certificate.renewDays }}
{{- end -}}

{{/* The pod template that runs it. Takes: root, account (its service account). */}}
{{- define "lmcache.webhookCertificatePod" -}}
{{- $webhook := include "lmcache-common.withPodDefaults" (dict "root" .root "values" .root.Values.webhook) | fromYaml -}}
{{- $this := dict "root" .root "component" "webhook-cert" "values" $webhook "account" .account "asksCluster" true -}}
metadata:
  {{- include "lmcache-common.podMetadata" $this | nindent 2 }}
spec:
  restartPolicy: Never
  {{- include "lmcache-common.podSpec" $this | nindent 2 }}
  containers:
    - name: certificate
      image: {{ include "lmcache-common.image" (dict "root" .root "image" $webhook.image "own" true) }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      args:
        {{- include "lmcache.webhookCertificateArgs" . | nindent 8 }}
      securityContext:
        {{- include "lmcache-common.containerSecurityContext" $this | nindent 8 }}
      resources:
        {{- toYaml $webhook.resources | nindent 8 }}
{{- end -}}

{{/* What that may do, with its account: its own Secret and its own configuration. Takes: root, account, annotations (optional). */}}
{{- define "lmcache.webhookCertificateAccess" -}}
{{- $cluster := printf "%s-%s" .root.Release.Namespace .account | trunc 63 | trimSuffix "-" -}}
{{- $this := merge (dict "component" "webhook-cert") (pick . "root" "annotations") -}}
{{- $metadata := include "lmcache-common.metadata" (merge (dict "name" .account) $this) -}}
{{- $clusterMetadata := include "lmcache-common.metadata" (merge (dict "name" $cluster "isClusterScoped" true) $this) -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- $metadata | nindent 2 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  {{- $metadata | nindent 2 }}
rules:
  - apiGroups: [""]
    resources: [secrets]
    resourceNames: [{{ include "lmcache.webhookSecretName" . }}]
    verbs: [get, update]
  # What does not exist yet has no name to be allowed by.
  - apiGroups: [""]
    resources: [secrets]
    verbs: [create]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  {{- $metadata | nindent 2 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ .account }}}
subjects:
  - {kind: ServiceAccount, name: {{ .account }}, namespace: {{ .root.Release.Namespace }}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  {{- $clusterMetadata | nindent 2 }}
rules:
  - apiGroups: [admissionregistration.k8s.io]
    resources: [mutatingwebhookconfigurations]
    resourceNames: [{{ include "lmcache.webhookClusterName" . }}]
    verbs: [get, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  {{- $clusterMetadata | nindent 2 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $cluster }}}
subjects:
  - {kind: ServiceAccount, name: {{ .account }}, namespace: {{ .root.Release.Namespace }}}
{{- end -}}

{{/* What its pods may reach: the API server. Takes: root, component. */}}
{{- define "lmcache.webhookCertificatePolicy" -}}
spec:
  podSelector:
    matchLabels:
      {{- include "lmcache-common.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress: []
  egress:
    {{- include "lmcache-common.dnsEgress" . | nindent 4 }}
    {{- include "lmcache-common.anywhere" (dict "ports" .root.Values.networkPolicy.apiServerPorts) | nindent 4 }}
{{- end -}}
