{{/* Where all storage pods are: the name of the headless service, since each chunk is at one of them. Takes: root. */}}
{{- define "lmcache.storageUrl" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
{{- $name := include "lmcache-common.componentName" (dict "root" .root "component" "storage") -}}
{{- printf "%s://%s-headless.%s.svc:%v" (include "lmcache.lmScheme" .) $name .root.Release.Namespace $ports.storageLm -}}
{{- end -}}

{{/* The container of a storage pod. Takes: root, component, values. */}}
{{- define "lmcache.storageContainer" -}}
{{- $ports := include "lmcache.ports" . | fromYaml -}}
- name: storage
  image: {{ include "lmcache-common.image" (dict "root" .root "image" .values.image "own" true) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  args: [--config, /etc/lmcache/config.yaml]
  ports:
    - {name: http, containerPort: {{ $ports.storage }}}
    - {name: lm, containerPort: {{ $ports.storageLm }}}
    {{- with include "lmcache.healthPort" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- if .values.compat.enabled }}
    - {name: compat, containerPort: {{ $ports.compat }}}
    {{- end }}
  env:
    {{- include "lmcache-common.env" (dict "own" (include "lmcache.storageEnv" .) "extra" .values.extraEnv) | nindent 4 }}
  securityContext:
    {{- include "lmcache-common.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- $tierMi := include "lmcache-common.mib" (dict "name" "storage.memorySize" "value" .values.memorySize) }}
    {{- $overheadMi := include "lmcache-common.mib" (dict "name" "storage.memoryOverhead" "value" .values.memoryOverhead) }}
    {{- $memoryMi := add $tierMi $overheadMi }}
    {{- include "lmcache-common.resourcesWithMemory" (dict "resources" .values.resources "memoryMi" $memoryMi) | nindent 4 }}
  {{- include "lmcache.probes" . | nindent 2 }}
  {{- with include "lmcache-common.preStop" .values.preStopSeconds }}
  {{- . | nindent 2 }}
  {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/lmcache, readOnly: true}
    {{- with include "lmcache.secretMounts" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- if include "lmcache.s3Volume" . }}
    - {name: s3-files, mountPath: {{ include "lmcache.s3Path" . }}, readOnly: true}
    {{- end }}
    - {name: data, mountPath: /var/lib/lmcache}
    - {name: tmp, mountPath: /tmp}
    {{- with .values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Its variables: what differs from pod to pod. Takes: root, component. */}}
{{- define "lmcache.storageEnv" -}}
{{- $name := include "lmcache-common.componentName" . -}}
{{- $port := (include "lmcache.ports" . | fromYaml).storageLm -}}
{{ include "lmcache-common.podEnv" . }}
- name: LMCACHE_STORAGE_INSTANCE_ID
  value: $(POD_NAME)
- name: LMCACHE_STORAGE_ADVERTISE_URL
  value: {{ include "lmcache.lmScheme" . }}://$(POD_NAME).{{ $name }}-headless.{{ .root.Release.Namespace }}.svc:{{ $port }}
- name: LMCACHE_STORAGE_REPLICAS_URL
  value: {{ include "lmcache.storageUrl" . }}
{{ include "lmcache.placeEnv" "STORAGE" }}
{{- end -}}

{{/* Its volume, where that outlives the pod. The labels are those that never change: the template is immutable. Takes: as above. */}}
{{- define "lmcache.storageClaim" -}}
{{- $persistence := .values.persistence -}}
- apiVersion: v1 # written by the API server if it is not here, which Argo CD takes for a difference
  kind: PersistentVolumeClaim
  metadata:
    name: data
    labels:
      {{- include "lmcache-common.selectorLabels" . | nindent 6 }}
  spec:
    accessModes:
      {{- toYaml $persistence.accessModes | nindent 6 }}
    {{- with $persistence.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ $persistence.size }}
{{- end -}}
