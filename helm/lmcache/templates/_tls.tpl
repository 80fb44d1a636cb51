{{- define "lmcache.tlsPath" -}}
/run/secrets/tls
{{- end -}}

{{/* Scheme of lm:// addresses. Takes: root. */}}
{{- define "lmcache.lmScheme" -}}
{{- ternary "lm+tls" "lm" .root.Values.tls.enabled -}}
{{- end -}}

{{/* The name that certificates of sidecars and storage have in common: pods are reached at addresses that none can name. Takes: root. */}}
{{- define "lmcache.tlsPeerName" -}}
{{- default (printf "%s.%s.svc" (include "lmcache-common.fullname" .) .root.Release.Namespace) .root.Values.tls.peerName -}}
{{- end -}}

{{/* The Secret with a component's certificate. Takes: root, component. */}}
{{- define "lmcache.tlsSecretName" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.certManager.enabled -}}
{{- include "lmcache-common.componentName" . }}-tls
{{- else -}}
{{- default $tls.existingSecret (get $tls.existingSecrets (ternary "sidecar" .component (eq .component "vllm"))) -}}
{{- end -}}
{{- end -}}

{{/* The names of a component's certificate. Takes: root, component. */}}
{{- define "lmcache.tlsNames" -}}
{{- $name := include "lmcache-common.componentName" . -}}
{{- $namespace := .root.Release.Namespace -}}
{{- if has .component (list "vllm" "storage") -}}
- {{ include "lmcache.tlsPeerName" . | quote }}
{{ end }}
{{- if eq .component "storage" -}}
- {{ printf "%q" (printf "*.%s-headless.%s.svc" $name $namespace) }}
- {{ $name }}-headless.{{ $namespace }}.svc
{{ end }}
{{- if ne .component "vllm" -}}
- {{ $name }}.{{ $namespace }}.svc
- {{ $name }}.{{ $namespace }}
- {{ $name }}
{{ end -}}
- localhost
{{- end -}}

{{/* Settings of a server. Takes: root. */}}
{{- define "lmcache.tlsServerSettings" -}}
{{- if .root.Values.tls.enabled }}
tls_cert_file: {{ include "lmcache.tlsPath" . }}/tls.crt
tls_key_file: {{ include "lmcache.tlsPath" . }}/tls.key
{{- if .root.Values.tls.mutual }}
tls_client_ca_file: {{ include "lmcache.tlsPath" . }}/ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings of who calls others. Takes: root. */}}
{{- define "lmcache.tlsCallerSettings" -}}
{{- if .root.Values.tls.enabled }}
tls_ca_file: {{ include "lmcache.tlsPath" . }}/ca.crt
tls_peer_name: {{ include "lmcache.tlsPeerName" . | quote }}
{{- if .root.Values.tls.mutual }}
tls_client_cert_file: {{ include "lmcache.tlsPath" . }}/tls.crt
tls_client_key_file: {{ include "lmcache.tlsPath" . }}/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{/* Non-empty where services are probed at a port of its own: a kubelet has no certificate to show. Takes: root. */}}
{{- define "lmcache.hasHealthPort" -}}
{{- if and .root.Values.tls.enabled .root.Values.tls.mutual -}}
true
{{- end -}}
{{- end -}}

{{/* Settings of that port. Takes: root. */}}
{{- define "lmcache.healthSettings" -}}
{{- if include "lmcache.hasHealthPort" . }}
health_host: {{ include "lmcache.anyHost" . | quote }}
health_port: {{ (include "lmcache.ports" . | fromYaml).health }}
{{- end }}
{{- end -}}

{{/* The container's port for it. Takes: root. */}}
{{- define "lmcache.healthPort" -}}
{{- if include "lmcache.hasHealthPort" . }}
- {name: health, containerPort: {{ (include "lmcache.ports" . | fromYaml).health }}}
{{- end }}
{{- end -}}

{{/* The port that serves probes and metrics of a component (but vllm). Takes: root, component. */}}
{{- define "lmcache.metricsPort" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- get $ports (ternary "health" .component (ne (include "lmcache.hasHealthPort" .) "")) -}}
{{- end -}}

{{/* How that port is called, and what is spoken there, as YAML: port, scheme. Takes: root. */}}
{{- define "lmcache.probedAt" -}}
{{- if include "lmcache.hasHealthPort" . -}}
port: health
{{- else -}}
port: http
{{- if .root.Values.tls.enabled }}
scheme: HTTPS
{{- end }}
{{- end }}
{{- end -}}

{{/* Takes: root, values (with probes). */}}
{{- define "lmcache.probes" -}}
{{- include "lmcache-common.probes" (merge (dict "probes" .values.probes) (include "lmcache.probedAt" . | fromYaml)) -}}
{{- end -}}

{{/* Takes: root, component. */}}
{{- define "lmcache.tlsVolumes" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.enabled }}
- name: tls
  projected:
    defaultMode: 0444
    sources:
      - secret:
          name: {{ include "lmcache.tlsSecretName" . | quote }}
          items:
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
            {{- if not $tls.existingCaSecret }}
            - {key: ca.crt, path: ca.crt}
            {{- end }}
      {{- with $tls.existingCaSecret }}
      - secret:
          name: {{ . | quote }}
          items:
            - {key: ca.crt, path: ca.crt}
      {{- end }}
{{- end }}
{{- end -}}
