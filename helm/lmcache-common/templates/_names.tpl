{{/*
The release's base name: at most 36 characters, so that "<name>-storage-headless" and "<name>-vllm-<model>" stay valid names. A longer
one ends with a digest of it, so that two that begin alike stay two.
Takes: root.
*/}}
{{- define "lmcache-common.fullname" -}}
{{- $root := .root -}}
{{- $chart := default $root.Chart.Name $root.Values.nameOverride -}}
{{- $name := $root.Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = ternary $root.Release.Name (printf "%s-%s" $root.Release.Name $chart) (contains $chart $root.Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 36 -}}
{{- $name = printf "%s-%s" (trunc 27 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The name of a component's objects. Takes: root, component. */}}
{{- define "lmcache-common.componentName" -}}
{{- printf "%s-%s" (include "lmcache-common.fullname" .) .component -}}
{{- end -}}

{{/* Host name of a component's Service inside the cluster. Takes: root, component. */}}
{{- define "lmcache-common.serviceHost" -}}
{{- printf "%s.%s.svc" (include "lmcache-common.componentName" .) .root.Release.Namespace -}}
{{- end -}}

{{/* The service account that a component's pods run as. Takes: root, component, name (optional), values (with serviceAccount). */}}
{{- define "lmcache-common.serviceAccountName" -}}
{{- $account := .values.serviceAccount -}}
{{- if $account.create -}}
{{- default (default (include "lmcache-common.componentName" .) .name) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}
