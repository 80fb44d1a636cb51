{{/* The settings file of a component. Takes: root, component, model (optional), name (optional), config (YAML text). */}}
{{- define "lmcache-common.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "lmcache-common.metadata" . | nindent 2 }}
data:
  config.yaml: |
    {{- .config | nindent 4 }}
{{- end -}}

{{/* Takes: root, component, name (optional), values. Renders nothing where `serviceAccount.create` is false. */}}
{{- define "lmcache-common.serviceAccount" -}}
{{- if .values.serviceAccount.create -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- $name := include "lmcache-common.serviceAccountName" . }}
  {{- $annotations := .values.serviceAccount.annotations }}
  {{- include "lmcache-common.metadata" (merge (dict "name" $name "annotations" $annotations) .) | nindent 2 }}
automountServiceAccountToken: false
{{- end -}}
{{- end -}}

{{/*
Takes: root, component, model (optional), values. `maxUnavailable`, so that a single replica does not block a node's drain;
pods that are not ready never do.
*/}}
{{- define "lmcache-common.podDisruptionBudget" -}}
{{- if .values.podDisruptionBudget.enabled -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "lmcache-common.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "lmcache-common.selectorLabels" . | nindent 6 }}
{{- end -}}
{{- end -}}

{{/* Head of a NetworkPolicy that denies what its rules do not name. Takes: root, component. */}}
{{- define "lmcache-common.networkPolicyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "lmcache-common.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "lmcache-common.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end -}}

{{/* The pods of a component of this release, as a peer of a rule. Takes: root, component. */}}
{{- define "lmcache-common.podPeer" -}}
- podSelector:
    matchLabels:
      {{- include "lmcache-common.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* Name resolution. Any destination: DNS may be a node-local address that no selector matches. Takes: root. */}}
{{- define "lmcache-common.dnsEgress" -}}
{{- include "lmcache-common.anywhere" (dict "ports" .root.Values.networkPolicy.dnsPorts "protocols" (list "UDP" "TCP")) -}}
{{- end -}}

{{/*
A rule that lets pods out to some ports, wherever that is; no rule where there are no ports, since one without ports is one about all of them.
Takes: ports; protocols (optional: TCP).
*/}}
{{- define "lmcache-common.anywhere" -}}
{{- $protocols := default (list "TCP") .protocols -}}
{{- with .ports -}}
- ports:
    {{- range $port := . }}
    {{- range $protocols }}
    - {port: {{ int $port }}, protocol: {{ . }}}
    {{- end }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/*
A secret that is made once: what the cluster already holds, else the fallback.
Takes: root, name (of the Secret), key, fallback.
*/}}
{{- define "lmcache-common.keptSecretValue" -}}
{{- $held := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- $value := dig "data" .key "" $held -}}
{{- if $value -}}
{{- b64dec $value -}}
{{- else -}}
{{- .fallback -}}
{{- end -}}
{{- end -}}
