{{/*
What lookup and broker keep is soft state: nothing is written to disk. A full Redis takes no more, which waits then; were it to drop
something, that might be a lease. Takes: root.
*/}}
{{- define "lmcache.redisConfig" -}}
{{- $v6 := eq .root.Values.network.ipFamily "IPv6" -}}
bind {{ ternary "::" "0.0.0.0" $v6 }}
{{- $port := (include "lmcache.ports" . | fromYaml).redis }}
{{- if .root.Values.tls.enabled }}
port 0
tls-port {{ $port }}
tls-cert-file {{ include "lmcache.tlsPath" . }}/tls.crt
tls-key-file {{ include "lmcache.tlsPath" . }}/tls.key
tls-ca-cert-file {{ include "lmcache.tlsPath" . }}/ca.crt
tls-auth-clients {{ ternary "yes" "no" .root.Values.tls.mutual }}
{{- else }}
port {{ $port }}
{{- end }}
dir /data
save ""
appendonly no
maxmemory {{ include "lmcache-common.bytes" (dict "name" "redis.maxMemory" "value" .root.Values.redis.maxMemory) }}
maxmemory-policy noeviction
{{- end -}}

{{/*
Starts Redis with its password, which comes from a file and over standard input: it is in no argument and no variable.
The here-document keeps Redis process 1, so that it gets the signal to stop.
*/}}
{{- define "lmcache.redisCommand" -}}
exec redis-server /etc/redis/redis.conf - <<END
requirepass "$(cat /run/secrets/redis/redis-password)"
END
{{- end -}}

{{/* Asks Redis for a PONG; the password does not become an argument here either. Takes: root. */}}
{{- define "lmcache.redisPing" -}}
{{- $tls := "" -}}
{{- if .root.Values.tls.enabled -}}
{{- $path := include "lmcache.tlsPath" . -}}
{{- $tls = printf " --tls --cacert %s/ca.crt" $path -}}
{{- if .root.Values.tls.mutual -}}
{{- $tls = printf "%s --cert %s/tls.crt --key %s/tls.key" $tls $path $path -}}
{{- end -}}
{{- end -}}
REDISCLI_AUTH="$(cat /run/secrets/redis/redis-password)" redis-cli{{ $tls }} ping | grep -q PONG
{{- end -}}

{{/* The rule that lets lookup and broker reach it, or one of your own wherever that is. Takes: root. */}}
{{- define "lmcache.redisEgress" -}}
{{- if .root.Values.redis.enabled -}}
- to:
    {{- include "lmcache-common.podPeer" (dict "root" .root "component" "redis") | nindent 4 }}
  ports:
    - {port: {{ (include "lmcache.ports" . | fromYaml).redis }}, protocol: TCP}
{{- else -}}
{{- include "lmcache-common.anywhere" (dict "ports" .root.Values.externalRedis.ports) }}
{{- end }}
{{- end -}}

{{/*
Changes with the URL of a Redis of your own, which pods read once, at their start; "" where the chart does not know it. A user who may see pods
sees what comes of it, and the URL holds a password: so it goes through scrypt, where a plain digest could be tried out. Takes: root.
*/}}
{{- define "lmcache.redisUrlMark" -}}
{{- with .root.Values.externalRedis.url -}}
{{- derivePassword 1 "maximum" . (printf "%s/%s" $.root.Release.Namespace $.root.Release.Name) "redis-url" -}}
{{- end -}}
{{- end -}}

{{- define "lmcache.redisFilesPath" -}}
/run/secrets/redis-files
{{- end -}}

{{/* What of Secrets a Redis of your own asks for, as a projected volume's sources; nothing for the bundled one. Takes: root. */}}
{{- define "lmcache.redisFiles" -}}
{{- if not .root.Values.redis.enabled -}}
{{- $external := .root.Values.externalRedis -}}
{{- with $external.tls.existingSecret }}
- secret:
    name: {{ . | quote }}
    items:
      - {key: ca.crt, path: ca.crt}
      {{- if $external.tls.clientCertificate }}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- end }}
{{- end }}
{{- with $external.sentinel.existingSecret }}
- secret:
    name: {{ . | quote }}
    items:
      - {key: {{ $external.sentinel.existingSecretKey | quote }}, path: sentinel-password}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Settings of a client of Redis, apart from the URL. Takes: root. */}}
{{- define "lmcache.redisSettings" -}}
{{- $external := .root.Values.externalRedis -}}
{{- $path := include "lmcache.tlsPath" . -}}
{{- $encrypts := .root.Values.tls.enabled -}}
{{- $shows := .root.Values.tls.mutual -}}
{{- if not .root.Values.redis.enabled -}}
{{- $path = include "lmcache.redisFilesPath" . -}}
{{- $encrypts = ne $external.tls.existingSecret "" -}}
{{- $shows = $external.tls.clientCertificate -}}
{{- end -}}
{{- if $encrypts }}
redis_tls_ca_file: {{ $path }}/ca.crt
{{- if $shows }}
redis_tls_cert_file: {{ $path }}/tls.crt
redis_tls_key_file: {{ $path }}/tls.key
{{- end }}
{{- end }}
{{- if and (not .root.Values.redis.enabled) $external.sentinel.existingSecret }}
{{- with $external.sentinel.username }}
redis_sentinel_username: {{ . | quote }}
{{- end }}
redis_sentinel_password_file: {{ include "lmcache.redisFilesPath" . }}/sentinel-password
{{- end }}
{{- end -}}
