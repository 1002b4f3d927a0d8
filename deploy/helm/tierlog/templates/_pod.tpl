{{- /* The pod of a component: .root, .component. */ -}}
{{- define "tierlog.pod" -}}
{{- $root := .root -}}
{{- $own := index $root.Values .component -}}
{{- $facts := index (include "tierlog.facts" $root | fromYaml) .component -}}
{{- $name := include "tierlog.fullname" $root -}}
{{- $scheme := ternary "HTTP" "HTTPS" (eq (include "tierlog.open" $root) "true") -}}
{{- $files := dict "root" $root "token" $root.Values.security.token -}}
{{- $section := printf "TIERLOG_%s__" (upper .component) -}}
metadata:
  annotations:
    checksum/settings: {{ include (print $root.Template.BasePath "/configmap.yaml") $root | sha256sum }}
    {{- with $own.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "tierlog.labels" . | nindent 4 }}
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tierlog.serviceAccount" . }}
  automountServiceAccountToken: false
  # Kubernetes' own TIERLOG_READER_PORT and the like would read like settings that do not exist.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "tierlog.grace" . }}
  securityContext: {{- include "tierlog.podSecurityContext" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $own.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "tierlog.topologySpread" . | trim }}
  topologySpreadConstraints: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "tierlog.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext: {{- include "tierlog.containerSecurityContext" $root | nindent 8 }}
      ports:
        {{- range $purpose, $port := $facts.ports }}
        - {name: {{ $purpose }}, containerPort: {{ int $port }}, protocol: TCP}
        {{- end }}
      envFrom:
        - configMapRef: {name: {{ $name }}-settings}
        {{- with $root.Values.ledgerKeys.existingSecret }}
        - prefix: TIERLOG_KEYS__
          secretRef: {name: {{ . }}}
        {{- end }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        - {name: {{ $section }}LISTEN__HOST, value: "0.0.0.0"}
        {{- range $purpose, $port := $facts.ports }}
        - {name: {{ $section }}LISTEN__{{ upper $purpose }}_PORT, value: {{ int $port | quote }}}
        {{- end }}
        {{- if eq .component "ingest" }}
        - {name: TIERLOG_INGEST__NODE_ID, value: $(POD_NAME)}
        - name: TIERLOG_INGEST__LISTEN__ADVERTISE_HOST
          value: $(POD_NAME).{{ $name }}-ingest-nodes.$(POD_NAMESPACE).svc.{{ $root.Values.clusterDomain }}
        - {name: TIERLOG_INGEST__DATA_DIR, value: /data/journal}
        - {name: TIERLOG_INGEST__LEDGER_DIRECTORIES, value: '["/data/ledgers"]'}
        {{- else if eq .component "offloader" }}
        - {name: TIERLOG_OFFLOADER__WORKER_NAME, value: $(POD_NAME)}
        {{- else if eq .component "scheduler" }}
        # For people: kubectl exec deploy/… -- tierlog offload status
        {{- include "tierlog.clientEnv" $root | nindent 8 }}
        {{- end }}
        {{- with include "tierlog.secretEnv" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "tierlog.securityEnv" $files | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $own.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      # HTTP comes when a start is through, or waits for ZooKeeper or the bucket; from then on the loop answers,
      # or the pod is restarted.
      startupProbe:
        httpGet: {path: /livez, port: http, scheme: {{ $scheme }}}
        periodSeconds: {{ int $own.startup.periodSeconds }}
        failureThreshold: {{ int $own.startup.failureThreshold }}
        timeoutSeconds: 5
      livenessProbe:
        httpGet: {path: /livez, port: http, scheme: {{ $scheme }}}
        periodSeconds: 10
        failureThreshold: 6
        timeoutSeconds: 5
      readinessProbe:
        httpGet: {path: /readyz, port: http, scheme: {{ $scheme }}}
        periodSeconds: 5
        failureThreshold: 2
        timeoutSeconds: 5
      {{- if $own.preStopSeconds }}
      # Endpoints go before the process does; then SIGTERM drains it.
      lifecycle:
        preStop: {sleep: {seconds: {{ int $own.preStopSeconds }}}}
      {{- end }}
      resources: {{- toYaml $own.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if eq .component "ingest" }}
        - {name: journal, mountPath: /data/journal}
        - {name: ledgers, mountPath: /data/ledgers}
        {{- end }}
        {{- if $root.Values.config.existingSecret }}
        - {name: config, mountPath: /etc/tierlog, readOnly: true}
        {{- end }}
        {{- with include "tierlog.securityMounts" $files | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $own.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 256Mi}
    {{- with $root.Values.config.existingSecret }}
    - name: config
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with include "tierlog.securityVolumes" $files | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $own.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
