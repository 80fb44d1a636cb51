{{/* Ports are fixed: nothing else runs in the pods, and policies, services and settings must agree on them. */}}
{{- define "lmcache.ports" -}}
{storage: 8080, storageLm: 65432, lookup: 8081, broker: 8082, sidecar: 8083, health: 8084, sidecarLm: 65433, compat: 65434, redis: 6379, vllm: 8000, webhook: 8443}
{{- end -}}

{{/* Movers listen on ports of their own choice within these: one for the pod, and one for each peer that they read from. */}}
{{- define "lmcache.moverPorts" -}}
{first: 65440, last: 65535}
{{- end -}}

{{/* The ports of vLLM's KV events, as those of a container. Takes: root. */}}
{{- define "lmcache.kvEventsPorts" -}}
{{- with .root.Values.kvEvents -}}
{{- if .enabled -}}
- {name: kv-events, containerPort: {{ int .port }}}
{{- with .replayPort }}
- {name: kv-replay, containerPort: {{ int . }}}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The address that servers listen on. Takes: root. */}}
{{- define "lmcache.anyHost" -}}
{{- ternary "::" "0.0.0.0" (eq .root.Values.network.ipFamily "IPv6") -}}
{{- end -}}

{{/* The pod's own address as a part of a URL; Kubernetes fills in the variable. Takes: root. */}}
{{- define "lmcache.podHost" -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" (eq .root.Values.network.ipFamily "IPv6") -}}
{{- end -}}

{{/* Where the pod runs, so that peers close by serve it. Takes: the part of the variables that names the service. */}}
{{- define "lmcache.placeEnv" -}}
- name: LMCACHE_{{ . }}_NODE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
# Kubernetes puts this label on pods from 1.35 on; before that the zone is empty.
- name: LMCACHE_{{ . }}_ZONE
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['topology.kubernetes.io/zone']
{{- end -}}

{{/* Settings that name the other services. Takes: root. */}}
{{- define "lmcache.peerSettings" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- $scheme := ternary "https" "http" .root.Values.tls.enabled -}}
{{- if .root.Values.lookup.enabled }}
lookup_url: {{ $scheme }}://{{ include "lmcache-common.serviceHost" (dict "root" .root "component" "lookup") }}:{{ $ports.lookup }}
{{- end }}
{{- if .root.Values.broker.enabled }}
broker_url: {{ $scheme }}://{{ include "lmcache-common.serviceHost" (dict "root" .root "component" "broker") }}:{{ $ports.broker }}
{{- end }}
{{- end -}}

{{/* Name of the Service whose endpoints are all sidecars. Takes: root. */}}
{{- define "lmcache.sidecarsName" -}}
{{- include "lmcache-common.fullname" . }}-sidecars
{{- end -}}

{{/* Where a service has the URL of Redis from. Takes: root, component. */}}
{{- define "lmcache.redisUrlEnv" -}}
{{- $external := .root.Values.externalRedis -}}
{{- $variable := printf "LMCACHE_%s_REDIS_URL" (upper .component) -}}
{{- $scheme := ternary "rediss" "redis" .root.Values.tls.enabled -}}
{{- $name := include "lmcache-common.componentName" (dict "root" .root "component" "redis") -}}
{{- if .root.Values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ default $name .root.Values.redis.existingSecret | quote }}
      key: redis-password
- name: {{ $variable }}
  value: {{ $scheme }}://:$(REDIS_PASSWORD)@{{ $name }}.{{ .root.Release.Namespace }}.svc:6379/0
{{- else -}}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef:
      name: {{ default (include "lmcache-common.componentName" (dict "root" .root "component" "external-redis")) $external.existingSecret | quote }}
      key: {{ ternary $external.existingSecretKey "url" (ne $external.existingSecret "") | quote }}
{{- end }}
{{- end -}}
