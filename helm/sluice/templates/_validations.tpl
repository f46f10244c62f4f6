{{/* What a schema cannot say: combinations that install well and then serve badly or not at all. */}}
{{- define "sluice.validate" -}}
{{- $values := .Values -}}
{{- $config := .Values.config -}}

{{- $owned := dict
  "model.model" "model.name" "model.served_name" "model.servedName" "model.revision" "model.revision"
  "router.host" "router.service" "router.port" "router.port" "router.control_port" "router.controlPort"
  "router.control_address" "router.controlPort" "security.keys_dir" "curve.existingSecret"
  "security.api_keys_file" "router.apiKeysSecret" "metrics.port" "decode.metricsPort"
  "deploy.prefill" "prefill.replicas" "deploy.decode" "decode.replicas" "deploy.ray_address" "ray"
  "deploy.lifetime" "ray" "deploy.name" "fullnameOverride" "deploy.upload_code" "image"
  "deploy.prefill_resources" "prefill" "deploy.decode_resources" "decode" -}}
{{- range $field, $value := $owned -}}
{{- $parts := splitList "." $field -}}
{{- if hasKey (default dict (get $config (first $parts))) (last $parts) -}}
{{- fail (printf "config.%s: the chart sets it; remove it, and see the value %s" $field $value) -}}
{{- end -}}
{{- end -}}

{{- if ne (int $values.prefill.metricsPort) (int $values.decode.metricsPort) -}}
{{- fail (printf "prefill.metricsPort=%d, decode.metricsPort=%d: there is one metrics.port in the config; give both the same" (int $values.prefill.metricsPort) (int $values.decode.metricsPort)) -}}
{{- end -}}
{{- if eq (int $values.router.port) (int $values.router.controlPort) -}}
{{- fail (printf "router.controlPort=%d is router.port too; give another one" (int $values.router.controlPort)) -}}
{{- end -}}
{{- if and $values.router.apiKeys $values.router.apiKeysSecret.name -}}
{{- fail "router.apiKeys and router.apiKeysSecret.name: keys come from one place; remove one" -}}
{{- end -}}
{{- if and $values.model.hfToken $values.model.hfTokenSecret.name -}}
{{- fail "model.hfToken and model.hfTokenSecret.name: the token comes from one place; remove one" -}}
{{- end -}}
{{- if and $values.model.pvc.create $values.model.pvc.existingClaim -}}
{{- fail (printf "model.pvc.create and model.pvc.existingClaim=%q: set one of them" $values.model.pvc.existingClaim) -}}
{{- end -}}
{{- if and $values.model.pvc.readOnly (not $values.model.pvc.existingClaim) -}}
{{- fail "model.pvc.readOnly: nothing can ever put the model there; name an existingClaim that holds it" -}}
{{- end -}}
{{- if and (hasPrefix "/" $values.model.name) (not (hasPrefix "/models/" $values.model.name)) -}}
{{- fail (printf "model.name=%q: the claim is mounted at /models; give a folder below it" $values.model.name) -}}
{{- end -}}
{{- if and (hasPrefix "/" $values.model.name) (not $values.model.pvc.existingClaim) -}}
{{- fail (printf "model.name=%q is a folder, which only a volume that holds it can have; set model.pvc.existingClaim" $values.model.name) -}}
{{- end -}}

