{{/* The Secret with the tokens. Takes: root. */}}
{{- define "lmcache.authSecretName" -}}
{{- default (include "lmcache-common.componentName" (dict "root" .root "component" "auth")) .root.Values.auth.existingSecret -}}
{{- end -}}

{{/* The Secret with ticket keys and salt. Takes: root. */}}
{{- define "lmcache.keysSecretName" -}}
{{- default (include "lmcache-common.componentName" (dict "root" .root "component" "keys")) .root.Values.keys.existingSecret -}}
{{- end -}}

{{- define "lmcache.credentialsPath" -}}
/run/secrets/lmcache
{{- end -}}

{{/* Settings of a server that checks tokens, and encrypts what it serves. Takes: root. */}}
{{- define "lmcache.authSettings" -}}
{{- if .root.Values.auth.enabled -}}
auth_tokens_file: {{ include "lmcache.credentialsPath" . }}/tokens.yaml
{{- if not .root.Values.tls.enabled }}
allow_plaintext: true
{{- end }}
{{- else -}}
allow_anonymous: true
{{- end }}
{{- include "lmcache.tlsServerSettings" . }}
{{- end -}}

{{/* Settings of a server that also calls others, with a token of its own. Takes: root, token (its key in the Secret). */}}
{{- define "lmcache.callerSettings" -}}
{{ include "lmcache.authSettings" . }}
{{- if .root.Values.auth.enabled }}
service_token_file: {{ include "lmcache.credentialsPath" . }}/{{ .token }}
tenant: {{ .root.Values.auth.tenant | quote }}
{{- end }}
{{- include "lmcache.tlsCallerSettings" . }}
{{- end -}}

{{/*
Volumes with just those secrets that a component reads, if any: tokens and keys, its certificate, files for Redis.
Anybody in the container may read the files: who they belong to is not for us to rely on, and there is but one user.
Takes: root, component, auth (keys of the token Secret; left out where auth is off), keys (keys of the other), asksRedis (optional).
*/}}
{{- define "lmcache.secretVolumes" -}}
{{- $auth := ternary .auth list .root.Values.auth.enabled -}}
{{- if or $auth .keys }}
- name: credentials
  projected:
    defaultMode: 0444
    sources:
      {{- with $auth }}
      - secret:
          name: {{ include "lmcache.authSecretName" $ | quote }}
          items:
            {{- range . }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
      {{- with .keys }}
      - secret:
          name: {{ include "lmcache.keysSecretName" $ | quote }}
          items:
            {{- range . }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
{{- end }}
{{- include "lmcache.tlsVolumes" . }}
{{- if .asksRedis }}
{{- with include "lmcache.redisFiles" . }}
- name: redis-files
  projected:
    defaultMode: 0444
    sources:
      {{- . | trim | nindent 6 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The mounts of those volumes. Takes: the same. */}}
{{- define "lmcache.secretMounts" -}}
{{- if or .root.Values.auth.enabled .keys }}
- {name: credentials, mountPath: {{ include "lmcache.credentialsPath" . }}, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: {{ include "lmcache.tlsPath" . }}, readOnly: true}
{{- end }}
{{- if and .asksRedis (include "lmcache.redisFiles" .) }}
- {name: redis-files, mountPath: {{ include "lmcache.redisFilesPath" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* The token file that servers read. Takes: root, tokens (holder -> token). */}}
{{- define "lmcache.tokensFile" -}}
tokens:
{{- range $holder, $token := .tokens }}
  - name: {{ $holder }}
    tenant: {{ $.root.Values.auth.tenant | quote }}
    role: {{ get (dict "operator" "admin" "storage" "storage") $holder | default "client" }}
    token_sha256: {{ sha256sum $token | quote }}
{{- end }}
{{- end -}}
