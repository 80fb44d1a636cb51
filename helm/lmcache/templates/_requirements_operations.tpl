{{/* Further parts of requirements.yaml. */}}

{{- define "lmcache.refuseMonitoring" }}
{{- $values := .Values }}
{{- if and $values.monitoring.podMonitors.enabled $values.networkPolicy.enabled (not $values.networkPolicy.metricsFrom) }}
{{- fail "monitoring.podMonitors is enabled, but networkPolicy.metricsFrom is empty: name the pods of Prometheus, or the policies block them." }}
{{- end }}
{{- end }}

{{/* Takes: root, name (of the values), values (of a component or a model). */}}
{{- define "lmcache.refuseAutoscaling" }}
{{- $scaling := .values.autoscaling }}
{{- $shared := .root.Values.autoscaling }}
{{- $load := and (eq $shared.kind "keda") $scaling.loadPerPod }}
{{- if $scaling.enabled }}
{{- /* Where a number is the default, the autoscaler wins instead. */}}
{{- if not (or (has .name (list "lookup" "broker")) (kindIs "invalid" .values.replicaCount)) }}
{{- fail (printf "%s.autoscaling is enabled, but %s.replicaCount is %v: leave it null, since two would own the number of pods." .name .name .values.replicaCount) }}
{{- end }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas: lower the one or raise the other." .name) }}
{{- end }}
{{- if not (or $scaling.cpuPercent $load $scaling.metrics) }}
{{- fail (printf "%s.autoscaling has nothing to go by: set cpuPercent or metrics, or loadPerPod with autoscaling.kind=keda." .name) }}
{{- end }}
{{- if and $load (not $shared.prometheus.serverAddress) }}
{{- fail (printf "%s.autoscaling.loadPerPod is set, but autoscaling.prometheus.serverAddress is empty: say where Prometheus is, or set loadPerPod to null." .name) }}
{{- end }}
{{- if lt (int $scaling.stabilizationSeconds) (int .values.terminationGracePeriodSeconds) }}
{{- fail (printf "%s.autoscaling.stabilizationSeconds is shorter than terminationGracePeriodSeconds: the next pod would go while the last one still hands over." .name) }}
{{- end }}
{{- end }}
{{- end }}
