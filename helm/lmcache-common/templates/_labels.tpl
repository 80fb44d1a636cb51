{{/*
Labels by which selectors find pods. Fixed for the life of a release: selectors are immutable.
Takes: root, component; model (optional), the name of an entry of `models`; role (optional), prefill or decode.
*/}}
{{- define "lmcache-common.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
lmcache.io/model: {{ . | quote }}
{{- end }}
{{- with .role }}
lmcache.io/role: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of every object. Takes: as selectorLabels; labels (optional), further ones. */}}
{{- define "lmcache-common.labels" -}}
{{ include "lmcache-common.selectorLabels" . }}
app.kubernetes.io/part-of: lmcache
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with merge (dict) (default dict .labels) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Annotations of every object, or nothing. Takes: root; annotations (optional), further ones. */}}
{{- define "lmcache-common.annotations" -}}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/*
Name, namespace, labels and annotations of an object.
Takes: as labels and annotations; name (optional) instead of the component's; isClusterScoped (optional).
*/}}
{{- define "lmcache-common.metadata" -}}
name: {{ default (include "lmcache-common.componentName" .) .name }}
{{- if not .isClusterScoped }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
  {{- include "lmcache-common.labels" . | nindent 2 }}
{{- with include "lmcache-common.annotations" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/*
Metadata of a pod template: no chart version among the labels, so that a new chart alone does not restart pods.
Takes: as selectorLabels; values (podLabels, podAnnotations); config (optional), the settings whose change restarts the pods.
*/}}
{{- define "lmcache-common.podMetadata" -}}
{{- $checksum := dict -}}
{{- with .config -}}
{{- $checksum = dict "checksum/config" (sha256sum .) -}}
{{- end -}}
labels:
  {{- include "lmcache-common.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/part-of: lmcache
  {{- with merge (dict) (default dict .values.podLabels) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with include "lmcache-common.annotations" (dict "root" .root "annotations" (merge $checksum (default dict .values.podAnnotations))) }}
{{ . }}
{{- end }}
{{- end -}}
