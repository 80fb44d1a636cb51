{{/*
The models by their place in the values, as YAML: each entry of `models` that is not null over `modelDefaults`, `podDefaults` and
`sidecar`, with its name. An entry with `prefill` and `decode` gives two (`llama.prefill`, `llama.decode`): each with its `role`, and with
that part of the entry over the rest. Maps are merged, lists replaced. Takes: root.
*/}}
{{- define "lmcache.models" -}}
{{- $values := .root.Values -}}
{{- $models := dict -}}
{{- range $name, $entry := $values.models -}}
{{- if not (kindIs "invalid" $entry) -}}
{{- $model := dict "name" $name "role" "" "sidecar" (deepCopy $values.sidecar) -}}
{{- $shared := omit $entry "prefill" "decode" | deepCopy -}}
{{- $model = mergeOverwrite $model (deepCopy $values.podDefaults) (deepCopy $values.modelDefaults) $shared -}}
{{- range $role := include "lmcache.rolesOf" $entry | fromJsonArray -}}
{{- $own := dict "role" $role "podLabels" (dict "llm-d.ai/role" $role) -}}
{{- $_ := set $models (printf "%s.%s" $name $role) (mergeOverwrite (deepCopy $model) $own (get $entry $role | deepCopy)) -}}
{{- else -}}
{{- $_ := set $models $name $model -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}

{{/* Those of `prefill` and `decode` that an entry of `models` has, as JSON. Takes: the entry. */}}
{{- define "lmcache.rolesOf" -}}
{{- $roles := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- if kindIs "map" (get $ $role) -}}
{{- $roles = append $roles $role -}}
{{- end -}}
{{- end -}}
{{- toJson $roles -}}
{{- end -}}

{{/* Name of a model's objects. Takes: root, model (merged). */}}
{{- define "lmcache.modelName" -}}
{{- list (include "lmcache-common.fullname" .) "vllm" .model.name .model.role | compact | join "-" -}}
{{- end -}}

{{/*
What the library chart wants to know about a model's objects, as YAML without `root`; with a model without its role: about what is of both
roles. Takes: root, model (merged).
*/}}
{{- define "lmcache.modelScope" -}}
component: vllm
model: {{ .model.name | quote }}
{{- with .model.role }}
role: {{ . }}
{{- end }}
name: {{ include "lmcache.modelName" . | quote }}
{{- end -}}

{{/* The image with the codecs where one of these options asks for them, else the one without. Takes: root, sidecar, serdes. */}}
{{- define "lmcache.sidecarImage" -}}
{{- $image := .sidecar.image -}}
{{- range $option := .serdes -}}
{{- if ne (get $.sidecar.config $option | default "naive") "naive" -}}
{{- $image = $.sidecar.codecImage -}}
{{- end -}}
{{- end -}}
{{- include "lmcache-common.image" (dict "root" .root "image" $image "own" true) -}}
{{- end -}}

{{/* What counts as a GPU in a container's limits, as JSON. */}}
{{- define "lmcache.gpuResources" -}}
["nvidia.com/gpu", "amd.com/gpu"]
{{- end -}}

{{/*
Resources of a model's sidecar but its memory. A CPU request that is not given is 750m for each GPU of vLLM and at least 500m, but no more
than the limit. The webhook has the same rule (`lmcache_webhook.injection.sidecar`). Takes: model (merged).
*/}}
{{- define "lmcache.sidecarResources" -}}
{{- $requests := default dict .model.sidecar.resources.requests -}}
{{- $limits := default dict .model.sidecar.resources.limits -}}
{{- $gpus := 0 -}}
{{- range include "lmcache.gpuResources" . | fromJsonArray -}}
{{- $gpus = get (default dict $.model.resources.limits) . | int | add $gpus -}}
{{- end -}}
{{- $milli := mul 750 $gpus | max 500 -}}
{{- $cpu := ternary (div $milli 1000 | toString) (printf "%dm" $milli) (eq 0 (mod $milli 1000)) -}}
{{- with dig "cpu" "" $limits | toString -}}
{{- $limit := ternary (trimSuffix "m" . | float64) (mulf (float64 .) 1000) (hasSuffix "m" .) -}}
{{- $cpu = ternary . $cpu (lt $limit (float64 $milli)) -}}
{{- end -}}
{{- dict "requests" (merge (dict) $requests (dict "cpu" $cpu)) "limits" $limits | toYaml -}}
{{- end -}}

{{/* The cache sidecar as a native sidecar: an init container that stays. Takes: root, model (merged). */}}
{{- define "lmcache.sidecarContainer" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- $sidecar := .model.sidecar -}}
- name: sidecar
  restartPolicy: Always
  image: {{ include "lmcache.sidecarImage" (dict "root" .root "sidecar" $sidecar "serdes" (list "remote_serde" "disk_serde" "peer_serde")) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  args: [--config, /etc/lmcache/config.yaml]
  ports:
    - {name: lm, containerPort: {{ $ports.sidecarLm }}}
    - {name: sidecar-health, containerPort: {{ $ports.health }}}
  env:
    {{- include "lmcache-common.env" (dict "own" (include "lmcache.sidecarEnv" .) "extra" $sidecar.extraEnv) | nindent 4 }}
  securityContext:
    {{- include "lmcache-common.containerSecurityContext" (dict "root" .root "values" .model) | nindent 4 }}
  resources:
    {{- $arenaMi := include "lmcache-common.mib" (dict "name" "sidecar.arenaSize" "value" $sidecar.arenaSize) }}
    {{- $overheadMi := include "lmcache-common.mib" (dict "name" "sidecar.memoryOverhead" "value" $sidecar.memoryOverhead) }}
    {{- /* Page tables of an arena that is mapped twice, with pages of 4 KiB. */}}
    {{- $tablesMi := divf $arenaMi 256 | ceil | int64 }}
    {{- $memoryMi := add $arenaMi $overheadMi $tablesMi }}
    {{- $resources := include "lmcache.sidecarResources" . | fromYaml }}
    {{- include "lmcache-common.resourcesWithMemory" (dict "resources" $resources "memoryMi" $memoryMi) | nindent 4 }}
  # When the pod is to end, at once: its drain begins while vLLM still answers what it has. (SIGTERM comes when vLLM has ended.) A hook of
  # vLLM's container would also run where vLLM alone is started again, and would leave it a sidecar that keeps nothing any more.
  lifecycle:
    preStop:
      exec:
        command: [python, -m, lmcache_sidecar.begin_drain, {{ include "lmcache.socketPath" . }}]
  startupProbe:
    {{- include "lmcache-common.httpProbe" (dict "path" "/healthz" "port" "sidecar-health" "probe" $sidecar.probes.startup) | nindent 4 }}
  livenessProbe:
    {{- include "lmcache-common.httpProbe" (dict "path" "/healthz" "port" "sidecar-health" "probe" $sidecar.probes.liveness) | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/lmcache, readOnly: true}
    {{- include "lmcache.secretMounts" (include "lmcache.sidecarSecrets" . | fromYaml | merge (dict "root" .root)) | trim | nindent 4 }}
    - {name: arena, mountPath: /run/lmcache/arena}
    - {name: socket, mountPath: /run/lmcache/socket}
    - {name: sidecar-tmp, mountPath: /tmp}
    {{- if $sidecar.mover.enabled }}
    - {name: mover-socket, mountPath: /run/lmcache/mover}
    {{- end }}
    {{- if $sidecar.diskSize }}
    - {name: sidecar-disk, mountPath: /var/lib/lmcache}
    {{- end }}
    {{- with $sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/*
The mover of a model's sidecar, a native sidecar, too. It has the arena and the socket that it shares with the sidecar alone, and no
Secret. Takes: root, model (merged).
*/}}
{{- define "lmcache.moverContainer" -}}
{{- $sidecar := .model.sidecar -}}
{{- $mover := $sidecar.mover -}}
{{- $security := include "lmcache-common.containerSecurityContext" (dict "root" .root "values" .model) | fromYaml -}}
{{- $resources := $mover.resources -}}
{{- with $mover.rdmaResource -}}
{{- $security = mergeOverwrite $security (dict "capabilities" (dict "add" (list "IPC_LOCK"))) -}}
{{- $resources = merge (dict "limits" (dict . 1) "requests" (dict . 1)) $resources -}}
{{- end -}}
- name: mover
  restartPolicy: Always
  image: {{ include "lmcache-common.image" (dict "root" .root "image" $mover.image "own" true) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  args: [--socket, {{ include "lmcache.moverSocket" . }}]
  ports:
    - {name: ucx, containerPort: {{ (include "lmcache.moverPorts" . | fromYaml).first }}}
  env:
    {{- include "lmcache-common.env" (dict "own" (include "lmcache.moverEnv" .) "extra" $mover.extraEnv) | nindent 4 }}
  securityContext:
    {{- toYaml $security | nindent 4 }}
  resources:
    {{- $arenaMi := include "lmcache-common.mib" (dict "name" "sidecar.arenaSize" "value" $sidecar.arenaSize) }}
    {{- $overheadMi := include "lmcache-common.mib" (dict "name" "sidecar.mover.memoryOverhead" "value" $mover.memoryOverhead) }}
    {{- $memoryMi := divf $arenaMi 256 | ceil | int64 | add $overheadMi }}
    {{- include "lmcache-common.resourcesWithMemory" (dict "resources" $resources "memoryMi" $memoryMi) | nindent 4 }}
  volumeMounts:
    - {name: arena, mountPath: /run/lmcache/arena}
    - {name: mover-socket, mountPath: /run/lmcache/mover}
    - {name: mover-tmp, mountPath: /tmp}
{{- end -}}

{{/* Takes: model (merged). */}}
{{- define "lmcache.moverEnv" -}}
{{- $ports := include "lmcache.moverPorts" . | fromYaml -}}
- name: UCX_TLS
  value: {{ .model.sidecar.mover.transports | quote }}
- name: UCX_NET_DEVICES
  value: {{ .model.sidecar.mover.devices | quote }}
- name: UCX_TCP_PORT_RANGE
  value: {{ printf "%d-%d" (int $ports.first) (int $ports.last) | quote }}
{{- end -}}

{{/* Takes: root. */}}
{{- define "lmcache.sidecarEnv" -}}
{{ include "lmcache-common.podEnv" . }}
- name: LMCACHE_SIDECAR_INSTANCE_ID
  value: $(POD_NAME)
- name: LMCACHE_SIDECAR_DISTRIBUTED_URL
  value: {{ include "lmcache.lmScheme" . }}://{{ include "lmcache.podHost" . }}:{{ (include "lmcache.ports" . | fromYaml).sidecarLm }}
{{ include "lmcache.placeEnv" "SIDECAR" }}
{{- end -}}

{{/* What of the Secrets a sidecar reads, as YAML. */}}
{{- define "lmcache.sidecarSecrets" -}}
component: vllm
auth: [tokens.yaml, sidecar-token]
keys: [ticket-keys, salt]
{{- end -}}

{{/* Volumes of a model's pod. Takes: root, model (merged). */}}
{{- define "lmcache.modelVolumes" -}}
{{- $sidecar := .model.sidecar -}}
- name: config
  configMap:
    name: {{ include "lmcache.modelName" . }}
{{ include "lmcache.secretVolumes" (include "lmcache.sidecarSecrets" . | fromYaml | merge (dict "root" .root)) | trim }}
- name: arena
  emptyDir:
    medium: Memory
    # One arena, and room for its journal. A sidecar that starts again uses the same one; where it has to make a new one, it waits until
    # vLLM has let go of the old: with room for two the pod could reach its memory limit, and the kernel might end vLLM instead.
    sizeLimit: {{ add (include "lmcache-common.mib" (dict "name" "sidecar.arenaSize" "value" $sidecar.arenaSize)) 64 }}Mi
- name: socket
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- if $sidecar.mover.enabled }}
- name: mover-socket
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: mover-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- end }}
{{- if .model.connector.enabled }}
- name: payload
  emptyDir:
    sizeLimit: 256Mi
{{- end }}
{{- with .model.tls.existingSecret }}
- name: vllm-tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0444
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
{{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "lmcache.shmSize" . }}
- name: tmp
  emptyDir: {}
- name: sidecar-tmp
  emptyDir:
    sizeLimit: 64Mi
- name: home
  {{- if or .model.weights.existingClaim .model.weights.createClaim }}
  persistentVolumeClaim:
    claimName: {{ default (include "lmcache.modelName" .) .model.weights.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .model.weights.size }}
  {{- end }}
{{- with $sidecar.diskSize }}
- name: sidecar-disk
  emptyDir:
    # A tenth and a GiB more than the tier may fill: over the limit Kubernetes evicts the whole pod.
    sizeLimit: {{ addf (mulf (include "lmcache-common.mib" (dict "name" "sidecar.diskSize" "value" .)) 1.1) 1024 | ceil | int64 }}Mi
{{- end }}
{{- with .model.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
