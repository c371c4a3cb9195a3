{{- /* Checks that values.schema.json cannot make, or reports only as a pattern. */ -}}
{{- define "modelport.checks" -}}
{{- $path := .Values.modelRepository.path -}}
{{- if not (or $path .Values.routes) -}}
{{- fail "nothing to serve: set modelRepository.path, or routes" -}}
{{- end -}}
{{- if and (contains "://" $path) (contains "@" $path) -}}
{{- fail "modelRepository.path holds credentials, which everyone can see in a pod's arguments: set them in envFrom or by the service account" -}}
{{- end -}}
{{- if and $path (not (regexMatch "^(/.+|(s3|gs|az)://.+)$" $path)) -}}
{{- fail (printf "modelRepository.path '%s' is neither an absolute path nor s3://, gs:// or az://BUCKET/PREFIX" $path) -}}
{{- end -}}
{{- if and (include "modelport.mountsRepository" .) (not .Values.modelRepository.volume) -}}
{{- fail (printf "modelRepository.path '%s' is a directory: set modelRepository.volume to the volume to mount there, such as a persistentVolumeClaim" $path) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas %d is more than autoscaling.maxReplicas %d: raise the maximum or lower the minimum" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- $most := toString .Values.podDisruptionBudget.maxUnavailable -}}
{{- if and .Values.podDisruptionBudget.enabled (not (regexMatch "^[1-9][0-9]*%?$" $most)) -}}
{{- fail (printf "podDisruptionBudget.maxUnavailable is '%s', so no node could ever be drained: set 1 or more, or a share such as 25%%" $most) -}}
{{- end -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$" (toString .Values.temporary.sizeLimit)) -}}
{{- fail (printf "temporary.sizeLimit '%v' is not a Kubernetes quantity: write 20Gi or 500Mi" .Values.temporary.sizeLimit) -}}
{{- end -}}
{{- if and .Values.access.rules .Values.access.configMapName -}}
{{- fail (printf "access.rules and access.configMapName '%s' both set access.toml: use one of them" .Values.access.configMapName) -}}
{{- end -}}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secretName) -}}
{{- fail "tls.clientCertificates needs tls.secretName, whose ca.crt verifies the clients" -}}
{{- end -}}
{{- if and .Values.tls.clientCertificates (not (include "modelport.hasAccess" .)) -}}
{{- fail "tls.clientCertificates needs access.rules with [certificates]: without rules, a client without a certificate may do everything" -}}
{{- end -}}
{{- if and (regexMatch `(?m)^\s*\[certificates\]` (toString .Values.access.rules)) (not .Values.tls.clientCertificates) -}}
{{- fail "access.rules has [certificates], which needs tls.clientCertificates=true" -}}
{{- end -}}
{{- $ports := list (int .Values.service.httpPort) (int .Values.service.grpcPort) (int .Values.service.metricsPort) -}}
{{- if lt (len (uniq $ports)) 3 -}}
{{- fail (printf "service.httpPort, service.grpcPort and service.metricsPort are %v: give them different ports" $ports) -}}
{{- end -}}
{{- end -}}
