{{/* Parts of all pods. The context is (list $ "name of the process"), or $ alone. */}}

{{- define "outbox.name" -}}{{ (index . 0).Release.Name }}-{{ index . 1 }}{{- end }}

{{- define "outbox.labels" -}}
app.kubernetes.io/name: {{ include "outbox.name" . }}
app.kubernetes.io/part-of: {{ (index . 0).Release.Name }}
{{- end }}

{{- define "outbox.image" -}}
{{- .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "outbox.identity" }}
{{- $root := index . 0 }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "outbox.name" . }}
  labels: {{- include "outbox.labels" . | nindent 4 }}
  {{- with index $root.Values.identities (index . 1) }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{- define "outbox.pod" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ include "outbox.name" . }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "outbox.apart" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {app.kubernetes.io/name: {{ include "outbox.name" . }}}
{{- end }}

{{- define "outbox.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end }}

{{- define "outbox.probes" -}}
# Once it has reached its servers; a standby is ready too.
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  timeoutSeconds: 10
  periodSeconds: 10
# Detects a frozen process, not an unavailable database or Kafka: it answers without either, so that no outage ends a
# relay. A frozen relay has lost its shard before this ends it; the restart replaces the missing standby.
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  timeoutSeconds: 10
  periodSeconds: 20
  failureThreshold: 6
{{- end }}

{{- define "outbox.budget" }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "outbox.name" . }}
  labels: {{- include "outbox.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {app.kubernetes.io/name: {{ include "outbox.name" . }}}
{{- end }}

{{/* Of the metrics of relays and consumers: only for Prometheus, no other client connects to them. */}}
{{- define "outbox.scraped" }}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "outbox.name" . }}
  labels: {{- include "outbox.labels" . | nindent 4 }}
spec:
  clusterIP: None
  selector: {app.kubernetes.io/name: {{ include "outbox.name" . }}}
  ports:
    - {name: metrics, port: {{ index . 2 }}, targetPort: metrics}
{{- if (index . 0).Values.monitoring.serviceMonitor }}
---
# With the Prometheus operator; `job` is then the service's name, and `namespace` this one.
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ include "outbox.name" . }}
  labels: {{- include "outbox.labels" . | nindent 4 }}
spec:
  selector:
    matchLabels: {app.kubernetes.io/name: {{ include "outbox.name" . }}}
  endpoints:
    - {port: metrics, interval: 15s}
{{- end }}
{{- end }}

{{/* (list $ "process" (list of ingress rules) (list of egress rules)), the rules as text. */}}
{{- define "outbox.policy" }}
{{- if (index . 0).Values.network.policies }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "outbox.name" . }}
  labels: {{- include "outbox.labels" . | nindent 4 }}
spec:
  podSelector: {matchLabels: {app.kubernetes.io/name: {{ include "outbox.name" . }}}}
  policyTypes: [Ingress, Egress]
  ingress: {{ if not (index . 2) }}[]{{ else }}{{ index . 2 | nindent 4 }}{{ end }}
  egress:
    - to: [{namespaceSelector: {}, podSelector: {matchLabels: {k8s-app: kube-dns}}}]
      ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
    {{- index . 3 | nindent 4 }}
{{- end }}
{{- end }}

{{- define "outbox.to" -}}
- ports: [{{ range $n, $port := . }}{{ if $n }}, {{ end }}{protocol: TCP, port: {{ $port }}}{{ end }}]
{{- end }}

{{- define "outbox.prometheus" -}}
- from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ (index . 0).Values.network.monitoringNamespace }}}}}]
  ports: [{protocol: TCP, port: {{ index . 1 }}}]
{{- end }}

{{- define "outbox.kafka.mount" -}}
{{- if .Values.secrets.kafka -}}
- {name: kafka, mountPath: /etc/outbox/kafka, readOnly: true}
{{- end }}
{{- end }}

{{- define "outbox.kafka.volume" -}}
{{- with .Values.secrets.kafka -}}
- {name: kafka, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}
