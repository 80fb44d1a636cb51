{{/* Further parts of requirements.yaml. */}}

{{- define "lmcache.refuseMonitoring" }}
{{- $values := .Values }}
{{- if and $values.monitoring.podMonitors.enabled $values.networkPolicy.enabled (not $values.networkPolicy.metricsFrom) }}
{{- fail "monitoring.podMonitors is enabled, but networkPolicy.metricsFrom names nobody: name the pods of Prometheus, which the policies would keep away." }}
{{- end }}
{{- end }}
