{{/* Arguments of SGLang. Takes: root, model (merged). */}}
{{- define "lmcache.sglangArgs" -}}
- --model-path
- {{ .model.model | quote }}
- --served-model-name
- {{ .model.model | quote }}
- --host
- {{ include "lmcache.anyHost" . | quote }}
- --port
- "8000"
- --enable-metrics
{{- if gt (int .model.tensorParallelSize) 1 }}
- --tp-size
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
{{- if not (include "lmcache.hasOption" (dict "words" .model.extraArgs "option" "--page-size")) }}
- --page-size
- "64"
{{- end }}
- --enable-unified-cache-external-linker
- --unified-cache-external-linker-backend
- dynamic
- --unified-cache-external-linker-config
- {{ include "lmcache.linkerConfig" . | fromYaml | toJson | quote }}
{{- end }}
{{- with .model.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "lmcache.linkerConfig" -}}
linker: LMCacheLinker
linker_module_path: lmcache_core.integrations.sglang
linker_extra_config:
  {{- merge (dict "lmcache.sidecar_socket" (include "lmcache.socketPath" .)) .model.connector.options | toYaml | nindent 2 }}
{{- end -}}

{{/* "true" if one of these words is the option, also with its value behind "=". Takes: words, option. */}}
{{- define "lmcache.hasOption" -}}
{{- range .words -}}
{{- if eq (splitn "=" 2 .)._0 $.option -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* What no model with SGLang can have. Takes: root, model (merged), name. */}}
{{- define "lmcache.refuseSglang" }}
{{- if .model.role }}
{{- fail (printf "%s: engine is sglang, but prefill and decode are vLLM's: leave both out." .name) }}
{{- end }}
{{- if and .model.connector.enabled (ne .model.connector.kind "lmcache") }}
{{- fail (printf "%s: engine is sglang, but connector.kind %s is vLLM's own offloading: set it to lmcache." .name .model.connector.kind) }}
{{- end }}
{{- if contains "vllm" .model.image.repository }}
{{- fail (printf "%s: engine is sglang, but image.repository is %s: set image, for example {repository: lmsysorg/sglang, tag: v0.5.23}." .name .model.image.repository) }}
{{- end }}
{{- range $option := list "--enable-hierarchical-cache" "--hicache-storage-backend" "--enable-lmcache" "--enable-unified-cache-external-linker" "--unified-cache-external-linker-backend" "--unified-cache-external-linker-config" }}
{{- if and $.model.connector.enabled (include "lmcache.hasOption" (dict "words" (concat $.model.command $.model.extraArgs) "option" $option)) }}
{{- fail (printf "%s: extraArgs or command has %s, but one SGLang has one cache beside its own, and the chart sets it: leave it out and set connector.options, or set connector.enabled=false." $.name $option) }}
{{- end }}
{{- end }}
{{- end }}
