{{/* Requests and limits of a worker; devices are always both. */}}
{{- define "sluice.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- $devices := dict -}}
{{- if gt (int .gpu.count) 0 }}{{- $_ := set $devices .gpu.resourceName (int .gpu.count | toString) }}{{- end -}}
{{- if .rdma.enabled }}{{- $_ := set $devices .rdma.resourceName (int .rdma.count | toString) }}{{- end -}}
{{- $_ := set $resources "requests" (merge (deepCopy $devices) (default dict $resources.requests)) -}}
{{- $_ := set $resources "limits" (merge (deepCopy $devices) (default dict $resources.limits)) -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "sluice.ucxEnv" -}}
{{- $env := list -}}
{{- with .ucx.tls }}{{- $env = append $env (dict "name" "UCX_TLS" "value" .) }}{{- end -}}
{{- with .ucx.netDevices }}{{- $env = append $env (dict "name" "UCX_NET_DEVICES" "value" .) }}{{- end -}}
{{- range $name, $value := .ucx.env }}{{- $env = append $env (dict "name" $name "value" (toString $value)) }}{{- end -}}
{{- with $env }}{{ toYaml . }}{{ end -}}
{{- end -}}
