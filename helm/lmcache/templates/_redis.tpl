{{/* The index is soft state: nothing is written to disk, and a full Redis drops what was not used for longest. Takes: root. */}}
{{- define "lmcache.redisConfig" -}}
{{- $v6 := eq .root.Values.network.ipFamily "IPv6" -}}
bind {{ ternary "::" "0.0.0.0" $v6 }}
port {{ (include "lmcache.ports" . | fromYaml).redis }}
dir /data
save ""
appendonly no
maxmemory {{ int64 .root.Values.redis.maxMemoryMi }}mb
maxmemory-policy allkeys-lru
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

{{/* Asks Redis for a PONG; the password does not become an argument here either. */}}
{{- define "lmcache.redisPing" -}}
REDISCLI_AUTH="$(cat /run/secrets/redis/redis-password)" redis-cli ping | grep -q PONG
{{- end -}}
