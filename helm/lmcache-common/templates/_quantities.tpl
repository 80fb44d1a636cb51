{{/*
The bytes of a size that is written like a Kubernetes quantity (512Mi, 0.5Gi, 100G), as an integer.
Takes: name (of the value, for the error), value; min and max (optional), also sizes; maxFrom (optional), the value that max comes from.
*/}}
{{- define "lmcache-common.bytes" -}}
{{- $text := toString .value -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?([KMGTP]i|[kMGTP])?$" $text) -}}
{{- fail (printf "%s=%s: must be a number with a unit, such as 512Mi or 50Gi." .name $text) -}}
{{- end -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $bytesOf := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 -}}
{{- $bytesOf = merge $bytesOf (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624) -}}
{{- $bytes := mulf (trimSuffix $unit $text) (get $bytesOf $unit) | ceil -}}
{{- range $bound := list "min" "max" -}}
{{- with get $ $bound -}}
{{- $limit := include "lmcache-common.bytes" (dict "name" $bound "value" .) | float64 -}}
{{- if ternary (lt $bytes $limit) (gt $bytes $limit) (eq $bound "min") -}}
{{- $source := ternary (printf " (%s)" $.maxFrom) "" (and (eq $bound "max") (hasKey $ "maxFrom")) -}}
{{- fail (printf "%s=%s: must be at %s %s%s." $.name $text (ternary "least" "most" (eq $bound "min")) . $source) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- int64 $bytes -}}
{{- end -}}

{{/* The same in GiB, as services' settings want it; a fraction where it is no whole number. Takes: as bytes. */}}
{{- define "lmcache-common.gib" -}}
{{- divf (include "lmcache-common.bytes" .) 1073741824 | toJson -}}
{{- end -}}

{{/* The same in MiB, rounded up. Takes: as bytes. */}}
{{- define "lmcache-common.mib" -}}
{{- divf (include "lmcache-common.bytes" .) 1048576 | ceil | int64 -}}
{{- end -}}
