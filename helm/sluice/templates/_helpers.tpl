{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sluice.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "sluice.image" -}}
{{- $image := mergeOverwrite (deepCopy .Values.image) (default dict .override) -}}
{{- with .override -}}
{{- /* A digest is of one image: not of another tag or repository. */ -}}
{{- if or .tag .repository }}{{- $_ := set $image "digest" (default "" .digest) -}}{{- end -}}
{{- end -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- define "sluice.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "sluice.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "sluice.curveSecret" -}}
{{- default (printf "%s-curve" (include "sluice.fullname" .)) .Values.curve.existingSecret -}}
{{- end -}}

{{- define "sluice.hasApiKeys" -}}
{{- if or .Values.router.apiKeys .Values.router.apiKeysSecret.name -}}yes{{- end -}}
{{- end -}}

{{- define "sluice.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "sluice.fullname" .)) .Values.router.apiKeysSecret.name -}}
{{- end -}}

{{- define "sluice.apiKeysKey" -}}
{{- if .Values.router.apiKeysSecret.name -}}{{ .Values.router.apiKeysSecret.key }}{{- else -}}keys{{- end -}}
{{- end -}}

{{- define "sluice.hasPvc" -}}
{{- if or .Values.model.pvc.create .Values.model.pvc.existingClaim -}}yes{{- end -}}
{{- end -}}

{{/* The one config file: values.config, and over it what only the chart knows. */}}
{{- define "sluice.config" -}}
{{- $name := include "sluice.fullname" . -}}
{{- $own := dict
  "model" (dict "model" .Values.model.name)
  "router" (dict "host" "0.0.0.0" "port" (int .Values.router.port) "control_port" (int .Values.router.controlPort)
    "control_address" (printf "tcp://%s-router-control:%d" $name (int .Values.router.controlPort)))
  "security" (dict "keys_dir" "/etc/sluice/keys")
  "metrics" (dict "port" (int .Values.decode.metricsPort))
  "deploy" (dict "prefill" (int .Values.prefill.replicas) "decode" (int .Values.decode.replicas)
    "name" "sluice" "ray_address" "auto" "lifetime" "detached" "upload_code" false
    "prefill_resources" (dict "sluice_prefill" 1) "decode_resources" (dict "sluice_decode" 1)) -}}
{{- with .Values.model.servedName }}{{- $_ := set $own.model "served_name" . }}{{- end -}}
{{- with .Values.model.revision }}{{- $_ := set $own.model "revision" . }}{{- end -}}
{{- if include "sluice.hasApiKeys" . }}{{- $_ := set $own.security "api_keys_file" "/etc/sluice/api-keys/keys" }}{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $own) -}}
{{- end -}}

{{/* What a running deployment cannot change; all else is applied to it. _validations.tpl says which value of the chart each is. */}}
{{- define "sluice.lasting" -}}
{{- $model := get (include "sluice.config" . | fromYaml) "model" -}}
model: {{ $model.model | quote }}
served_name: {{ default "" $model.served_name | quote }}
revision: {{ default "" $model.revision | quote }}
curve_secret: {{ include "sluice.curveSecret" . }}
{{- end -}}

{{- define "sluice.podSecurityContext" -}}
{{- $context := deepCopy .root.Values.podSecurityContext -}}
{{- with .role -}}
{{- if and .rdma.enabled (eq .rdma.memlock "root") -}}
{{- $context = mergeOverwrite $context (dict "runAsNonRoot" false "runAsUser" 0 "runAsGroup" 0) -}}
{{- end -}}
{{- $context = mergeOverwrite $context (deepCopy .podSecurityContext) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "sluice.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- with .role -}}
{{- if and .rdma.enabled (eq .rdma.memlock "root") -}}
{{- $context = mergeOverwrite $context (dict "capabilities" (dict "add" (list "IPC_LOCK"))) -}}
{{- end -}}
{{- $context = mergeOverwrite $context (deepCopy .securityContext) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "sluice.env" -}}
- {name: HOME, value: /home/sluice}
- {name: HF_HOME, value: /models/huggingface}
- {name: SLUICE_CACHE, value: /models/sluice}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- if or .Values.model.hfToken .Values.model.hfTokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-hub" (include "sluice.fullname" .)) .Values.model.hfTokenSecret.name }}
      key: {{ ternary .Values.model.hfTokenSecret.key "token" (ne .Values.model.hfTokenSecret.name "") }}
{{- end }}
{{- end -}}

{{- define "sluice.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/sluice}
- name: models
  mountPath: /models
  {{- if .Values.model.pvc.readOnly }}
  readOnly: true
  {{- end }}
- {name: config, mountPath: /etc/sluice/config, readOnly: true}
- {name: keys, mountPath: /etc/sluice/keys, readOnly: true}
{{- end -}}

{{/* Every pod gets the public keys of all, and the secret one of its own party alone. */}}
{{- define "sluice.volumes" -}}
{{- $root := .root -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
- name: models
  {{- if include "sluice.hasPvc" $root }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "sluice.fullname" $root)) $root.Values.model.pvc.existingClaim }}
  {{- else }}
  emptyDir: {sizeLimit: {{ $root.Values.model.cacheSize }}}
  {{- end }}
- name: config
  configMap: {name: {{ include "sluice.fullname" $root }}}
- name: keys
  {{- $items := list }}
  {{- range list "router" "prefill" "decode" }}
  {{- $items = append $items (dict "key" (printf "%s.pub" .) "path" (printf "%s.pub" .)) }}
  {{- end }}
  {{- range .secretKeysOf }}
  {{- $items = append $items (dict "key" (printf "%s.key" .) "path" (printf "%s.key" .)) }}
  {{- end }}
  secret:
    secretName: {{ include "sluice.curveSecret" $root }}
    defaultMode: 0440
    items:
      {{- toYaml $items | nindent 6 }}
{{- end -}}

{{- define "sluice.egress" -}}
- to: [{podSelector: {matchLabels: {{ include "sluice.selector" . | fromYaml | toJson }}}}]
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end }}