{{- $deploy := default dict $config.deploy -}}
{{- $drain := default 60 $deploy.drain_timeout_s -}}
{{- $lease := default 30 (default dict $config.transfer).lease_s -}}
{{- $needed := addf $drain 10 $values.router.preStopSleepSeconds -}}
{{- if lt (float64 $values.router.terminationGracePeriodSeconds) $needed -}}
{{- fail (printf "router.terminationGracePeriodSeconds=%d: a pod needs %.0f s to finish its requests (config.deploy.drain_timeout_s + router.preStopSleepSeconds + 10); raise it, or lower config.deploy.drain_timeout_s" (int $values.router.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}
{{- $delay := default 0 (default dict $config.router).drain_delay_s -}}
{{- if ge (float64 $delay) (float64 $drain) -}}
{{- fail (printf "config.router.drain_delay_s=%v: leaves no time to finish requests in, and a router would refuse to start; give less than config.deploy.drain_timeout_s (%v)" $delay $drain) -}}
{{- end -}}
{{- $engine := default dict $config.engine -}}
{{- range $role := list "prefill" "decode" -}}
{{- $own := get $values $role -}}
{{- $grace := int $own.terminationGracePeriodSeconds -}}
{{- $roleConfig := default dict (get $config $role) -}}
{{- $roleLease := default $lease (default dict $roleConfig.transfer).lease_s -}}
{{- if lt (float64 $grace) (addf $drain 10) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds=%d: must be config.deploy.drain_timeout_s (%v) + 10 at least, or a drain is cut short; raise it" $role $grace $drain) -}}
{{- end -}}
{{- if le (float64 $grace) (float64 $roleLease) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds=%d: must be more than transfer.lease_s (%v), or KV is lost that a reader may still want; raise it" $role $grace $roleLease) -}}
{{- end -}}
{{- if and (not (kindIs "invalid" $own.maxReplicas)) (lt (int $own.maxReplicas) (int $own.replicas)) -}}
{{- fail (printf "%s.maxReplicas=%d is less than %s.replicas=%d; raise it, or leave it out" $role (int $own.maxReplicas) $role (int $own.replicas)) -}}
{{- end -}}
{{- if and $own.rdma.enabled (not $own.rdma.memlock) -}}
{{- fail (printf "%s.rdma.memlock: say how memory may be locked, \"root\" or \"node\": IPC_LOCK does nothing for a user who is not root, and UCX would fall back to TCP" $role) -}}
{{- end -}}
{{- range $field, $context := dict "podSecurityContext" $own.podSecurityContext "securityContext" $own.securityContext -}}
{{- if and $own.rdma.enabled (eq $own.rdma.memlock "root") (ne (int (default 0 $context.runAsUser)) 0) -}}
{{- fail (printf "%s.%s.runAsUser=%d: rdma.memlock is \"root\", and IPC_LOCK does nothing for another user; leave it out, or set memlock to \"node\"" $role $field (int $context.runAsUser)) -}}
{{- end -}}
{{- end -}}
{{- if and $own.hostNetwork $values.networkPolicy.enabled -}}
{{- fail (printf "%s.hostNetwork: NetworkPolicies do not cover pods on the host network, and whoever reaches a UCX port can write a worker's memory; keep strangers off the nodes' network and set networkPolicy.enabled=false" $role) -}}
{{- end -}}
{{- if and $own.hostNetwork (gt (int $own.replicas) 1) (not (or $own.affinity $own.topologySpreadConstraints)) -}}
{{- fail (printf "%s.hostNetwork with %s.replicas=%d: ports are fixed, so one node takes one worker; set %s.affinity.podAntiAffinity or topologySpreadConstraints" $role $role (int $own.replicas) $role) -}}
{{- end -}}
{{- if and $own.ucx.tls (gt (int $own.gpu.count) 0) (not (hasPrefix "^" $own.ucx.tls)) (ne $own.ucx.tls "all") -}}
{{- if not (regexMatch "(^|,)cuda(_copy)?(,|$)" $own.ucx.tls) -}}
{{- fail (printf "%s.ucx.tls=%q: without cuda_copy UCX cannot touch GPU memory; add cuda_copy,cuda_ipc" $role $own.ucx.tls) -}}
{{- end -}}
{{- end -}}
{{- $ranks := int (default (default 1 $engine.tensor_parallel_size) (default dict $roleConfig.engine).tensor_parallel_size) -}}
{{- if and (gt (int $own.gpu.count) 0) (ne $ranks (int $own.gpu.count)) -}}
{{- fail (printf "%s.gpu.count=%d, engine.tensor_parallel_size=%d: each rank needs a GPU, and a pod holds one worker; give both the same" $role (int $own.gpu.count) $ranks) -}}
{{- end -}}
{{/* A worker asks Ray for its threads, of which each rank has one at least; a pod offers its CPUs, rounded up. */}}
{{- $threads := max $ranks (int (default (default 0 $engine.num_threads) (default dict $roleConfig.engine).num_threads)) -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" $own.resources) $own.resources | toString -}}
{{- $offered := hasSuffix "m" $cpu | ternary (ceil (divf (trimSuffix "m" $cpu | float64) 1000)) (ceil (float64 $cpu)) -}}
{{- if and $cpu (gt (float64 $threads) $offered) -}}
{{- fail (printf "%s.resources: cpu %s is less than the %d that a worker takes (engine.num_threads, engine.tensor_parallel_size), so Ray would never place one; raise it" $role $cpu $threads) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (int $values.prefill.replicas) 0) (gt (int $values.prefill.gpu.count) 0) (eq (int $values.decode.gpu.count) 0) -}}
{{- fail "prefill.gpu.count is set, but prefill.replicas=0: all runs on decode workers; set decode.gpu.count" -}}
{{- end -}}

{{- if and $values.networkPolicy.restrictEgress (not $values.networkPolicy.extraEgress) (not $values.model.pvc.existingClaim) -}}
{{- fail (printf "networkPolicy.restrictEgress: no pod could fetch model.name=%q; allow it by networkPolicy.extraEgress, or name a model.pvc.existingClaim that holds it" $values.model.name) -}}
{{- end -}}
{{- with $values.router.autoscaling -}}
{{- if and .enabled (lt (int .maxReplicas) (int .minReplicas)) -}}
{{- fail (printf "router.autoscaling.maxReplicas=%d is less than minReplicas=%d" (int .maxReplicas) (int .minReplicas)) -}}
{{- end -}}
{{- if and .enabled (not (dig "requests" "cpu" "" $values.router.resources)) -}}
{{- fail "router.autoscaling.enabled needs router.resources.requests.cpu, of which it is a percentage" -}}
{{- end -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateway that it hangs on, such as [{name: public}]" -}}
{{- end -}}

{{/* Pods that run keep to what they started with; only routers, which roll, would have the new values. */}}
{{- $running := lookup "v1" "ConfigMap" .Release.Namespace (include "sluice.fullname" .) -}}
{{- $before := dig "metadata" "annotations" "sluice/lasting" "{}" $running | fromJson -}}
{{- $after := include "sluice.lasting" . | fromYaml -}}
{{- range $field, $value := dict "model" "model.name" "served_name" "model.servedName" "revision" "model.revision" "curve_secret" "curve.existingSecret" -}}
{{- if and (hasKey $before $field) (ne (get $before $field) (get $after $field)) (ne $values.ray.upgradeStrategy "Recreate") -}}
{{- fail (printf "%s: the release runs with %q and cannot change to %q while it does; take back the change, or install another release, or set ray.upgradeStrategy=Recreate, which ends all pods and starts anew" $value (get $before $field) (get $after $field)) -}}
{{- end -}}
{{- end -}}

{{/* lookup finds nothing without a cluster (template, lint): there, nothing is known of its kinds. The
     namespace is the release's own: who may install in it alone may not read another one. */}}
{{- if lookup "v1" "Namespace" "" .Release.Namespace -}}
{{- if not (.Capabilities.APIVersions.Has "ray.io/v1") -}}
{{- fail "this cluster has no RayCluster kind (ray.io/v1): install the KubeRay operator first" -}}
{{- end -}}
{{- range $value, $setting := pick $values.monitoring "podMonitor" "serviceMonitor" "prometheusRule" -}}
{{- if and $setting.enabled (not ($.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- fail (printf "monitoring.%s.enabled, but this cluster has no monitoring.coreos.com/v1: install the Prometheus operator, or set it to false" $value) -}}
{{- end -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not (.Capabilities.APIVersions.Has "gateway.networking.k8s.io/v1")) -}}
{{- fail "httpRoute.enabled, but this cluster has no gateway.networking.k8s.io/v1: install the Gateway API, or use ingress" -}}
{{- end -}}
{{- end -}}
{{- end -}}
