{{/*
The settings file of each component: first what the chart decides (addresses, ports, paths), then `config` from the values, unchanged.
Each takes: root; that of the sidecar also the merged `model`.
*/}}

{{- define "lmcache.storageConfig" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- $values := .root.Values.storage -}}
host: {{ include "lmcache.anyHost" . | quote }}
port: {{ $ports.storage }}
lm_host: {{ include "lmcache.anyHost" . | quote }}
lm_port: {{ $ports.storageLm }}
{{- include "lmcache.healthSettings" . }}
{{- include "lmcache.compatSettings" . }}
{{ include "lmcache.callerSettings" (dict "root" .root "token" "storage-token") }}
{{- include "lmcache.peerSettings" . }}
memory_gb: {{ include "lmcache-common.gib" (dict "name" "storage.memorySize" "value" $values.memorySize) }}
disk_path: /var/lib/lmcache/chunks
disk_gb: {{ include "lmcache.storageDiskGb" . }}
{{- include "lmcache.quotaSettings" . }}
{{- include "lmcache.s3Settings" . }}
{{ include "lmcache.setOptions" $values.config }}
{{- end -}}

{{/* What of the volume the disk tier may fill. Takes: root. */}}
{{- define "lmcache.storageDiskGb" -}}
{{- $values := .root.Values.storage -}}
{{- if $values.diskSize -}}
{{- include "lmcache-common.gib" (dict "name" "storage.diskSize" "value" $values.diskSize) -}}
{{- else -}}
{{- $gib := include "lmcache-common.gib" (dict "name" "storage.persistence.size" "value" $values.persistence.size) -}}
{{- divf (mulf 9 $gib) 10 | toJson -}}
{{- end -}}
{{- end -}}

{{/* What one tenant may take of the tiers. Takes: root. */}}
{{- define "lmcache.quotaSettings" -}}
{{- $storage := .root.Values.storage -}}
{{- $settings := dict -}}
{{- range $option, $tier := dict "tenant_quota_gb" "memory" "tenant_disk_quota_gb" "disk" -}}
{{- with get $storage.tenantQuota $tier -}}
{{- $gib := include "lmcache-common.gib" (dict "name" (printf "storage.tenantQuota.%s" $tier) "value" .) -}}
{{- $_ := set $settings $option ($gib | float64) -}}
{{- end -}}
{{- end -}}
{{- $quotas := dict -}}
{{- range $tenant, $quota := $storage.tenantQuotas -}}
{{- $own := dict -}}
{{- range $tier := list "memory" "disk" -}}
{{- with get (default dict $quota) $tier -}}
{{- $gib := include "lmcache-common.gib" (dict "name" (printf "storage.tenantQuotas.%s.%s" $tenant $tier) "value" .) -}}
{{- $_ := set $own (printf "%s_gb" $tier) ($gib | float64) -}}
{{- end -}}
{{- end -}}
{{- with $own -}}
{{- $_ := set $quotas $tenant . -}}
{{- end -}}
{{- end -}}
{{- with $quotas -}}
{{- $_ := set $settings "tenant_quotas" . -}}
{{- end -}}
{{- with $settings }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The listener for LMCache clients. Its host is no loopback address, and they show no token: the option that says so weakens nothing else. */}}
{{- define "lmcache.compatSettings" -}}
{{- with .root.Values.storage.compat }}
{{- if .enabled }}
lmcache_compat_host: {{ include "lmcache.anyHost" $ | quote }}
lmcache_compat_port: {{ (include "lmcache.ports" $ | fromYaml).compat }}
lmcache_compat_dialect: {{ .dialect }}
lmcache_compat_tenant: {{ .tenant | quote }}
lmcache_compat_max_connections: {{ int .maxConnections }}
{{- if $.root.Values.auth.enabled }}
allow_anonymous: true
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lmcache.lookupConfig" -}}
host: {{ include "lmcache.anyHost" . | quote }}
port: {{ (include "lmcache.ports" . | fromYaml).lookup }}
{{- include "lmcache.healthSettings" . }}
{{ include "lmcache.authSettings" . }}
{{- include "lmcache.redisSettings" . }}
{{ include "lmcache.setOptions" .root.Values.lookup.config }}
{{- end -}}

