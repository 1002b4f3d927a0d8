{{- /* Names, labels, and what is the same in all pods. Facts of components stand in tierlog.facts. */ -}}

{{- define "tierlog.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* 40 characters at most: names of pods, with the component and a hash behind it, stay below 63. */ -}}
{{- define "tierlog.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "tierlog.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Ports, seconds that an end may take, and outer systems, as each room's extras name them. */ -}}
{{- define "tierlog.facts" -}}
ingest: {ports: {http: 8080, grpc: 9090, wire: 7070}, endSeconds: 55, talksTo: [s3, zookeeper], traces: true}
reader: {ports: {http: 8080, grpc: 9090}, endSeconds: 25, talksTo: [redis, s3, zookeeper]}
offloader: {ports: {http: 8080}, endSeconds: 15, talksTo: [kafka, s3, zookeeper], traces: true}
scheduler: {ports: {http: 8080}, endSeconds: 25, talksTo: [kafka, s3, zookeeper], traces: true}
{{- if .Values.spark.jobs }}
spark: {ports: {}, talksTo: [s3, zookeeper]}
{{- end }}
{{- end -}}

{{- define "tierlog.selector" -}}
app.kubernetes.io/name: {{ include "tierlog.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "tierlog.labels" -}}
{{ include "tierlog.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: tierlog
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tierlog.image" -}}
{{- $own := (index .root.Values .component).image -}}
{{- $shared := .root.Values.image -}}
{{- $name := default (printf "%s%s" $shared.repositoryPrefix .component) $own.repository -}}
{{- $path := $name -}}
{{- with $shared.registry -}}{{- $path = printf "%s/%s" . $name -}}{{- end -}}
{{- if $own.digest -}}
{{- printf "%s@%s" $path $own.digest -}}
{{- else -}}
{{- printf "%s:%s" $path (coalesce $own.tag $shared.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "tierlog.serviceAccount" -}}
{{- $own := (index .root.Values .component).serviceAccount -}}
{{- if $own.create -}}
{{- default (printf "%s-%s" (include "tierlog.fullname" .root) .component) $own.name -}}
{{- else -}}
{{- default "default" $own.name -}}
{{- end -}}
{{- end -}}

{{- /* The tree of settings as variables. toJson, since Go prints 67108864 as 6.7108864e+07. */ -}}
{{- define "tierlog.settings" -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .tree }}
{{- $variable := printf "%s%s" $prefix (upper $name) }}
{{- if kindIs "map" $value }}
{{- include "tierlog.settings" (dict "prefix" (printf "%s__" $variable) "tree" $value) }}
{{- else if kindIs "string" $value }}
{{ $variable }}: {{ $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
{{ $variable }}: {{ $value | toJson | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* What a secret is: by reference, never by value. */ -}}
{{- define "tierlog.secretEnv" -}}
{{- with .Values.s3 }}
{{- if .existingSecret }}
- name: TIERLOG_S3__ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .accessKeyKey }}}}
- name: TIERLOG_S3__SECRET_KEY
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .secretKeyKey }}}}
{{- end }}
{{- end }}
{{- with .Values.redis }}
{{- if .existingSecret }}
- name: TIERLOG_REDIS__URL
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .urlKey }}}}
{{- end }}
{{- end }}
{{- with .Values.wire }}
{{- if .existingSecret }}
- name: TIERLOG_WIRE__TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .tokenKey }}}}
{{- end }}
{{- end }}
{{- if .Values.config.existingSecret }}
- name: TIERLOG_CONFIG
  value: /etc/tierlog/{{ .Values.config.key }}
{{- end }}
{{- end -}}

{{- /* "true" where nothing is encrypted and nobody is asked who it is. */ -}}
{{- define "tierlog.open" -}}
{{- eq (toString (dig "security" "mode" "" .Values.settings)) "open" -}}
{{- end -}}

{{- /* Files of security as settings: .root, .token (existingSecret, key). */ -}}
{{- define "tierlog.securityEnv" -}}
{{- with .root.Values.security }}
{{- if .tls.existingSecret }}
- {name: TIERLOG_SECURITY__TLS__CERTIFICATE_FILE, value: /etc/tierlog-tls/{{ .tls.certificateKey }}}
- {name: TIERLOG_SECURITY__TLS__KEY_FILE, value: /etc/tierlog-tls/{{ .tls.keyKey }}}
- {name: TIERLOG_SECURITY__TLS__CA_FILE, value: /etc/tierlog-tls/{{ .tls.caKey }}}
{{- end }}
{{- if .jwks.existingSecret }}
- {name: TIERLOG_SECURITY__JWT__JWKS_FILE, value: /etc/tierlog-jwks/{{ .jwks.key }}}
{{- end }}
{{- end }}
{{- if .token.existingSecret }}
- {name: TIERLOG_SECURITY__TOKEN_FILE, value: /etc/tierlog-token/{{ .token.key }}}
{{- end }}
{{- end -}}

