# SPDX-License-Identifier: Apache-2.0
"""What a user sees when something is wrong with a tier: ``python -m e2e.bench.operator_findings --out FILE``.

The real kubectl and helm against the embedded API server, with operators of this checkout; the cluster's own
controllers are those of `operator_cluster`, so what a kubelet would say of a container is said by this script. One file
of commands and of what they print.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml
from e2e.bench.operator_cluster import NAMESPACE, tier, until
from e2e.bench.terminal import ROOT, SLOW, Scene, SlowCluster, aggregated_roles, without_right
from lupa.lua51 import LuaRuntime

CHART: Final = ROOT / "charts" / "kvtier"
_ROOM: Final = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "8", "pods": "110"}
NODE: Final = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "large"},
    "status": {"allocatable": _ROOM, "capacity": _ROOM},
}


def grown_claim(scene: Scene) -> None:
    """A claim that was grown by hand holds up nothing but itself."""
    with scene.operator():
        scene.ready("llama", volume={"claim": {"size": "2Ti"}}, replicas=1)
        scene.run("""kubectl patch pvc llama-blocks -p '{"spec":{"resources":{"requests":{"storage":"4Ti"}}}}'""")
        scene.run("kubectl scale kvt llama --replicas=2")
        scene.run("""kubectl patch kvt llama --type=merge -p '{"spec":{"disk":{"mode":"Bypass"}}}'""")
        scene.wait("llama", "Ready", "ClaimCannotShrink")
        scene.show("llama")
        scene.run("kubectl get deployment llama-engine")
        scene.run("kubectl get configmap llama-connector -o jsonpath={.data.live\\.json}")
        scene.run("kubectl delete kvt llama")
        scene.say("made anew from git, over the claim that was kept:")
        scene.apply("llama", volume={"claim": {"size": "2Ti"}})
        scene.wait("llama", "Available", "True")
        scene.run("kubectl get deployment")


def foreign_object(scene: Scene) -> None:
    """An object of somebody else under a name that a tier needs is told, left alone, and its going noticed at once."""
    with scene.operator():
        scene.run("kubectl create configmap llama-connector --from-literal=theirs=1")
        scene.apply("llama")
        scene.wait("llama", "Ready", "ObjectNotOurs")
        scene.show("llama")
        scene.run("kubectl delete configmap llama-connector")
        scene.wait("llama", "Ready", "True")
        scene.show("llama")


def two_operators(scene: Scene) -> None:
    """Of two operators one works, and the other waits and says so."""
    with scene.operator(KVTIER_JANITOR_IMAGE="registry.example.com/janitor:1"):
        scene.ready("llama")
        before = scene.run("kubectl get deployment llama-janitor -o jsonpath={.metadata.generation}")
        scene.say("somebody runs another one, of another release:")
        with scene.operator(KVTIER_JANITOR_IMAGE="registry.example.com/janitor:2") as second:
            until(lambda: "does not work on the tiers" in second.log.read_text(), seconds=SLOW)
            time.sleep(21)
            after = scene.run("kubectl get deployment llama-janitor -o jsonpath={.metadata.generation}")
            scene.say(f"after 21 s the janitor's Deployment is of generation {after}, as before ({before})")
            scene.show("llama")
            scene.run(
                "kubectl get lease kvtier-tiers -o custom-columns=NAME:.metadata.name,HOLDER:.spec.holderIdentity"
            )
            scene.run("kubectl get events --field-selector reason=AnotherOperatorWorks")
            log = [line for line in second.log.read_text().splitlines() if "does not work" in line]
            scene.say("the log of the second one:")
            scene.lines += log


def dead_janitor(scene: Scene) -> None:
    """A janitor that does not stay up takes Ready away, has a condition and an event."""
    with scene.operator():
        scene.ready("llama")
        ended = {"exitCode": 1, "reason": "Error", "message": "cannot open /var/lib/kvtier: Permission denied"}
        container = {"name": "janitor", "image": "j", "imageID": "", "ready": False, "restartCount": 5}
        crashed = {
            **container,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
        status = {"status": {"conditions": conditions, "containerStatuses": [crashed]}}
        pod = scene.pod_of("llama-janitor")
        scene.say("the kubelet tells that its container ends again and again")
        scene.cluster.call("PATCH", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status", status)
        scene.wait("llama", "JanitorHealthy", "JanitorFailing")
        scene.show("llama")
        scene.run("kubectl get kvt llama -o wide")


def missing_right(scene: Scene) -> None:
    """Without the right to one kind, the rest of a tier is made, and the operator lives."""
    with without_right(scene.cluster, "poddisruptionbudgets"), scene.operator() as process:
        scene.apply("llama")
        scene.wait("llama", "Ready", "ApplyFailed")
        scene.wait("llama", "Available", "True")
        scene.show("llama")
        scene.run("kubectl get deployment,pdb")
        scene.say(f"the operator lives: {process.process.poll() is None}")


def helm_upgrade(scene: Scene) -> None:
    """A release of fewer values is upgraded with the values it has."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    old = scene.folder / "older" / "kvtier"
    shutil.copytree(CHART, old)
    values["rbac"].pop("aggregate")
    (old / "values.yaml").write_text(yaml.safe_dump(values))
    (old / "values.schema.json").unlink()
    where = "kvtier --namespace kvtier-system"
    scene.run(f"helm install {where} {old} --create-namespace --set crds.install=false,settings.workers=7")
    scene.run(f"helm upgrade {where} {CHART} --reuse-values --set replicas=2")
    scene.run("kubectl get deployment --namespace kvtier-system")
    scene.say("a tier under it, as ever:")
    with scene.operator():
        scene.ready("llama")
        scene.show("llama")


