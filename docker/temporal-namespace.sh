#!/bin/sh
# Make the namespace, set how long it keeps closed jobs, and register Muster's search attributes.
# Safe to run again. Reads TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and RETENTION.
set -eu

if temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1; then
    temporal operator namespace update --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"
else
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"
fi

known=$(temporal operator search-attribute list --namespace "$TEMPORAL_NAMESPACE")
for pair in MusterAgent:Keyword MusterTenant:Keyword MusterState:Keyword \
    MusterWaitingFor:KeywordList; do
    name=${pair%%:*}
    case $known in
    *"$name"*) ;;
    *) temporal operator search-attribute create --namespace "$TEMPORAL_NAMESPACE" \
        --name "$name" --type "${pair##*:}" ;;
    esac
done
