{{/* What starts a model's engine. Takes: model (merged). */}}
{{- define "lmcache.engineCommand" -}}
{{- $modules := dict "vllm" "vllm.entrypoints.openai.api_server" "sglang" "sglang.launch_server" -}}
{{- .model.command | default (list "python3" "-m" (get $modules .model.engine)) | toYaml -}}
{{- end -}}

{{/* Arguments of vLLM. Takes: root, model (merged). */}}
{{- define "lmcache.vllmArgs" -}}
- --model
- {{ .model.model | quote }}
- --served-model-name
- {{ .model.model | quote }}
- --host
- {{ include "lmcache.anyHost" . | quote }}
- --port
- "8000"
{{- if gt (int .model.tensorParallelSize) 1 }}
- --tensor-parallel-size
- {{ int .model.tensorParallelSize | quote }}
{{- end }}
{{- if .model.tls.existingSecret }}
- --ssl-certfile
- /run/secrets/vllm-tls/tls.crt
- --ssl-keyfile
- /run/secrets/vllm-tls/tls.key
- --enable-ssl-refresh
{{- end }}
{{- if .model.connector.enabled }}
- --kv-transfer-config
- {{ include "lmcache.kvTransferConfig" . | fromYaml | toJson | quote }}
{{- end }}
{{- if .root.Values.kvEvents.enabled }}
- --kv-events-config
- {{ include "lmcache.kvEventsConfig" . | fromYaml | toJson | quote }}
{{- end }}
{{- with .model.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* llm-d's router reads the pod's address and the model in the topic; others read every topic. Takes: root, model (merged). */}}
{{- define "lmcache.kvEventsConfig" -}}
enable_kv_cache_events: true
publisher: zmq
endpoint: tcp://*:{{ int .root.Values.kvEvents.port }}
{{- with .root.Values.kvEvents.replayPort }}
replay_endpoint: tcp://*:{{ int . }}
{{- end }}
topic: {{ printf "kv@$(POD_IP):8000@%s" .model.model | quote }}
{{- end -}}

{{/*
A load that fails is computed again ("recompute"): vLLM's own default ends the request. Takes: root, model (merged).
*/}}
{{- define "lmcache.kvTransferConfig" -}}
kv_role: {{ get (dict "prefill" "kv_producer" "decode" "kv_consumer") .model.role | default "kv_both" }}
kv_load_failure_policy: recompute
{{- if eq .model.connector.kind "offloading-tier" }}
kv_connector: LMCacheOffloadingConnector
kv_connector_module_path: lmcache_core.integrations.vllm_tier
kv_connector_extra_config:
  spec_name: TieringOffloadingSpec
  cpu_bytes_to_use: {{ include "lmcache-common.bytes" (dict "name" "connector.hostMemory" "value" .model.connector.hostMemory) }}
  {{- if .root.Values.kvEvents.enabled }}
  self_describing_kv_events: true
  {{- end }}
  secondary_tiers:
    - type: LMCacheTier
      module_path: lmcache_core.integrations.vllm_tier
      sidecar_socket: {{ include "lmcache.socketPath" . }}
      {{- if .root.Values.kvEvents.enabled }}
      enable_kv_events: true
      {{- end }}
{{- else }}
kv_connector: LMCacheConnector
kv_connector_module_path: lmcache_core.integrations.vllm
kv_connector_extra_config:
  {{- merge (dict "lmcache.sidecar_socket" (include "lmcache.socketPath" .)) .model.connector.options | toYaml | nindent 2 }}
  {{- if and .root.Values.kvEvents.enabled (not (hasKey .model.connector.options "lmcache.kv_events")) }}
  lmcache.kv_events: true
  {{- end }}
{{- end }}
{{- end -}}

