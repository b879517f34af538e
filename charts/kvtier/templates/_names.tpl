{{- /* Called first by every template: values that an older release stored (helm upgrade --reuse-values) lack what came
since, and get the defaults of today. */ -}}
{{- define "kvtier.complete" -}}
{{- include "kvtier.fill" (list .Values (.Files.Get "files/defaults.yaml" | fromYaml)) -}}
{{- end -}}

{{- /* What people write as a whole is left as they wrote it: a limit that they removed stays away. */ -}}
{{- define "kvtier.fill" -}}
{{- $values := index . 0 -}}
{{- range $name, $default := index . 1 -}}
{{- if not (hasKey $values $name) -}}
{{- $_ := set $values $name $default -}}
{{- else if and (kindIs "map" $default) (not (has $name (list "resources" "podSecurityContext"))) -}}
{{- include "kvtier.fill" (list (get $values $name) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* 40 characters leave room for the longest suffix. */ -}}
{{- define "kvtier.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kvtier.name" .) .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvtier.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvtier.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name the ServiceAccount, or set serviceAccount.create" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvtier.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "kvtier.labels" -}}
{{ include "kvtier.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvtier
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvtier.image" -}}
{{- $image := printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- if .Values.image.digest -}}
{{- $image = printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- end -}}
{{- include "kvtier.mirrored" (list . $image) -}}
{{- end -}}

{{- /* An image from the mirror, if there is one. */ -}}
{{- define "kvtier.mirrored" -}}
{{- $registry := (index . 0).Values.global.imageRegistry -}}
{{- ternary (regexReplaceAllLiteral "^ghcr[.]io/" (index . 1) (printf "%s/" $registry)) (index . 1) (ne $registry "") -}}
{{- end -}}

{{- /* Image of the connector or the janitor: as given, that of the mirror, or empty for the operator's own default. */ -}}
{{- define "kvtier.ownImage" -}}
{{- $default := ternary (printf "ghcr.io/kvtier/%s:%s" (index . 1) (index . 0).Chart.AppVersion) "" (ne (index . 0).Values.global.imageRegistry "") -}}
{{- include "kvtier.mirrored" (list (index . 0) (default $default (index . 2))) -}}
{{- end -}}

{{- /* Namespaces that are served, as a JSON list; empty for all. */ -}}
{{- define "kvtier.namespaces" -}}
{{- if eq .Values.scope "Namespaced" -}}
{{- default (list .Release.Namespace) .Values.namespaces | uniq | toJson -}}
{{- else -}}
{{- if .Values.namespaces -}}
{{- fail "namespaces: set scope to Namespaced as well, or leave the list empty" -}}
{{- end -}}
[]
{{- end -}}
{{- end -}}
