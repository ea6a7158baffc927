#!/bin/sh
# Make the namespace, set how long it keeps closed jobs, and register Muster's search attributes.
# Safe to run again. Reads TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and RETENTION.
set -eu

if temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1; then
    temporal operator namespace update --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"
else
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"
fi

# The server's own services learn of a new namespace within seconds.
tries=30
until known=$(temporal operator search-attribute list --namespace "$TEMPORAL_NAMESPACE" 2>&1); do
    tries=$((tries - 1))
    if [ "$tries" -eq 0 ]; then
        echo "$known" >&2
        exit 1
    fi
    sleep 1
done
for pair in MusterAgent:Keyword MusterTenant:Keyword MusterState:Keyword \
    MusterWaitingFor:KeywordList; do
    name=${pair%%:*}
    case $known in
    *"$name"*) ;;
    *) temporal operator search-attribute create --namespace "$TEMPORAL_NAMESPACE" \
        --name "$name" --type "${pair##*:}" ;;
    esac
done