{{- define "lmcache.brokerConfig" -}}
host: {{ include "lmcache.anyHost" . | quote }}
port: {{ (include "lmcache.ports" . | fromYaml).broker }}
{{- include "lmcache.healthSettings" . }}
{{ include "lmcache.authSettings" . }}
ticket_keys_file: {{ include "lmcache.credentialsPath" . }}/ticket-keys
page_title: {{ printf "%s in namespace %s" .root.Release.Name .root.Release.Namespace | quote }}
{{- include "lmcache.redisSettings" . }}
{{- include "lmcache.discoverySettings" . }}
{{ include "lmcache.setOptions" .root.Values.broker.config }}
{{- end -}}

{{- define "lmcache.discoverySettings" -}}
{{- if .root.Values.broker.discovery.enabled }}
discovery: kubernetes
discovery_tenant: {{ ternary .root.Values.auth.tenant "default" .root.Values.auth.enabled | quote }}
kubernetes_service: {{ include "lmcache.sidecarsName" . }}
kubernetes_namespace: {{ .root.Release.Namespace | quote }}
kubernetes_tls: {{ .root.Values.tls.enabled }}
{{- end }}
{{- if .root.Values.broker.podDeletionCost.enabled }}
pod_deletion_cost: true
{{- end }}
{{- end -}}

{{- define "lmcache.sidecarConfig" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- $sidecar := .model.sidecar -}}
host: 127.0.0.1
port: {{ $ports.sidecar }}
health_host: {{ include "lmcache.anyHost" . | quote }}
health_port: {{ $ports.health }}
lm_host: {{ include "lmcache.anyHost" . | quote }}
lm_port: {{ $ports.sidecarLm }}
{{ include "lmcache.callerSettings" (dict "root" .root "token" "sidecar-token") }}
ticket_keys_file: {{ include "lmcache.credentialsPath" . }}/ticket-keys
salt_file: {{ include "lmcache.credentialsPath" . }}/salt
{{- if .root.Values.storage.enabled }}
remote_url: {{ include "lmcache.storageUrl" . }}
{{- end }}
{{- include "lmcache.peerSettings" . }}
socket_path: {{ include "lmcache.socketPath" . }}
{{- if $sidecar.mover.enabled }}
peer_transport: nixl
mover_socket: {{ include "lmcache.moverSocket" . }}
{{- end }}
arena_path: /run/lmcache/arena
arena_gb: {{ include "lmcache-common.gib" (dict "name" "sidecar.arenaSize" "value" $sidecar.arenaSize) }}
{{- with $sidecar.diskSize }}
disk_path: /var/lib/lmcache/chunks
disk_gb: {{ include "lmcache-common.gib" (dict "name" "sidecar.diskSize" "value" .) }}
{{- end }}
{{ include "lmcache.setOptions" $sidecar.config }}
{{- end -}}

{{/*
Those options of a `config` that are not null, as YAML: versions of Helm differ in whether they keep a null. A rate is a number also where --set made a string of it.
Takes: the map.
*/}}
{{- define "lmcache.setOptions" -}}
{{- $set := dict -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $set $name $value -}}
{{- end -}}
{{- end -}}
{{- with $set.rate_limit_per_tenant -}}
{{- $_ := set $set "rate_limit_per_tenant" (float64 .) -}}
{{- end -}}
{{- toYaml $set -}}
{{- end -}}

{{- define "lmcache.socketPath" -}}
/run/lmcache/socket/sidecar.sock
{{- end -}}

{{- define "lmcache.moverSocket" -}}
/run/lmcache/mover/mover.sock
{{- end -}}
