{{/* What PodMonitors call this release's targets, wherever their pods are. Takes: root. */}}
{{- define "lmcache.promRelease" -}}
{{- printf "%s/%s" .root.Release.Namespace .root.Release.Name -}}
{{- end -}}

{{/* A PromQL matcher for them. Takes: root. */}}
{{- define "lmcache.promLabels" -}}
lmcache_release="{{ include "lmcache.promRelease" . }}"
{{- end -}}

{{/* Head of a PodMonitor. Takes: root, component, model, role and name (optional). */}}
{{- define "lmcache.podMonitorHead" -}}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  {{- include "lmcache-common.metadata" (merge (pick .root.Values.monitoring.podMonitors "labels") .) | nindent 2 }}
spec:
  jobLabel: app.kubernetes.io/component
{{- end -}}

{{/* The pods of this release that it asks. Takes: as above. */}}
{{- define "lmcache.podMonitorSelector" -}}
selector:
  matchLabels:
    {{- include "lmcache-common.selectorLabels" . | nindent 4 }}
{{- end -}}

{{/* One endpoint of it. Takes: root, component, model and role (optional), port, scheme (optional), tls (optional): its tlsConfig. */}}
{{- define "lmcache.podMonitorEndpoint" -}}
- port: {{ .port }}
  path: /metrics
  {{- with .scheme }}
  scheme: {{ lower . }}
  {{- end }}
  {{- with .tls }}
  tlsConfig:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  interval: {{ .root.Values.monitoring.podMonitors.interval }}
  scrapeTimeout: {{ .root.Values.monitoring.podMonitors.scrapeTimeout }}
  relabelings:
    - {targetLabel: lmcache_release, replacement: {{ include "lmcache.promRelease" . }}}
    - {targetLabel: lmcache_component, replacement: {{ .component }}}
    {{- with .model }}
    - {targetLabel: lmcache_model, replacement: {{ . | quote }}}
    {{- end }}
    {{- with .role }}
    - {targetLabel: lmcache_role, replacement: {{ . }}}
    {{- end }}
{{- end -}}

{{/* How Prometheus checks the certificate of a service: pods are asked at their addresses, certificates name the Service. Takes: root, component. */}}
{{- define "lmcache.podMonitorTls" -}}
{{- if and .root.Values.tls.enabled (not (include "lmcache.hasHealthPort" .)) -}}
ca:
  secret:
    name: {{ default (include "lmcache.tlsSecretName" .) .root.Values.tls.existingCaSecret }}
    key: ca.crt
serverName: {{ include "lmcache-common.serviceHost" . }}
{{- end -}}
{{- end -}}

{{/* The alerts that are wanted, as groups of a PrometheusRule. Takes: root. */}}
{{- define "lmcache.alertGroups" -}}
{{- $rules := .root.Values.monitoring.rules -}}
{{- range $group, $alerts := .root.Files.Get "files/alerts.yaml" | replace "$release" (include "lmcache.promLabels" .) | fromYaml }}
{{- $wanted := list }}
{{- range $alerts }}
{{- if not (has .alert $rules.disabled) }}
{{- $labels := merge (dict "severity" .severity) $rules.alertLabels }}
{{- $annotations := dict "summary" .summary "runbook_url" (printf "%s#%s" $rules.runbookUrl (lower .alert)) }}
{{- $wanted = append $wanted (merge (pick . "alert" "expr" "for") (dict "labels" $labels "annotations" $annotations)) }}
{{- end }}
{{- end }}
{{- with $wanted }}
- name: {{ $group }}
  rules:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}
