{{/*
The Deployment of a service without state: one container that serves REST.
Takes: root, component, values, config (by a change of which its pods start again), auth and keys (as lmcache.secretVolumes); asksRedis,
asksCluster (optional).
*/}}
{{- define "lmcache.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "lmcache-common.metadata" . | nindent 2 }}
spec:
  {{- with include "lmcache-common.replicas" (merge (dict "kind" "Deployment") .) }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "lmcache-common.updateStrategy" .values.updateStrategy }}
  strategy:
    {{- . | nindent 4 }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "lmcache-common.selectorLabels" . | nindent 6 }}
  template:
    metadata:
      {{- include "lmcache-common.podMetadata" . | nindent 6 }}
    spec:
      {{- include "lmcache-common.podSpec" . | nindent 6 }}
      containers:
        {{- include "lmcache.deploymentContainer" . | nindent 8 }}
        {{- with .values.extraContainers }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumes:
        - name: config
          configMap:
            name: {{ include "lmcache-common.componentName" . }}
        {{- with include "lmcache.secretVolumes" . }}
        {{- . | trim | nindent 8 }}
        {{- end }}
        - name: tmp
          emptyDir:
            sizeLimit: 64Mi
        {{- with .values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}

{{- define "lmcache.deploymentContainer" -}}
- name: {{ .component }}
  image: {{ include "lmcache-common.image" (dict "root" .root "image" .values.image "own" true) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  args: [--config, /etc/lmcache/config.yaml]
  ports:
    - {name: http, containerPort: {{ get (include "lmcache.ports" . | fromYaml) .component }}}
    {{- with include "lmcache.healthPort" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
  env:
    {{- include "lmcache-common.env" (dict "own" (include "lmcache.deploymentEnv" .) "extra" .values.extraEnv) | nindent 4 }}
  securityContext:
    {{- include "lmcache-common.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- toYaml .values.resources | nindent 4 }}
  {{- include "lmcache.probes" . | nindent 2 }}
  {{- with include "lmcache-common.preStop" .values.preStopSeconds }}
  {{- . | nindent 2 }}
  {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/lmcache, readOnly: true}
    {{- with include "lmcache.secretMounts" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    - {name: tmp, mountPath: /tmp}
    {{- with .values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "lmcache.deploymentEnv" -}}
{{ include "lmcache-common.podEnv" . }}
- name: LMCACHE_{{ upper .component }}_INSTANCE_ID
  value: $(POD_NAME)
{{- if .asksRedis }}
{{ include "lmcache.redisUrlEnv" . }}
{{- end }}
{{- end -}}
