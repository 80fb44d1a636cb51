{{/* Arguments of vLLM. Takes: model (merged). */}}
{{- define "lmcache.vllmArgs" -}}
- --model
- {{ .model.model | quote }}
- --served-model-name
- {{ .model.model | quote }}
- --port
- "8000"
{{- if .model.connector.enabled }}
- --kv-transfer-config
- {{ include "lmcache.kvTransferConfig" . | fromYaml | toJson | quote }}
{{- end }}
{{- with .model.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A load that fails is computed again ("recompute"): vLLM's own default ends the request. */}}
{{- define "lmcache.kvTransferConfig" -}}
kv_connector: LMCacheConnector
kv_connector_module_path: lmcache_core.integrations.vllm
kv_role: kv_both
kv_load_failure_policy: recompute
kv_connector_extra_config:
  socket_path: {{ include "lmcache.socketPath" . }}
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
{{- with .model.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
