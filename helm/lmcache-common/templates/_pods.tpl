{{/*
An image reference. A digest wins over a tag.
Takes: root, image (registry, repository, tag, digest); own (optional): true for the images of this project, which fall back on
`images.registry`, `images.tag` and the chart's appVersion.
*/}}
{{- define "lmcache-common.image" -}}
{{- $shared := .root.Values.images -}}
{{- $registry := .image.registry -}}
{{- $tag := .image.tag -}}
{{- if .own -}}
{{- $registry = default $shared.registry $registry -}}
{{- $tag = default (default .root.Chart.AppVersion $shared.tag) $tag -}}
{{- if not $registry -}}
{{- fail "images.registry is empty, and the images of this project are in no public registry: build and push them (`TAG=… REGISTRY=registry.example.com/lmcache docker buildx bake --push`), then set images.registry to that registry." -}}
{{- end -}}
{{- end -}}
{{- $name := .image.repository -}}
{{- if not (or $tag .image.digest) -}}
{{- fail (printf "the image %s has neither a tag nor a digest: give it one of them." $name) -}}
{{- end -}}
{{- if $registry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" $registry) $name -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name $tag -}}
{{- end -}}
{{- end -}}

{{/*
A component's values over `podDefaults`, as YAML. Maps are merged, lists replaced.
Takes: root, values (of the component).
*/}}
{{- define "lmcache-common.withPodDefaults" -}}
{{- mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy .values) | toYaml -}}
{{- end -}}

{{/*
What every pod has.
Takes: root, component, model (optional), values (with podDefaults); asksCluster (optional): true where it asks the Kubernetes API.
*/}}
{{- define "lmcache-common.podSpec" -}}
serviceAccountName: {{ include "lmcache-common.serviceAccountName" . }}
automountServiceAccountToken: {{ default false .asksCluster }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int64 .values.terminationGracePeriodSeconds }}
securityContext:
  {{- include "lmcache-common.podSecurityContext" . | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "lmcache-common.priorityClassName" . }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- range $field := list "dnsConfig" "nodeSelector" "tolerations" "affinity" }}
{{- with get $.values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
topologySpreadConstraints:
  {{- include "lmcache-common.topologySpread" . | trim | nindent 2 }}
{{- end -}}

{{/* The component's own, or the one that the chart makes for all but the models. Takes: as podSpec. */}}
{{- define "lmcache-common.priorityClassName" -}}
{{- if .values.priorityClassName -}}
{{- .values.priorityClassName -}}
{{- else if and .root.Values.priorityClass.create (ne .component "vllm") -}}
{{- include "lmcache-common.createdPriorityClass" . -}}
{{- end -}}
{{- end -}}

{{/* Its name, which the whole cluster shares. Takes: root. */}}
{{- define "lmcache-common.createdPriorityClass" -}}
{{- default (printf "%s-%s" .root.Release.Namespace (include "lmcache-common.fullname" .)) .root.Values.priorityClass.name -}}
{{- end -}}

{{/* The given constraints, or one soft spread over nodes. One that selects no pods is about the component's own. Takes: as podSpec. */}}
{{- define "lmcache-common.topologySpread" -}}
{{- $own := dict "matchLabels" (include "lmcache-common.selectorLabels" . | fromYaml) -}}
{{- $soft := list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway") -}}
{{- range default $soft .values.topologySpreadConstraints }}
- {{ ternary . (merge (dict "labelSelector" $own) .) (hasKey . "labelSelector") | toYaml | nindent 2 | trim }}
{{- end }}
{{- end -}}

{{/* Pod level of the `restricted` standard, and over it the component's own podSecurityContext. Takes: root, values. */}}
{{- define "lmcache-common.podSecurityContext" -}}
{{- $restricted := dict "runAsNonRoot" true "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- with .root.Values.security.runAsUser -}}
{{- range $field := list "runAsUser" "runAsGroup" "fsGroup" -}}
{{- $_ := set $restricted $field (int64 $.root.Values.security.runAsUser) -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite $restricted (deepCopy (default dict .values.podSecurityContext)) | toYaml -}}
{{- end -}}

{{/* Container level of the `restricted` standard, and over it the component's own containerSecurityContext. Takes: root, values. */}}
{{- define "lmcache-common.containerSecurityContext" -}}
{{- $restricted := dict "runAsNonRoot" true "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true -}}
{{- $_ := set $restricted "capabilities" (dict "drop" (list "ALL")) -}}
{{- $_ := set $restricted "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- with .root.Values.security.runAsUser -}}
{{- $_ := set $restricted "runAsUser" (int64 .) -}}
{{- end -}}
{{- mergeOverwrite $restricted (deepCopy (default dict .values.containerSecurityContext)) | toYaml -}}
{{- end -}}

{{/* How a workload replaces its pods; `rollingUpdate` belongs to that type alone. Takes: the component's updateStrategy. */}}
{{- define "lmcache-common.updateStrategy" -}}
{{- with ternary . (omit . "rollingUpdate") (eq (default "RollingUpdate" .type) "RollingUpdate") -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* One HTTP probe. Takes: path, port, scheme (optional: HTTPS), probe (periodSeconds, timeoutSeconds, failureThreshold). */}}
{{- define "lmcache-common.httpProbe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
  {{- with .scheme }}
  scheme: {{ . }}
  {{- end }}
{{ toYaml .probe }}
{{- end -}}

{{/* The three probes of a service: it may take its time to start, lives by /healthz, gets traffic by /readyz. Takes: probes, port, scheme. */}}
{{- define "lmcache-common.probes" -}}
{{- $at := pick . "port" "scheme" -}}
startupProbe:
  {{- include "lmcache-common.httpProbe" (merge (dict "path" "/healthz" "probe" .probes.startup) $at) | nindent 2 }}
livenessProbe:
  {{- include "lmcache-common.httpProbe" (merge (dict "path" "/healthz" "probe" .probes.liveness) $at) | nindent 2 }}
readinessProbe:
  {{- include "lmcache-common.httpProbe" (merge (dict "path" "/readyz" "probe" .probes.readiness) $at) | nindent 2 }}
{{- end -}}

{{/*
Lets a container go on for a while before it gets its SIGTERM: until then kube-proxies and clients have learned that the pod is leaving.
Takes: the seconds; nothing for 0.
*/}}
{{- define "lmcache-common.preStop" -}}
{{- if . -}}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ toString . | quote }}]
{{- end -}}
{{- end -}}

{{/*
The number of a workload's pods, as its field; nothing if it is null: then `kubectl scale` owns it.

With an autoscaler it is the number that the workload has. A field that an upgrade leaves out becomes 1, which would end all other pods
before the autoscaler has looked. It is never another number than one that was set by scaling (the subresource), since Helm 4 refuses to
overwrite that. Without a cluster to look at it is the least number.
Takes: root, kind, component or name, values (replicaCount, autoscaling where it has one).
*/}}
{{- define "lmcache-common.replicas" -}}
{{- $scaling := default dict .values.autoscaling -}}
{{- if $scaling.enabled -}}
{{- $name := default (include "lmcache-common.componentName" .) .name -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace $name | default dict -}}
{{- $number := int (dig "spec" "replicas" $scaling.minReplicas $live) -}}
{{- $isScaled := false -}}
{{- range dig "metadata" "managedFields" list $live -}}
{{- $isScaled = or $isScaled (eq (default "" .subresource) "scale") -}}
{{- end -}}
replicas: {{ ternary $number (max $number (int $scaling.minReplicas)) $isScaled }}
{{- else if not (kindIs "invalid" .values.replicaCount) -}}
replicas: {{ int .values.replicaCount }}
{{- end -}}
{{- end -}}

{{/*
The variables of a container: its own, and further ones, which win. A name that appears twice is what Helm 4, which applies on the server,
is refused for. Takes: own (YAML text of a list), extra (a list).
*/}}
{{- define "lmcache-common.env" -}}
{{- $names := list -}}
{{- range .extra -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $all := list -}}
{{- range fromYamlArray .own -}}
{{- if not (has .name $names) -}}
{{- $all = append $all . -}}
{{- end -}}
{{- end -}}
{{- toYaml (concat $all (default list .extra)) -}}
{{- end -}}

{{/* Where the pod's own name and address come from. */}}
{{- define "lmcache-common.podEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end -}}

{{/*
Resources with the memory that a cache of a given size needs: request and limit are the same, since the cache is filled for good.
Takes: resources, memoryMi.
*/}}
{{- define "lmcache-common.resourcesWithMemory" -}}
{{- $memory := dict "memory" (printf "%dMi" (int64 .memoryMi)) -}}
requests:
  {{- merge (dict) $memory (default dict .resources.requests) | toYaml | nindent 2 }}
limits:
  {{- merge (dict) $memory (default dict .resources.limits) | toYaml | nindent 2 }}
{{- end -}}
