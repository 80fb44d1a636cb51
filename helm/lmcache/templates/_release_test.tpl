{{/* What it asks. Takes: root. */}}
{{- define "lmcache.releaseTestArguments" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- $values := .root.Values -}}
{{- $scheme := ternary "https" "http" $values.tls.enabled -}}
{{- if $values.storage.enabled }}
- --storage-url={{ include "lmcache.storageUrl" . }}
- --guarded-url={{ $scheme }}://{{ include "lmcache-common.serviceHost" (dict "root" .root "component" "storage") }}:{{ $ports.storage }}/v1/chunks
{{- end }}
{{- range $component, $path := dict "lookup" "/v1/instances" "broker" "/v1/peers" }}
{{- if (get $values $component).enabled }}
- --guarded-url={{ $scheme }}://{{ include "lmcache-common.serviceHost" (dict "root" $.root "component" $component) }}:{{ get $ports $component }}{{ $path }}
{{- end }}
{{- end }}
{{- if $values.auth.enabled }}
- --token-file={{ include "lmcache.credentialsPath" . }}/sidecar-token
{{- end }}
{{- if $values.tls.enabled }}
- --tls-ca-file={{ include "lmcache.tlsPath" . }}/ca.crt
- --tls-peer-name={{ include "lmcache.tlsPeerName" . }}
{{- if $values.tls.mutual }}
- --tls-cert-file={{ include "lmcache.tlsPath" . }}/tls.crt
- --tls-key-file={{ include "lmcache.tlsPath" . }}/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{/* What of the Secrets it reads: it comes as a sidecar does. Takes: root. */}}
{{- define "lmcache.releaseTestSecrets" -}}
component: vllm
auth: [sidecar-token]
keys: []
{{- end -}}
