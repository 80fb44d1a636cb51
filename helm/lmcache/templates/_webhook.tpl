{{/* Name of the webhook's objects that belong to no namespace: two releases of one name may live in two namespaces. Takes: root. */}}
{{- define "lmcache.webhookClusterName" -}}
{{- printf "%s-%s" .root.Release.Namespace (include "lmcache-common.componentName" (dict "root" .root "component" "webhook")) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The Secret that the webhook serves with. Takes: root. */}}
{{- define "lmcache.webhookSecretName" -}}
{{- $name := printf "%s-tls" (include "lmcache-common.componentName" (dict "root" .root "component" "webhook")) -}}
{{- default $name .root.Values.webhook.certificate.existingSecret -}}
{{- end -}}

{{/* The names of its certificate. Takes: root. */}}
{{- define "lmcache.webhookNames" -}}
{{- $service := include "lmcache-common.componentName" (dict "root" .root "component" "webhook") -}}
- {{ $service }}.{{ .root.Release.Namespace }}.svc
- {{ $service }}.{{ .root.Release.Namespace }}.svc.cluster.local
{{- end -}}

{{/*
The certificate in the cluster's Secret, else a new one for ten years. The authority's key is not kept.
Each call may make another one: call it once per rendering. Takes: root. Gives ca.crt, tls.crt and tls.key in base64, as YAML.
*/}}
{{- define "lmcache.webhookCertificate" -}}
{{- $held := lookup "v1" "Secret" .root.Release.Namespace (include "lmcache.webhookSecretName" .) | default dict -}}
{{- $kept := pick (default dict $held.data) "ca.crt" "tls.crt" "tls.key" -}}
{{- if eq (len $kept) 3 -}}
{{- toYaml $kept -}}
{{- else -}}
{{- $days := 3650 -}}
{{- $authority := genCA "lmcache-webhook authority" $days -}}
{{- $pair := genSignedCert "lmcache-webhook" nil (include "lmcache.webhookNames" . | fromYamlArray) $days $authority -}}
{{- dict "ca.crt" (b64enc $authority.Cert) "tls.crt" (b64enc $pair.Cert) "tls.key" (b64enc $pair.Key) | toYaml -}}
{{- end -}}
{{- end -}}

{{- define "lmcache.webhookConfig" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- $values := .root.Values -}}
{{- $webhook := $values.webhook -}}
host: {{ include "lmcache.anyHost" . | quote }}
port: {{ $ports.webhook }}
health_host: {{ include "lmcache.anyHost" . | quote }}
health_port: {{ $ports.health }}
tls_cert_file: {{ include "lmcache.tlsPath" . }}/tls.crt
tls_key_file: {{ include "lmcache.tlsPath" . }}/tls.key
# API servers show no token; what is answered holds no secret.
allow_anonymous: true
sidecar_image: {{ include "lmcache.sidecarImage" (dict "root" .root "sidecar" $values.sidecar "serdes" (list "remote_serde" "peer_serde")) }}
payload_image: {{ include "lmcache-common.image" (dict "root" .root "image" $values.payload.image "own" true) }}
image_pull_policy: {{ $values.images.pullPolicy }}
sidecar_template_file: /etc/lmcache/template.yaml
{{- range $option, $size := dict "arena_gb" "arenaSize" "max_arena_gb" "maxArenaSize" "disk_gb" "diskSize" "max_disk_gb" "maxDiskSize" }}
{{- with get $webhook $size }}
{{ $option }}: {{ include "lmcache-common.gib" (dict "name" (printf "webhook.%s" $size) "value" .) }}
{{- end }}
{{- end }}
connector: {{ $values.modelDefaults.connector.kind }}
{{- with $values.modelDefaults.connector.hostMemory }}
host_memory_gb: {{ include "lmcache-common.gib" (dict "name" "modelDefaults.connector.hostMemory" "value" . "min" "64Mi" "max" "64Ti") }}
{{- end }}
{{- with $values.kvEvents }}
{{- if .enabled }}
kv_events_port: {{ int .port }}
{{- with .replayPort }}
kv_events_replay_port: {{ int . }}
{{- end }}
{{- end }}
{{- end }}
memory_overhead_mb: {{ include "lmcache-common.mib" (dict "name" "sidecar.memoryOverhead" "value" $values.sidecar.memoryOverhead) }}
payload_resources: {{ toJson $values.payload.resources }}
run_as_user: {{ if $values.security.runAsUser }}{{ int64 $values.security.runAsUser }}{{ else }}null{{ end }}
{{- if and $values.broker.enabled $values.broker.discovery.enabled }}
kubernetes_service: {{ include "lmcache.sidecarsName" . }}
kubernetes_namespace: {{ .root.Release.Namespace }}
{{- end }}
sidecar_options:
  {{- include "lmcache.webhookSidecarOptions" . | trim | nindent 2 }}
