{{/*
What scales a workload, where its `autoscaling` is enabled: a HorizontalPodAutoscaler, or a ScaledObject where `autoscaling.kind` is keda.
Takes: root, component, model and name (optional), values; kind of the workload; container, the one that is measured; query, PromQL for
the load of all its pods together.
*/}}
{{- define "lmcache-common.autoscaler" -}}
{{- if .values.autoscaling.enabled -}}
{{- if eq .root.Values.autoscaling.kind "keda" -}}
{{- include "lmcache-common.scaledObject" . -}}
{{- else -}}
{{- include "lmcache-common.horizontalPodAutoscaler" . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* One container's CPU, not the pod's: an added container without a CPU request would stop the autoscaler. */}}
{{- define "lmcache-common.horizontalPodAutoscaler" -}}
{{- $scaling := .values.autoscaling -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "lmcache-common.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- include "lmcache-common.scaleTarget" . | nindent 4 }}
  minReplicas: {{ int $scaling.minReplicas }}
  maxReplicas: {{ int $scaling.maxReplicas }}
  metrics:
    {{- with $scaling.cpuPercent }}
    - type: ContainerResource
      containerResource:
        name: cpu
        container: {{ $.container }}
        target:
          type: Utilization
          averageUtilization: {{ int . }}
    {{- end }}
    {{- with $scaling.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  behavior:
    {{- include "lmcache-common.scalingBehavior" $scaling | nindent 4 }}
{{- end -}}

{{- define "lmcache-common.scaledObject" -}}
{{- $scaling := .values.autoscaling -}}
{{- $shared := .root.Values.autoscaling -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "lmcache-common.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- include "lmcache-common.scaleTarget" . | nindent 4 }}
  pollingInterval: {{ int $shared.pollingSeconds }}
  minReplicaCount: {{ int $scaling.minReplicas }}
  maxReplicaCount: {{ int $scaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- include "lmcache-common.scalingBehavior" $scaling | nindent 8 }}
  triggers:
    {{- with $scaling.cpuPercent }}
    - type: cpu
      metricType: Utilization
      metadata:
        value: {{ int . | quote }}
        containerName: {{ $.container }}
    {{- end }}
    {{- with $scaling.loadPerPod }}
    - type: prometheus
      metadata:
        serverAddress: {{ $shared.prometheus.serverAddress }}
        query: {{ $.query | quote }}
        threshold: {{ toJson . | quote }}
        # No figures are no reason to let pods go.
        ignoreNullValues: "false"
      {{- with $shared.prometheus.authenticationRef }}
      authenticationRef:
        name: {{ . }}
      {{- end }}
    {{- end }}
    {{- with $scaling.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "lmcache-common.scaleTarget" -}}
apiVersion: apps/v1
kind: {{ .kind }}
name: {{ default (include "lmcache-common.componentName" .) .name }}
{{- end -}}

{{/* Pods go one by one, and late: each hands over what it holds. More come as fast as Kubernetes likes. Takes: `autoscaling` of a component. */}}
{{- define "lmcache-common.scalingBehavior" -}}
scaleDown:
  stabilizationWindowSeconds: {{ int .stabilizationSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: {{ int .scaleDownSeconds }}}
{{- end -}}