def old_engines(scene: Scene) -> None:
    """After an upgrade of the operator a tier says that its engines are old, and how to replace them."""
    with scene.operator(KVTIER_CONNECTOR_IMAGE="registry.example.com/connector:1"):
        scene.ready("llama")
    scene.say("the operator is upgraded")
    with scene.operator(KVTIER_CONNECTOR_IMAGE="registry.example.com/connector:2"):
        scene.wait("llama", "UpToDate", "False")
        scene.show("llama")


def scaled_up(scene: Scene) -> None:
    """A tier that is scaled up stays Available, and Ready."""
    with scene.operator():
        scene.ready("llama")
        scene.cluster.slow.add("llama-engine")
        try:
            scene.run("kubectl scale kvt llama --replicas=3")
            scene.wait("llama", "EnginesReady", "EnginesAdded")
            scene.show("llama")
        finally:
            scene.cluster.slow.clear()


def empty_pool(scene: Scene) -> None:
    """A share of nodes that are yet to come makes a pod that waits for one, so that an autoscaler adds it."""
    with scene.operator():
        scene.cluster.slow.add("llama-engine")
        scene.apply("llama", cpu={"fraction": "60%"})
        scene.wait("llama", "StorageChecked", "True")
        scene.wait("llama", "SizingFits", "NoNodeMatches")
        scene.show("llama")
        scene.run("kubectl get deployment llama-engine")
        scene.cluster.slow.clear()


def shared_claim(scene: Scene) -> None:
    """Two tiers whose budgets do not fit their claim both say so."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}},
    }
    with scene.operator():
        scene.run("kubectl apply -f -", stdin=yaml.safe_dump(claim))
        bound = {"status": {"phase": "Bound", "capacity": {"storage": "1Ti"}}}
        scene.cluster.call("PATCH", f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims/shared/status", bound)
        for name in ("llama", "qwen"):
            scene.apply(name, volume={"existingClaim": "shared"}, disk={"budget": {"maxBytes": "900Gi"}})
        for name in ("llama", "qwen"):
            scene.wait(name, "ClaimShared", "BudgetsOverlap")
            scene.wait(name, "Ready", "True")
        scene.show("llama", "qwen")


def drift(scene: Scene) -> None:
    """What others add to the engines is told, and taken back when they are replaced next."""
    with scene.operator():
        scene.ready("llama")
        scene.run("kubectl set env deployment/llama-engine EXTRA=1")
        scene.wait("llama", "UpToDate", "PodsChanged")
        scene.show("llama")
        scene.run("kubectl annotate kvt llama --overwrite kvtier.dev/restart=now")
        scene.wait("llama", "UpToDate", "Current")
        scene.run("kubectl set env deployment/llama-engine --list")


def messages(scene: Scene) -> None:
    """Messages are in the units of users, count what is awaited, and say why nothing goes on."""
    with scene.operator():
        scene.ready("llama", volume={"claim": {"size": "2Ti"}})
        scene.run("""kubectl patch pvc llama-blocks -p '{"spec":{"resources":{"requests":{"storage":"4Ti"}}}}'""")
        scene.wait("llama", "Stalled", "ClaimCannotShrink")
        for kind in ("Ready", "Stalled", "Reconciling"):
            scene.run(f"""kubectl get kvt llama -o jsonpath='{{.status.conditions[?(@.type=="{kind}")].message}}'""")
        scene.run("kubectl delete kvt llama")
        scene.cluster.slow.add("llama-engine")
        try:
            scene.apply("llama", volume={"claim": {"size": "4Ti"}}, replicas=2)
            scene.wait("llama", "Ready", "EnginesStarting")
            scene.show("llama")
        finally:
            scene.cluster.slow.clear()


def unreachable(scene: Scene) -> None:
    """Pods that cannot be reached are told of, and keep no other tier's waiting (see operator_scale for how long)."""
    with scene.operator(KVTIER_CANARY_SETTLE_SECONDS="0"):
        scene.ready("apart", replicas=2)
        scene.ready("llama", replicas=2)
        scene.say("the pods of tier apart have addresses that drop everything")
        for number in range(2):
            address = {"status": {"podIP": f"192.0.2.{number + 1}"}}
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/apart-engine-{number}/status"
            scene.cluster.call("PATCH", path, address)
        scene.wait("apart", "SharedCacheVerified", "CanaryUnanswered")
        scene.show("apart", "llama")