tenants:
  {{- include "lmcache.webhookTenants" . | trim | nindent 2 }}
{{ include "lmcache.setOptions" $webhook.config }}
{{- end -}}

{{/* What sidecars that are injected have in common with those of `models`. Takes: root. */}}
{{- define "lmcache.webhookSidecarOptions" -}}
{{- $values := .root.Values -}}
{{- if $values.storage.enabled }}
remote_url: {{ include "lmcache.storageUrl" . }}
{{- end }}
{{- include "lmcache.peerSettings" . }}
{{- if $values.tls.enabled }}
tls_peer_name: {{ include "lmcache.tlsPeerName" . }}
{{- if $values.tls.mutual }}
tls_client_ca_file: /run/secrets/lmcache-tls/ca.crt
tls_client_cert_file: /run/secrets/lmcache-tls/tls.crt
tls_client_key_file: /run/secrets/lmcache-tls/tls.key
{{- end }}
{{- end }}
{{- $config := dict -}}
{{- range $name, $value := omit $values.sidecar.config "disk_serde" -}}
{{- if not (or (kindIs "map" $value) (kindIs "slice" $value)) -}}
{{- $_ := set $config $name $value -}}
{{- end -}}
{{- end }}
{{ include "lmcache.setOptions" $config }}
{{- end -}}

{{/* The release's own tenant in its own namespace, then those of the values. Takes: root. */}}
{{- define "lmcache.webhookTenants" -}}
{{- $values := .root.Values -}}
- name: {{ ternary $values.auth.tenant "default" $values.auth.enabled | quote }}
  namespaces: [{{ .root.Release.Namespace }}]
  {{- if $values.auth.enabled }}
  credentials_secret: {{ include "lmcache.authSecretName" . }}
  {{- end }}
  keys_secret: {{ include "lmcache.keysSecretName" . }}
  {{- if $values.tls.enabled }}
  tls_secret: {{ include "lmcache.tlsSecretName" (dict "root" .root "component" "vllm") }}
  {{- end }}
{{- range $values.webhook.tenants }}
- name: {{ .name | quote }}
  namespaces: {{ toJson .namespaces }}
  {{- range $option, $secret := dict "credentials_secret" .credentialsSecret "keys_secret" .keysSecret "tls_secret" .tlsSecret }}
  {{- with $secret }}
  {{ $option }}: {{ . }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Laid over each injected sidecar: what the sidecars of `models` ask for, then `webhook.sidecarTemplate`. Takes: root. */}}
{{- define "lmcache.webhookTemplate" -}}
{{- $resources := dict "resources" (deepCopy .root.Values.sidecar.resources) -}}
{{- mergeOverwrite $resources (deepCopy .root.Values.webhook.sidecarTemplate) | toYaml -}}
{{- end -}}

{{/* Contradictions; part of requirements.yaml. Takes: the root itself. */}}
{{- define "lmcache.refuseWebhook" }}
{{- $webhook := .Values.webhook }}
{{- $certificate := $webhook.certificate }}
{{- if $webhook.enabled }}
{{- include "lmcache.refuseShortGrace" (dict "name" "webhook" "values" $webhook "before" $webhook.preStopSeconds "config" $webhook.config) }}
{{- include "lmcache.refuseNoCpu" (dict "name" "webhook" "resources" $webhook.resources) }}
{{- if and $certificate.existingSecret $certificate.certManager.enabled }}
{{- fail "webhook.certificate.existingSecret and webhook.certificate.certManager are both set: choose one." }}
{{- end }}
{{- if and $certificate.existingSecret (not $certificate.caBundle) }}
{{- fail "webhook.certificate.existingSecret is set, but webhook.certificate.caBundle is empty: the API server must know whom to trust." }}
{{- end }}
{{- if and $certificate.caBundle (not $certificate.existingSecret) }}
{{- fail "webhook.certificate.caBundle is set, but webhook.certificate.existingSecret is empty: set both, or neither." }}
{{- end }}
{{- if and .Values.tls.enabled .Values.tls.existingCaSecret }}
{{- fail "webhook.enabled with tls.existingCaSecret: injected sidecars read ca.crt from the Secret of their certificate; put it there." }}
{{- end }}
{{- range $webhook.tenants }}
{{- if and $.Values.tls.enabled (not .tlsSecret) }}
{{- fail (printf "webhook.tenants (%s): tls.enabled is true, but tlsSecret is not set: name the Secret with tls.crt, tls.key and ca.crt in its namespaces." .name) }}
{{- end }}
{{- if and $.Values.auth.enabled (not .credentialsSecret) }}
{{- fail (printf "webhook.tenants (%s): auth.enabled is true, but credentialsSecret is not set: name the Secret with tokens.yaml and sidecar-token in its namespaces." .name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