{{/*
The root file system is read-only and the user has no entry in /etc/passwd: everything that vLLM writes goes to its home volume, and
the libraries that ask who they run as get a name.
*/}}
{{- define "lmcache.vllmEnv" -}}
- {name: HOME, value: /home/vllm}
- {name: USER, value: vllm}
- {name: HF_HOME, value: /home/vllm/huggingface}
- {name: XDG_CACHE_HOME, value: /home/vllm/.cache}
- {name: VLLM_CACHE_ROOT, value: /home/vllm/.cache/vllm}
- {name: TRITON_CACHE_DIR, value: /home/vllm/.cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /home/vllm/.cache/torchinductor}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
- {name: DO_NOT_TRACK, value: "1"}
{{- with .model.huggingface }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .existingSecretKey | quote }}
{{- end }}
{{- end }}
{{- if .root.Values.kvEvents.enabled }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- if .model.connector.enabled }}
- name: PYTHONPATH
  value: {{ list .model.connector.pythonPath (printf "%s/python" (include "lmcache.payloadPath" .)) | compact | join ":" }}
{{- end }}
{{- end -}}

{{- define "lmcache.payloadPath" -}}
/opt/lmcache
{{- end -}}

{{/* Copies what vLLM is to import. Takes: root, model (merged). */}}
{{- define "lmcache.payloadContainer" -}}
- name: payload
  image: {{ include "lmcache-common.image" (dict "root" .root "image" .root.Values.payload.image "own" true) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [/payload/install, {{ include "lmcache.payloadPath" . }}]
  securityContext:
    {{- include "lmcache-common.containerSecurityContext" (dict "root" .root "values" .model) | nindent 4 }}
  resources:
    {{- toYaml .root.Values.payload.resources | nindent 4 }}
  volumeMounts:
    - {name: payload, mountPath: {{ include "lmcache.payloadPath" . }}}
{{- end -}}

{{/* One probe of vLLM. Takes: model (merged), probe. */}}
{{- define "lmcache.vllmProbe" -}}
{{- $scheme := ternary "HTTPS" "" (ne .model.tls.existingSecret "") -}}
{{- include "lmcache-common.httpProbe" (dict "path" "/health" "port" "http" "scheme" $scheme "probe" .probe) -}}
{{- end -}}

{{/* What is done before vLLM is told to end: new requests stop coming, those that it has are answered. Takes: root, model (merged). */}}
{{- define "lmcache.vllmPreStop" -}}
{{- $scheme := ternary "https" "http" (ne .model.tls.existingSecret "") -}}
exec:
  command:
    - python3
    - -c
    - {{ .root.Files.Get "files/stop_vllm.py" | toJson }}
    - {{ $scheme }}://localhost:8000/metrics
    - {{ .model.stop.graceSeconds | quote }}
    - {{ .model.stop.maxSeconds | quote }}
{{- end -}}

{{/* Size of /dev/shm, where vLLM keeps the host memory of its own offloading. Takes: model (merged). */}}
{{- define "lmcache.shmSize" -}}
{{- if and .model.connector.enabled (eq .model.connector.kind "offloading-tier") -}}
{{- $sum := 0 -}}
{{- range list .model.shmSize .model.connector.hostMemory -}}
{{- $sum = add $sum (include "lmcache-common.bytes" (dict "name" "size" "value" .) | int64) -}}
{{- end -}}
{{- $sum | toString | quote -}}
{{- else -}}
{{- .model.shmSize -}}
{{- end -}}
{{- end -}}

{{/* Mounts of the vLLM container. Takes: root, model (merged). */}}
{{- define "lmcache.vllmMounts" -}}
- {name: arena, mountPath: /run/lmcache/arena}
- {name: socket, mountPath: /run/lmcache/socket}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/vllm}
{{- if .model.connector.enabled }}
- {name: payload, mountPath: {{ include "lmcache.payloadPath" . }}, readOnly: true}
{{- end }}
{{- if .model.tls.existingSecret }}
- {name: vllm-tls, mountPath: /run/secrets/vllm-tls, readOnly: true}
{{- end }}
{{- with .model.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
