#!/usr/bin/env bash
# The quickstart on kind: images of this checkout, two workers that mount one directory of this machine, and a tier of
# vLLM's CPU build. Needs docker, kind, kubectl and helm. Arguments go to helm, for example --set metrics.enabled=false.
#
#   NAME=kvtier        the cluster; `kind delete cluster --name kvtier` removes it
#   TAG=quickstart     the tag of the images
#   TIER=FILE          what is applied in the end; empty for no tier
set -euo pipefail
cd "$(dirname "$0")/../.."
NAME=${NAME:-kvtier}
TAG=${TAG:-quickstart}
TIER=${TIER-e2e/kind/tier.yaml}
for program in docker kind kubectl helm; do
  command -v "$program" >/dev/null || { echo "the quickstart needs $program: https://kind.sigs.k8s.io/docs/user/quick-start" >&2; exit 2; }
done

# Engines run as user 10001, and a directory of a node does not know fsGroup.
mkdir -p /tmp/kvtier-kind/blocks
chmod 777 /tmp/kvtier-kind/blocks
kind create cluster --name "$NAME" --config e2e/kind/cluster.yaml --wait 5m

# kind's nodes pull no image that only this machine has.
docker build --file operator/Dockerfile --tag "kvtier-operator:$TAG" .
docker build --file connector/Dockerfile --tag "kvtier-connector:$TAG" .
docker build --file connector/janitor.Dockerfile --tag "kvtier-janitor:$TAG" .
kind load docker-image --name "$NAME" "kvtier-operator:$TAG" "kvtier-connector:$TAG" "kvtier-janitor:$TAG"

kubectl apply -f e2e/kind/volume.yaml
helm upgrade --install kvtier charts/kvtier --namespace kvtier-system --create-namespace --wait --timeout 5m \
  --set image.repository=kvtier-operator --set "image.tag=$TAG" \
  --set "connectorImage=kvtier-connector:$TAG" --set "janitorImage=kvtier-janitor:$TAG" "$@"

[ -n "$TIER" ] || exit 0
kubectl apply -f "$TIER"
# The nodes pull vLLM's image, some GiB, and engines load the model from the hub.
kubectl wait --for=condition=Ready --timeout=30m -f "$TIER"
kubectl get -f "$TIER"
