{{/* Parts of requirements.yaml: each fails the rendering with a sentence, or renders nothing. */}}

{{- define "lmcache.refuseName" }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "lmcache-common.fullname" (dict "root" $))) }}
{{- fail (printf "the release is named %q, but names of Services begin with a letter and have letters, digits and '-' alone: name it so, or set fullnameOverride." .Release.Name) }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseModel" }}
{{- $name := list "models" .name .role | compact | join "." }}
{{- include "lmcache.refuseNoCpu" (dict "name" $name "resources" .resources) }}
{{- include "lmcache.refuseNoCpu" (dict "name" (printf "%s.sidecar" $name) "resources" .sidecar.resources "mayFollow" true) }}
{{- include "lmcache.refuseShortGrace" (dict "name" $name "values" . "before" .stop.maxSeconds "config" .sidecar.config) }}
{{- if gt (int .stop.graceSeconds) (int .stop.maxSeconds) }}
{{- fail (printf "%s: stop.graceSeconds is above stop.maxSeconds: lower the one or raise the other." $name) }}
{{- end }}
{{- include "lmcache.refuseGateway" (dict "model" . "name" $name) }}
{{- include "lmcache.refuseWeights" (dict "model" . "name" $name) }}
{{- include "lmcache.refuseGpus" (dict "model" . "name" $name) }}
{{- if eq .engine "sglang" }}
{{- include "lmcache.refuseSglang" (dict "model" . "name" $name) }}
{{- end }}
{{- include "lmcache.refuseArguments" (dict "model" . "name" $name "place" "command" "words" (include "lmcache.optionsOfCommand" . | fromJsonArray)) }}
{{- include "lmcache.refuseArguments" (dict "model" . "name" $name "place" "extraArgs" "words" .extraArgs) }}
{{- range .extraEnv }}
{{- if and (eq .name "PYTHONPATH") $.connector.enabled }}
{{- fail (printf "%s: extraEnv sets PYTHONPATH, which would hide what the cache brings: set connector.pythonPath instead." $name) }}
{{- end }}
{{- if and (eq .name "PYTORCH_CUDA_ALLOC_CONF") (contains "expandable_segments:True" (default "" .value)) $.connector.enabled }}
{{- fail (printf "%s: extraEnv sets PYTORCH_CUDA_ALLOC_CONF to %s, with which vLLM refuses the connector: leave expandable_segments:True out of it." $name .value) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Prefill and decode that cannot work together. Takes: the root itself. */}}
{{- define "lmcache.refuseRoles" }}
{{- $values := .Values }}
{{- $models := include "lmcache.models" (dict "root" $) | fromYaml }}
{{- range $name, $entry := $values.models }}
{{- $roles := list }}
{{- with $entry }}
{{- $roles = include "lmcache.rolesOf" . | fromJsonArray }}
{{- end }}
{{- if eq (len $roles) 1 }}
{{- fail (printf "models.%s has %s alone: give it both prefill and decode, or neither." $name (first $roles)) }}
{{- end }}
{{- range $role := $roles }}
{{- $model := get $models (printf "%s.%s" $name $role) }}
{{- if not (kindIs "invalid" (dig "replicaCount" nil $entry)) }}
{{- fail (printf "models.%s.replicaCount is set, but the model has prefill and decode: set replicaCount in each of them." $name) }}
{{- end }}
{{- range $option := list "engine" "connector" "tensorParallelSize" "httpRoute" "inferencePool" }}
{{- if hasKey (get $entry $role) $option }}
{{- fail (printf "models.%s.%s.%s is set, but prefill and decode have it in common: set models.%s.%s." $name $role $option $name $option) }}
{{- end }}
{{- end }}
{{- if or (not $model.connector.enabled) (ne $model.connector.kind "lmcache") }}
{{- fail (printf "models.%s has prefill and decode, which only the project's connector knows: set connector.enabled to true and connector.kind to lmcache, or leave both roles out." $name) }}
{{- end }}
{{- if not (or $values.storage.enabled $values.broker.enabled (contains "LMCACHE_SIDECAR_REMOTE_URL" (toJson $model.sidecar.extraEnv))) }}
{{- fail (printf "models.%s has prefill and decode, but no decode pod could find what a prefill pod has stored: enable storage, or lookup and broker." $name) }}
{{- end }}
{{- if and $model.httpRoute.enabled (not $model.inferencePool.enabled) }}
{{- fail (printf "models.%s: httpRoute.enabled is true, but no Service has the pods of both roles: enable inferencePool, whose picker chooses one of each, or leave the route to your router." $name) }}
{{- end }}
{{- $object := include "lmcache.modelName" (dict "root" $ "model" $model) }}
{{- if gt (len $object) 63 }}
{{- fail (printf "models.%s.%s needs a Service named %s, but such names have at most 63 characters: shorten the model's name or fullnameOverride." $name $role $object) }}
{{- end }}
{{- if get $values.models (printf "%s-%s" $name $role) }}
{{- fail (printf "models.%s.%s and models.%s-%s would have the same names: rename one of the models." $name $role $name $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseGateway" }}
{{- if and .model.httpRoute.enabled (not .model.httpRoute.parentRefs) }}
{{- fail (printf "%s: httpRoute.enabled is true, but httpRoute.parentRefs is empty: name the Gateway." .name) }}
{{- end }}
{{- if and .model.inferencePool.enabled (not .model.inferencePool.endpointPicker.name) }}
{{- fail (printf "%s: inferencePool.enabled is true, but inferencePool.endpointPicker.name is empty: name the Service of the endpoint picker." .name) }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseWeights" }}
{{- $weights := .model.weights }}
{{- if and $weights.createClaim $weights.existingClaim }}
{{- fail (printf "%s: weights.createClaim is true, but weights.existingClaim is set too: choose one." .name) }}
{{- end }}
{{- $isShared := has "ReadWriteMany" $weights.accessModes }}
{{- if and $weights.createClaim (not $isShared) (or .model.autoscaling.enabled (gt (int .model.replicaCount) 1)) }}
{{- fail (printf "%s: weights.accessModes is %s, which the pods of one node alone can mount: add ReadWriteMany, or keep to one replica." .name (join ", " $weights.accessModes)) }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseGpus" }}
{{- $size := int .model.tensorParallelSize }}
{{- range $resource := include "lmcache.gpuResources" . | fromJsonArray }}
{{- $limit := get (default dict $.model.resources.limits) $resource }}
{{- if and $limit (lt (int $limit) $size) }}
{{- fail (printf "%s: tensorParallelSize is %d, but resources.limits has %v of %s: vLLM needs a GPU for each rank." $.name $size $limit $resource) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lmcache.refusePipeline" }}
{{- $wanted := mul .stages (max 1 (int .model.tensorParallelSize)) }}
{{- range $resource := include "lmcache.gpuResources" . | fromJsonArray }}
{{- $limit := get (default dict $.model.resources.limits) $resource }}
{{- if and $limit (lt (int $limit) (int $wanted)) }}
{{- fail (printf "%s: %d pipeline stages need %d of %s, but resources.limits has %v: the stages of one vLLM share a pod." $.name $.stages $wanted $resource $limit) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The words of a model's command behind `vllm serve` or `-m vllm.…`, as JSON: those before belong to other programs. */}}
{{- define "lmcache.optionsOfCommand" }}
{{- $options := list }}
{{- $before := "" }}
{{- $isVllm := false }}
{{- range .command }}
{{- if $isVllm }}
{{- $options = append $options . }}
{{- end }}
{{- if or (and (eq . "serve") (has (base $before) (list "vllm" "sglang"))) (and (regexMatch "^(vllm|sglang)[.]" .) (eq $before "-m")) }}
{{- $isVllm = true }}
{{- end }}
{{- $before = . }}
{{- end }}
{{- toJson $options }}
{{- end }}

{{/* Options of vLLM that a pod of the chart cannot have. */}}
{{- define "lmcache.refuseArguments" }}
{{- $following := rest (append .words "") }}
{{- range $index, $word := .words }}
{{- if and $.model.connector.enabled (regexMatch "^--kv[-_](transfer[-_]config|offloading[-_](size|backend))" $word) }}
{{- fail (printf "%s: %s has %s, but one vLLM has one connector, and the chart sets it: leave it out and set connector.options, or set connector.enabled=false." $.name $.place $word) }}
{{- end }}
{{- $parts := splitn "=" 2 $word }}
{{- $option := replace "_" "-" $parts._0 }}
{{- $value := $parts._1 | default (index $following $index) }}
{{- if and (gt (int $.model.tensorParallelSize) 1) (has $option (list "--tensor-parallel-size" "-tp" "--tp-size" "--tp")) }}
{{- fail (printf "%s: %s has %s, but tensorParallelSize is %v: set one of them." $.name $.place $word $.model.tensorParallelSize) }}
{{- end }}
{{- if has $option (list "--pipeline-parallel-size" "-pp") }}
{{- include "lmcache.refusePipeline" (dict "model" $.model "name" $.name "stages" (int $value)) }}
{{- end }}
{{- $isMany := and (has $option (list "--nnodes" "-n")) (ne $value "1") }}
{{- $isAnother := or (eq $option "--headless") (and (has $option (list "--node-rank" "-r")) (ne $value "0")) }}
{{- $isRay := and (eq $option "--distributed-executor-backend") (eq $value "ray") }}
{{- if or $isMany $isAnother $isRay }}
{{- $shown := ternary $word (printf "%s %s" $word $value) (or (contains "=" $word) (eq $option "--headless")) }}
{{- fail (printf "%s: %s has %s, which starts one vLLM on several nodes, but each pod of the chart is a vLLM of its own: use the GPUs of one node (tensorParallelSize, --pipeline-parallel-size), or a LeaderWorkerSet of yours with the webhook (docs/injection.md)." $.name $.place $shown) }}
{{- end }}
{{- end }}
{{- end }}

{{/* An account that is not the component's alone, and would get its rights. */}}
{{- define "lmcache.refuseSharedAccount" }}
{{- $account := .Values.broker.serviceAccount }}
{{- if and .Values.broker.enabled .Values.broker.discovery.enabled (not $account.create) (not $account.name) }}
{{- fail "broker.serviceAccount names no account, so that its rights (broker.discovery) would be those of every pod without one: name one, or let it be created." }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseCompat" }}
{{- $compat := .Values.storage.compat }}
{{- if $compat.enabled }}
{{- if not .Values.networkPolicy.enabled }}
{{- fail "storage.compat needs networkPolicy.enabled: nothing else protects that port." }}
{{- end }}
{{- if not $compat.clientsFrom }}
{{- fail "storage.compat is enabled, but storage.compat.clientsFrom is empty: name the pods that run LMCache." }}
{{- end }}
{{- if eq $compat.tenant .Values.auth.tenant }}
{{- fail "storage.compat.tenant is auth.tenant: LMCache clients show no token, so give them a tenant of their own." }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseKvEvents" }}
{{- $events := .Values.kvEvents }}
{{- if $events.enabled }}
{{- if eq .Values.network.ipFamily "IPv6" }}
{{- fail "kvEvents.enabled is true, but network.ipFamily is IPv6: vLLM publishes on IPv4 alone; leave kvEvents off." }}
{{- end }}
{{- $ports := include "lmcache.ports" . | fromYaml }}
{{- $taken := list (int $ports.vllm) (int $ports.sidecar) (int $ports.health) (int $ports.sidecarLm) }}
{{- range $port := compact (list (int $events.port) (int $events.replayPort)) }}
{{- if has $port $taken }}
{{- fail (printf "kvEvents has the port %d twice, or a model's pod has it already: choose another one." $port) }}
{{- end }}
{{- $taken = append $taken $port }}
{{- end }}
{{- else if or $events.routersFrom $events.replayPort }}
{{- fail "kvEvents.routersFrom or kvEvents.replayPort is set, but kvEvents.enabled is false: enable it, or leave them empty." }}
{{- end }}
{{- range $name, $model := include "lmcache.models" (dict "root" $) | fromYaml }}
{{- range $word := concat (include "lmcache.optionsOfCommand" $model | fromJsonArray) $model.extraArgs }}
{{- if and $events.enabled (regexMatch "^--kv[-_]events[-_]config" $word) }}
{{- fail (printf "models.%s has %s, but kvEvents.enabled sets it: leave one of them out." $name $word) }}
{{- end }}
{{- end }}
{{- if and (not $events.enabled) (eq (toString (get $model.connector.options "lmcache.kv_events")) "true") }}
{{- fail (printf "models.%s.connector.options has lmcache.kv_events, but vLLM publishes no events: set kvEvents.enabled instead." $name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseS3" }}
{{- $s3 := .Values.storage.s3 }}
{{- if not $s3.bucket }}
{{- range $name := list "endpointUrl" "existingSecret" "existingCaSecret" "extraPorts" }}
{{- if get $s3 $name }}
{{- fail (printf "storage.s3.%s is set, but storage.s3.bucket is empty: name the bucket, or leave it empty too." $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $s3.existingCaSecret (hasPrefix "http://" $s3.endpointUrl) }}
{{- fail "storage.s3.existingCaSecret is set, but storage.s3.endpointUrl is not encrypted: write https for http in it, or leave the Secret's name empty." }}
{{- end }}
{{- end }}

{{/*
Claim templates of a StatefulSet cannot change, which Kubernetes says without saying what to do. Sizes are compared in GiB, since the
cluster writes 1024Gi as 1Ti. Without a cluster nothing is compared.
*/}}
{{- define "lmcache.refuseOtherVolumes" }}
{{- $persistence := .Values.storage.persistence }}
{{- $name := include "lmcache-common.componentName" (dict "root" $ "component" "storage") }}
{{- $live := lookup "apps/v1" "StatefulSet" .Release.Namespace $name | default dict }}
{{- if and .Values.storage.enabled $live.spec }}
{{- $was := "none" }}
{{- range $live.spec.volumeClaimTemplates }}
{{- $gib := include "lmcache-common.gib" (dict "name" $name "value" .spec.resources.requests.storage) }}
{{- $was = printf "%s GiB, class %q, %s" $gib (default "" .spec.storageClassName) (join "+" .spec.accessModes) }}
{{- end }}
{{- $wanted := "none" }}
{{- if $persistence.enabled }}
{{- $gib := include "lmcache-common.gib" (dict "name" "storage.persistence.size" "value" $persistence.size) }}
{{- $wanted = printf "%s GiB, class %q, %s" $gib $persistence.storageClassName (join "+" $persistence.accessModes) }}
{{- end }}
{{- if ne $was $wanted }}
{{- fail (printf "storage.persistence is to be (%s), but the StatefulSet %s was installed with (%s), which cannot change: leave it as it was, or see \"Other volumes\" in the chart's README." $wanted $name $was) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseTls" }}
{{- $tls := .Values.tls }}
{{- $given := compact (append (values $tls.existingSecrets) $tls.existingSecret) }}
{{- if and $tls.mutual (not $tls.enabled) }}
{{- fail "tls.mutual is set, but tls.enabled is false: enable TLS, or leave it off." }}
{{- end }}
{{- if and $tls.certManager.enabled (not $tls.enabled) }}
{{- fail "tls.certManager is enabled, but tls.enabled is false: enable TLS, or leave it off." }}
{{- end }}
{{- if and $tls.certManager.enabled $given }}
{{- fail "tls.certManager is enabled, and Secrets with certificates are named too: choose one of them." }}
{{- end }}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.issuerRef.name is empty: name the Issuer that signs." }}
{{- end }}
{{- if and $tls.enabled (not $tls.certManager.enabled) (not $tls.existingSecret) }}
{{- range $name, $secret := $tls.existingSecrets }}
{{- if and (not $secret) (or (eq $name "sidecar") (get $.Values $name).enabled) }}
{{- fail (printf "tls is enabled, but there is no certificate for %s: set tls.existingSecret, tls.existingSecrets.%s or tls.certManager." $name $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Sizes have a smallest and a largest value; the disk tier fits its volume. Takes: the root itself. */}}
{{- define "lmcache.refuseSizes" }}
{{- $storage := .Values.storage }}
{{- $redis := .Values.redis }}
{{- $webhook := .Values.webhook }}
{{- $volume := $storage.persistence.size }}
{{- $sizes := list
  (dict "name" "storage.memorySize" "value" $storage.memorySize "max" "64Ti")
  (dict "name" "storage.memoryOverhead" "value" $storage.memoryOverhead "min" "128Mi" "max" "1Ti")
  (dict "name" "storage.persistence.size" "value" $volume "min" "1Mi" "max" "1Pi")
  (dict "name" "storage.diskSize" "value" $storage.diskSize "max" $volume "maxFrom" "storage.persistence.size")
  (dict "name" "storage.tenantQuota.memory" "value" $storage.tenantQuota.memory "max" "1Pi")
  (dict "name" "storage.tenantQuota.disk" "value" $storage.tenantQuota.disk "max" "1Pi")
  (dict "name" "redis.maxMemory" "value" $redis.maxMemory "min" "16Mi" "max" "1Ti")
  (dict "name" "redis.memoryOverhead" "value" $redis.memoryOverhead "min" "64Mi" "max" "1Ti")
  (dict "name" "webhook.maxArenaSize" "value" $webhook.maxArenaSize "max" "1Pi")
  (dict "name" "webhook.arenaSize" "value" $webhook.arenaSize "min" "64Mi" "max" $webhook.maxArenaSize "maxFrom" "webhook.maxArenaSize")
  (dict "name" "webhook.maxDiskSize" "value" $webhook.maxDiskSize "max" "1Pi")
  (dict "name" "webhook.diskSize" "value" $webhook.diskSize "max" $webhook.maxDiskSize "maxFrom" "webhook.maxDiskSize")
}}
{{- range $tenant, $quota := $storage.tenantQuotas }}
{{- range $tier, $size := $quota }}
{{- $sizes = append $sizes (dict "name" (printf "storage.tenantQuotas.%s.%s" $tenant $tier) "value" $size "max" "1Pi") }}
{{- end }}
{{- end }}
{{- $sidecars := dict "sidecar" .Values.sidecar }}
{{- range $name, $model := include "lmcache.models" (dict "root" $) | fromYaml }}
{{- $_ := set $sidecars (printf "models.%s.sidecar" $name) $model.sidecar }}
{{- $where := printf "models.%s" $name }}
{{- $sizes = append $sizes (dict "name" (printf "%s.shmSize" $where) "value" $model.shmSize "max" "64Ti") }}
{{- $sizes = append $sizes (dict "name" (printf "%s.connector.hostMemory" $where) "value" $model.connector.hostMemory "max" "64Ti") }}
{{- if and (eq $model.connector.kind "offloading-tier") $model.connector.options }}
{{- fail (printf "%s.connector.options are options of kind lmcache: leave them out with kind offloading-tier." $where) }}
{{- end }}
{{- $sizes = append $sizes (dict "name" (printf "%s.weights.size" $where) "value" $model.weights.size "max" "1Pi") }}
{{- end }}
{{- range $where, $sidecar := $sidecars }}
{{- $sizes = append $sizes (dict "name" (printf "%s.arenaSize" $where) "value" $sidecar.arenaSize "max" "64Ti") }}
{{- $sizes = append $sizes (dict "name" (printf "%s.diskSize" $where) "value" $sidecar.diskSize "max" "1Pi") }}
{{- $sizes = append $sizes (dict "name" (printf "%s.mover.memoryOverhead" $where) "value" $sidecar.mover.memoryOverhead "min" "128Mi" "max" "1Ti") }}
{{- $overhead := dict "name" (printf "%s.memoryOverhead" $where) "value" $sidecar.memoryOverhead }}
{{- $sizes = append $sizes (merge $overhead (dict "min" "256Mi" "max" "1Ti")) }}
{{- end }}
{{- range $sizes }}
{{- if .value }}
{{- $_ := include "lmcache-common.bytes" . }}
{{- end }}
{{- end }}
{{- end }}

{{/* A drain that has left something is tried once more, REST and lm:// end one after the other, and a
disk that does not answer is waited for. */}}
{{- define "lmcache.refuseShortGrace" }}
{{- $disk := ternary 10 0 (hasKey .config "drain_timeout_s") }}
{{- $needed := addf .before (mulf 2 (default 0 .config.drain_timeout_s)) (mulf 2 .config.shutdown_grace_s) $disk }}
{{- if lt (float64 .values.terminationGracePeriodSeconds) $needed }}
{{- fail (printf "%s.terminationGracePeriodSeconds is %v, but a pod may take %v s to end (its wait before, twice drain_timeout_s and shutdown_grace_s, and 10 s for a disk that hangs): raise the one or lower the others." .name .values.terminationGracePeriodSeconds $needed) }}
{{- end }}
{{- end }}

{{/* Takes: name, resources; mayFollow (optional): true where a request that is left out follows from the pod. */}}
{{- define "lmcache.refuseNoCpu" }}
{{- $follows := and .mayFollow (not (hasKey (default dict .resources.requests) "cpu")) }}
{{- if and (not $follows) (regexMatch "^[0.]*m?$" (dig "requests" "cpu" "" .resources | toString)) }}
{{- fail (printf "%s.resources requests no cpu, without which autoscalers can tell nothing of the pod: give it one." .name) }}
{{- end }}
{{- end }}

{{- define "lmcache.refuseMemory" }}
{{- if or (hasKey (default dict .resources.requests) "memory") (hasKey (default dict .resources.limits) "memory") }}
{{- fail (printf "%s.resources names memory, but that follows from the size of the cache and memoryOverhead: set those." .name) }}
{{- end }}
{{- end }}