{{- define "tierlog.securityMounts" -}}
{{- if .root.Values.security.tls.existingSecret }}
- {name: tls, mountPath: /etc/tierlog-tls, readOnly: true}
{{- end }}
{{- if .root.Values.security.jwks.existingSecret }}
- {name: jwks, mountPath: /etc/tierlog-jwks, readOnly: true}
{{- end }}
{{- if .token.existingSecret }}
- {name: token, mountPath: /etc/tierlog-token, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tierlog.securityVolumes" -}}
{{- with .root.Values.security.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .root.Values.security.jwks.existingSecret }}
- name: jwks
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .token.existingSecret }}
- name: token
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "tierlog.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.podSecurity.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
{{- end }}
{{- with .Values.podSecurity.fsGroup }}
fsGroup: {{ int64 . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tierlog.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Where a client finds this release. */ -}}
{{- define "tierlog.clientEnv" -}}
{{- $name := include "tierlog.fullname" . -}}
- {name: TIERLOG_CLIENT__INGEST_ADDRESS, value: "{{ $name }}-ingest:9090"}
- {name: TIERLOG_CLIENT__READER_HTTP_ADDRESS, value: "{{ $name }}-reader:8080"}
- {name: TIERLOG_CLIENT__SCHEDULER_HTTP_ADDRESS, value: "{{ $name }}-scheduler:8080"}
{{- end -}}

{{- define "tierlog.grace" -}}
{{- $own := index .root.Values .component -}}
{{- if not (kindIs "invalid" $own.terminationGracePeriodSeconds) -}}
{{- int $own.terminationGracePeriodSeconds -}}
{{- else -}}
{{- $facts := index (include "tierlog.facts" .root | fromYaml) .component -}}
{{- $seconds := add (int $facts.endSeconds) (int $own.preStopSeconds) -}}
{{- if eq .component "offloader" -}}
{{- $set := default dict .root.Values.settings.offloader -}}
{{- $drain := ceil (dig "drain_s_max" 30.0 $set) -}}
{{- $giveUp := ceil (dig "give_up_s_max" 5.0 $set) -}}
{{- $seconds = add $seconds (int $drain) (int $giveUp) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}
{{- end -}}

{{- define "tierlog.topologySpread" -}}
{{- $own := index .root.Values .component -}}
{{- if $own.topologySpreadConstraints }}
{{- toYaml $own.topologySpreadConstraints }}
{{- else if $own.topologySpread.enabled }}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: {{ $own.topologySpread.hostname }}
  labelSelector:
    matchLabels: {{- include "tierlog.selector" . | nindent 6 }}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: {{ $own.topologySpread.zone }}
  labelSelector:
    matchLabels: {{- include "tierlog.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- /* What would start and then fail: said before anything is installed. */ -}}
{{- define "tierlog.check" -}}
{{- $owner := dig "ingest" "owner" dict .Values.settings -}}
{{- $ensemble := int (dig "ensemble_size" 3 $owner) -}}
{{- if lt (int .Values.ingest.replicaCount) $ensemble -}}
{{- fail (printf "ingest.replicaCount is %d, and a ledger lies on %d nodes: raise it, or lower settings.ingest.owner.ensemble_size, write_quorum and ack_quorum" (int .Values.ingest.replicaCount) $ensemble) -}}
{{- end -}}
{{- if and (ne (include "tierlog.open" .) "true") (not .Values.config.existingSecret) -}}
{{- $security := dig "security" dict .Values.settings -}}
{{- if not .Values.security.tls.existingSecret -}}
{{- fail "security is on: name certificates in security.tls.existingSecret, or set settings.security.mode to open" -}}
{{- end -}}
{{- if and (not .Values.security.jwks.existingSecret) (ne (dig "tls" "client_certificates" "none" $security) "required") -}}
{{- fail "nobody could say who it is: name keys in security.jwks.existingSecret, or set settings.security.tls.client_certificates to required" -}}
{{- end -}}
{{- range $system := list "zookeeper" "kafka" -}}
{{- if not (or (dig $system "tls" "enabled" false $.Values.settings) (has $system (dig "plain_text_to" list $security))) -}}
{{- fail (printf "%s would be reached in plain text: set settings.%s.tls.enabled, or name it in settings.security.plain_text_to" $system $system) -}}
{{- end -}}
{{- end -}}
{{- $plain := hasPrefix "redis://" (toString (dig "redis" "url" "" .Values.settings)) -}}
{{- if and $plain (not (dig "redis" "tls" "enabled" false .Values.settings)) (not (has "redis" (dig "plain_text_to" list $security))) -}}
{{- fail "redis would be reached in plain text: write rediss://, set settings.redis.tls.enabled, or name it in settings.security.plain_text_to" -}}
{{- end -}}
{{- if and (hasPrefix "http://" (toString (dig "s3" "endpoint_url" "" .Values.settings))) (not (has "s3" (dig "plain_text_to" list $security))) -}}
{{- fail "s3 would be reached in plain text: write https:// in settings.s3.endpoint_url, or name it in settings.security.plain_text_to" -}}
{{- end -}}
{{- if .Values.wire.existingSecret -}}
{{- fail "wire.existingSecret is a secret of the open mode, and security is on: services show security.token, or their certificates" -}}
{{- end -}}
{{- end -}}
{{- if and (eq (include "tierlog.open" .) "true") (eq (toString .Values.settings.profile) "production") -}}
{{- fail "settings.security.mode is open, and settings.profile is production" -}}
{{- end -}}
{{- if and .Values.offloader.keda.enabled (gt (int .Values.offloader.keda.minReplicaCount) (int .Values.offloader.keda.maxReplicaCount)) -}}
{{- fail "offloader.keda.minReplicaCount is above maxReplicaCount" -}}
{{- end -}}
{{- if and .Values.reader.autoscaling.enabled (gt (int .Values.reader.autoscaling.minReplicas) (int .Values.reader.autoscaling.maxReplicas)) -}}
{{- fail "reader.autoscaling.minReplicas is above maxReplicas" -}}
{{- end -}}
{{- end -}}