def cel_cost(scene: Scene) -> None:
    """A rule that may cost too much is refused, as a real API server refuses it; ours stay far below."""
    definition = yaml.safe_load((ROOT / "crds" / "kvcachetier.yaml").read_text())
    definition["metadata"] = {"name": "dears.example.com"}
    definition["spec"] |= {"group": "example.com", "names": {"plural": "dears", "singular": "dear", "kind": "Dear"}}
    (version,) = definition["spec"]["versions"]
    rule = "self.all(a, self.all(b, a == b))"
    items = {"type": "array", "items": {"type": "string"}, "x-kubernetes-validations": [{"rule": rule}]}
    version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["any"] = items
    scene.run("kubectl create -f -", stdin=yaml.safe_dump(definition))
    scene.run("kubectl get crd kvcachetiers.kvtier.dev")
    with scene.operator():
        scene.ready("llama")
        scene.show("llama")


def argo_cd(scene: Scene) -> None:
    """With the health script that comes along, Argo CD says of a tier what its conditions say."""
    (script,) = yaml.safe_load((ROOT / "docs" / "argocd.yaml").read_text())["data"].values()

    def judged(text: str) -> None:
        lua = LuaRuntime()
        lua.globals()["obj"] = lua.table_from(json.loads(text), recursive=True)
        found = lua.execute(script)
        scene.say(f"Argo CD, by docs/argocd.yaml: {found['status']}: {found['message']}")

    with scene.operator():
        scene.ready("llama", volume={"claim": {"size": "2Ti"}})
        scene.show("llama")
        judged(scene.run("kubectl get kvt llama -o json", is_quiet=True))
        scene.run("""kubectl patch pvc llama-blocks -p '{"spec":{"resources":{"requests":{"storage":"4Ti"}}}}'""")
        scene.wait("llama", "Stalled", "True")
        judged(scene.run("kubectl get kvt llama -o json", is_quiet=True))


def rights(scene: Scene) -> None:
    """Who may edit a namespace may do so with its tiers; who may view it sees them."""
    may = "kubectl auth can-i create kvcachetiers.kvtier.dev --as ann"
    with aggregated_roles(scene.cluster), scene.operator():
        scene.run("kubectl create rolebinding ann --clusterrole=admin --user=ann")
        scene.run("kubectl create rolebinding vic --clusterrole=view --user=vic")
        scene.run(may)
        scene.run(f"helm install kvtier --namespace kvtier-system {CHART} --create-namespace --set crds.install=false")
        until(lambda: scene.run(may, is_quiet=True).startswith("yes"), seconds=SLOW)
        scene.run(may)
        scene.run("kubectl apply --as ann -f -", stdin=yaml.safe_dump(tier("llama")))
        scene.wait("llama", "Ready", "True")
        scene.run("kubectl get kvt --as vic")
        scene.run("kubectl delete kvt llama --as vic")
        scene.show("llama")


FINDINGS: Final[tuple[Callable[[Scene], None], ...]] = (
    grown_claim,
    foreign_object,
    two_operators,
    dead_janitor,
    missing_right,
    helm_upgrade,
    old_engines,
    scaled_up,
    empty_pool,
    shared_claim,
    drift,
    messages,
    unreachable,
    cel_cost,
    argo_cd,
    rights,
)


def main(arguments: list[str] | None = None) -> int:
    """Play all findings and write down what is seen."""
    parser = argparse.ArgumentParser(prog="operator_findings", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="text file")
    parser.add_argument("--only", default="", help="numbers of findings, separated by commas  [default: all]")
    options = parser.parse_args(arguments)
    chosen = {int(each) for each in options.only.split(",") if each} or set(range(1, len(FINDINGS) + 1))
    lines = [f"python -m e2e.bench.operator_findings, {time.strftime('%Y-%m-%d', time.gmtime())}"]
    for number, finding in enumerate(FINDINGS, 1):
        if number not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder, SlowCluster() as cluster:
            scene = Scene(cluster, Path(folder))
            if finding is not empty_pool:
                cluster.api.create(NODE)
            scene.title(number, " ".join((finding.__doc__ or "").split()))
            print(scene.lines[-2], flush=True)
            finding(scene)
        lines += scene.lines
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(line.rstrip() for each in lines for line in each.splitlines() or ("",)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
