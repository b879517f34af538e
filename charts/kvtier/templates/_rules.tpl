{{- /* What the operator does in the namespaces that it serves. A test replays every lifecycle against these rules. */ -}}
{{- define "kvtier.rules" -}}
- apiGroups: [kvtier.dev]
  resources: [kvcachetiers]
  verbs: [get, list, watch]
- apiGroups: [kvtier.dev]
  resources: [kvcachetiers/status]
  verbs: [patch]
- apiGroups: [""]
  # Never deleted by the operator: the garbage collector does it, and only under deletionPolicy Delete.
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
- apiGroups: [batch] # tries a new claim
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete] # deleted where a tier switches its janitor off
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  # Of the janitors and routers. A role can grant no more than its author may do: the next rule has the rights of these roles.
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [coordination.k8s.io]
  # Of the janitors, and the one of the operator that works in the namespace.
  resources: [leases]
  verbs: [get, list, create, update, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete] # deleted where a tier gives them up
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete] # deleted where a tier gives up its router
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools] # only of tiers that ask for one
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list] # listed only about a pod that its node cannot start
{{- with .Values.rbac.readSecrets }}
- apiGroups: [""]
  # Keys that engines ask for; read when they are asked a canary prompt.
  resources: [secrets]
  resourceNames: {{ toJson . }}
  verbs: [get]
{{- end }}
{{- end -}}

{{- /* What it reads of the cluster itself; without it, the operator does not tell in advance that no node fits. */ -}}
{{- define "kvtier.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end -}}

{{- /* What it does in its own namespace. */ -}}
{{- define "kvtier.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "kvtier.fullname" . }}]
  verbs: [get, update]
{{- end -}}
