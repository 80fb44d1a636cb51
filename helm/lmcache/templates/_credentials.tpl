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

{{/* Settings of a server that checks tokens. Takes: root. */}}
{{- define "lmcache.authSettings" -}}
{{- if .root.Values.auth.enabled -}}
auth_tokens_file: {{ include "lmcache.credentialsPath" . }}/tokens.yaml
allow_plaintext: true
{{- else -}}
allow_anonymous: true
{{- end }}
{{- end -}}

{{/* Settings of a server that also calls others, with a token of its own. Takes: root, token (its key in the Secret). */}}
{{- define "lmcache.callerSettings" -}}
{{ include "lmcache.authSettings" . }}
{{- if .root.Values.auth.enabled }}
service_token_file: {{ include "lmcache.credentialsPath" . }}/{{ .token }}
tenant: {{ .root.Values.auth.tenant | quote }}
{{- end }}
{{- end -}}

{{/*
A volume with just the named keys of the two Secrets; nothing where no key is left.
Takes: root, auth (keys of the token Secret; left out where auth is off), keys (keys of the other).
*/}}
{{- define "lmcache.credentialsVolume" -}}
{{- $auth := ternary .auth list .root.Values.auth.enabled -}}
{{- if or $auth .keys -}}
- name: credentials
  projected:
    defaultMode: 0440
    sources:
      {{- with $auth }}
      - secret:
          name: {{ include "lmcache.authSecretName" $ }}
          items:
            {{- range . }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
      {{- with .keys }}
      - secret:
          name: {{ include "lmcache.keysSecretName" $ }}
          items:
            {{- range . }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
{{- end }}
{{- end -}}

{{/* The mount of that volume. Takes: root, auth, keys. */}}
{{- define "lmcache.credentialsMount" -}}
{{- if or .root.Values.auth.enabled .keys -}}
- name: credentials
  mountPath: {{ include "lmcache.credentialsPath" . }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* The token file that servers read. Takes: root, tokens (holder -> token). */}}
{{- define "lmcache.tokensFile" -}}
tokens:
{{- range $holder, $token := .tokens }}
  - name: {{ $holder }}
    tenant: {{ $.root.Values.auth.tenant | quote }}
    role: {{ ternary "admin" "client" (eq $holder "operator") }}
    token_sha256: {{ sha256sum $token | quote }}
{{- end }}
{{- end -}}
