#!/usr/bin/env bash
# End-to-end in a real cluster: kind with two workers and a volume that both mount, images of this checkout, vLLM's CPU
# build. Needs docker, kind and kubectl. Nothing is tried twice. What failed leaves everything in $DATA/e2e-kind.
#
#   KEEP=1    leave the cluster for a look at it
set -euo pipefail
cd "$(dirname "$0")/../.."
DATA=${DATA:-.kvtier}
NAME=kvtier-e2e
OUT=$DATA/e2e-kind
PYTHON=.venv/bin/python
for program in docker kind kubectl; do
  command -v "$program" >/dev/null || { echo "e2e-kind needs $program: https://kind.sigs.k8s.io/docs/user/quick-start" >&2; exit 2; }
done
# helm of the locked tools
PATH=$(dirname "$("$PYTHON" -c 'import sys; sys.path.insert(0, ".ci"); import helm; print(helm.binary("helm"))')"):$PATH
mkdir -p "$OUT"
KUBECONFIG=$(realpath "$OUT")/kubeconfig
export KUBECONFIG

dump() {
  kubectl get all,kvt,pvc,pv,configmaps,leases,events -A -o wide >"$OUT/objects.txt" 2>&1 || true
  kubectl get kvt,deployments,pods,jobs -A -o yaml >"$OUT/objects.yaml" 2>&1 || true
  kubectl describe kvt,pods,nodes -A >"$OUT/described.txt" 2>&1 || true
  "$PYTHON" -m kvtier_cli doctor >"$OUT/doctor.txt" 2>&1 || true
  "$PYTHON" -m kvtier_cli report -n default --file "$OUT/report.tar.gz" >/dev/null 2>&1 || true
  kind export logs --name "$NAME" "$OUT/logs" >/dev/null 2>&1 || true
  echo "everything that is known of the failure is in $OUT" >&2
}

end() {
  status=$?
  [ "$status" = 0 ] || dump
  [ "${KEEP:-}" = 1 ] || kind delete cluster --name "$NAME" >/dev/null 2>&1 || true
  exit "$status"
}

if [ "${1:-}" = upgrade ]; then
  helm upgrade kvtier charts/kvtier --namespace kvtier-system --wait --timeout 5m --reuse-values \
    --set image.tag=two --set connectorImage=kvtier-connector:two --set janitorImage=kvtier-janitor:two
  exit 0
fi

trap end EXIT
rm -rf "${OUT:?}"/*
NAME=$NAME TAG=one TIER="" bash e2e/kind/quickstart.sh --set settings.resyncSeconds=20
for image in kvtier-operator kvtier-connector kvtier-janitor; do
  docker tag "$image:one" "$image:two"
  kind load docker-image --name "$NAME" "$image:two"
done
E2E_KUBECONFIG=$KUBECONFIG E2E_SECONDS=${E2E_SECONDS:-1200} E2E_UPGRADE="bash e2e/kind/run.sh upgrade" \
  "$PYTHON" -m pytest tests/kind/test_scenarios.py -x -n 0 --timeout 7200
CONFORMANCE_KUBECONFIG=$KUBECONFIG "$PYTHON" -m pytest tests/conformance
