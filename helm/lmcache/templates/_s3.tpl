{{/* Settings of the bucket, where there is one. Takes: root. */}}
{{- define "lmcache.s3Settings" -}}
{{- $s3 := .root.Values.storage.s3 -}}
{{- if $s3.bucket }}
s3_bucket: {{ $s3.bucket | quote }}
s3_prefix: {{ $s3.prefix | quote }}
{{- with $s3.endpointUrl }}
s3_endpoint_url: {{ . | quote }}
{{- end }}
s3_region: {{ $s3.region | quote }}
s3_path_style: {{ $s3.pathStyle }}
s3_timeout_s: {{ $s3.timeoutSeconds }}
{{- if $s3.existingSecret }}
s3_access_key_file: {{ include "lmcache.s3Path" . }}/access-key
s3_secret_key_file: {{ include "lmcache.s3Path" . }}/secret-key
{{- end }}
{{- if $s3.existingCaSecret }}
s3_ca_file: {{ include "lmcache.s3Path" . }}/ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{- define "lmcache.s3Path" -}}
/run/secrets/s3
{{- end -}}

{{/* The volume with the files that they name, if any. Takes: root. */}}
{{- define "lmcache.s3Volume" -}}
{{- $s3 := .root.Values.storage.s3 -}}
{{- if or $s3.existingSecret $s3.existingCaSecret -}}
- name: s3-files
  projected:
    defaultMode: 0444
    sources:
      {{- with $s3.existingSecret }}
      - secret:
          name: {{ . | quote }}
          items:
            - {key: {{ $s3.accessKeyKey | quote }}, path: access-key}
            - {key: {{ $s3.secretKeyKey | quote }}, path: secret-key}
      {{- end }}
      {{- with $s3.existingCaSecret }}
      - secret:
          name: {{ . | quote }}
          items:
            - {key: ca.crt, path: ca.crt}
      {{- end }}
{{- end }}
{{- end -}}

{{/* The rule that lets storage reach it, wherever that is. Takes: root. */}}
{{- define "lmcache.s3Egress" -}}
{{- $s3 := .root.Values.storage.s3 -}}
{{- if $s3.bucket -}}
{{- $port := ternary 80 443 (hasPrefix "http://" $s3.endpointUrl) -}}
{{- with regexFind ":[0-9]+/?$" $s3.endpointUrl -}}
{{- $port = trimAll ":/" . | int -}}
{{- end -}}
{{- include "lmcache-common.anywhere" (dict "ports" (prepend $s3.extraPorts $port | uniq)) -}}
{{- end -}}
{{- end -}}
