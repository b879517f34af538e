# SPDX-License-Identifier: Apache-2.0
"""Write or check docs/conditions.md: ``python -m kvtier_operator.api.conditions_reference --write``.

Conditions, reasons and their meanings come from `api.reasons`. The remedies are written here, in a sentence each: the
message of the condition has the details.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvtier_connector.contract import generated_page
from kvtier_operator.api.reasons import CONDITIONS, REASONS, Reason

REFERENCE: Final = Path(__file__).parents[3] / "docs" / "conditions.md"

_QUESTIONS: Final = (
    ("You want to know", "Watch"),
    ("---", "---"),
    ("whether requests are answered, for alerts", "`Available`: True while one engine serves, in rollouts, too"),
    ("whether all is well and a rollout is through", "`Ready`: False from an edit of the engines until all run it"),
    ("how many engines serve", "`EnginesReady`, `status.readyReplicas`"),
    ("whether a janitor clears the volume", "`JanitorHealthy`"),
    ("whether tiers on one claim may take more than it holds", "the reason of `ClaimShared`: `BudgetsOverlap`"),
    ("whether engines wait for a restart: the operator was upgraded, or their pods were edited", "`UpToDate`"),
)

_HEAD: Final = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by python -m kvtier_operator.api.conditions_reference --write; do not edit. -->
# Conditions, and what to do about them

`kubectl describe kvt NAME` shows them; `kubectl wait --for=condition=Ready kvt/NAME` waits for the summary. The message
of a condition names the pod, the field or the object, and the remedy; this page says what each reason stands for.

{questions}
`Ready` takes its reason from the first problem below. A dead janitor is one, for then nothing clears the volume.
Scaling a tier up that was ready, or replacing an engine whose node was lost, is none. The conditions `Available`,
`UpToDate`, `ClaimShared` and `DiskEffective` do not take it away. The status `Unknown` means that it cannot be told
yet, and is no problem by itself. Flux reads `Reconciling` and `Stalled` (kstatus), and so
does Argo CD [once it was taught](install.md#argo-cd-and-flux): a tier that is `Stalled` waits for a person to act.

Two annotations on the resource act at once. A new value of `kvtier.dev/restart` replaces every engine once; the new
ones are as a newer operator renders them. The annotation `kvtier.dev/paused: "true"` stops every change, like
`spec.paused`.
"""

REMEDIES: Final[Mapping[Reason, str]] = {
    Reason.SPEC_INVALID: "Correct the field that the message names.",
    Reason.OBJECT_NOT_OURS: "Delete or rename that object, or create the tier under another name.",
    Reason.APPLY_FAILED: "Read the API server's words: a quota, a policy, or a missing right of the operator.",
    Reason.BLOCKS_NOT_WHOLE: "Set the number that the message gives, or leave `spec.disk.blockTokens` out.",
    Reason.LAYOUT_NOT_CANONICAL: "Set `spec.disk.canonicalLayout` to false; the message says what stands against it.",
    Reason.HEADS_NOT_DIVISIBLE: "Set one of the numbers that the message gives.",
    Reason.CLAIM_PENDING: "`kubectl describe pvc` says why; see that the storage class exists and can be shared.",
    Reason.CLAIM_MISSING: "Create the claim; it is noticed at once.",
    Reason.CLAIM_TERMINATING: "Save what you need, then set `spec.replicas` to 0: no pod of the tier holds it then.",
    Reason.CLAIM_LOST: "Delete the claim, so that a new one is made; what was cached is lost.",
    Reason.CLAIM_EXPANDING: "Nothing, mostly; `kvtier.dev/restart` if the file system waits for a new mount.",
    Reason.CLAIM_NOT_SHARED: "Use a ReadWriteMany claim, or one replica.",
    Reason.CLAIM_IMMUTABLE: "Restore the old value, or make another tier for the new claim.",
    Reason.CLAIM_CANNOT_SHRINK: "Restore the size; limit `spec.disk.budget.maxBytes` instead.",
    Reason.BUDGETS_OVERLAP: "Lower `spec.disk.budget.maxBytes` of these tiers, or let the claim grow.",
    Reason.DOES_NOT_FIT: "Lower `spec.cpu.size` or `spec.engine.memory`, or add a larger node.",
    Reason.NO_NODE_MATCHES: "Correct the node selector, tolerations or accelerator, or add such a node.",
    Reason.NODES_UNKNOWN: "Give the operator the right to list nodes, or set `spec.cpu.size`.",
    Reason.NOT_SCHEDULED: "Change `spec.engine.podTemplate`, or add a node.",
    Reason.PODS_REFUSED: "Raise the quota, or change what admission refused.",
    Reason.RUNTIME_CLASS_MISSING: "Correct `runtimeClassName`, or install that runtime on the nodes.",
    Reason.IMAGE_PULL_FAILED: "Correct the image, or add `imagePullSecrets`.",
    Reason.CONFIG_MISSING: "Create the Secret or ConfigMap that the message names.",
    Reason.MULTI_ATTACH: "Use a storage class whose volumes several nodes can mount.",
    Reason.VOLUME_NOT_MOUNTED: "Check the storage driver on that node, and the way to its server.",
    Reason.INSTALL_FAILED: "Read the log of the container `install-connector`.",
    Reason.OUT_OF_MEMORY: "Raise `spec.engine.memory`, or lower `spec.cpu.size`.",
    Reason.SHM_TOO_SMALL: "Lower `spec.cpu.size` if something else in the pod uses shared memory.",
    Reason.STALE_SHM: "Delete the pod.",
    Reason.HUB_UNREACHABLE: "Let the pods reach the model hub, give a proxy or a mirror, or put the model on a volume.",
    Reason.TOKEN_REFUSED: "Check the Secret of `spec.model.tokenSecretRef` and the account's access to the model.",
    Reason.MODEL_NOT_FOUND: "Correct `spec.model.name` or `spec.model.revision`.",
    Reason.DEVICE_MISSING: "Check the device plugin and driver, or ask for fewer devices.",
    Reason.DEVICE_OUT_OF_MEMORY: "Lower `--max-model-len`, use more devices, or larger ones.",
    Reason.ARGS_REFUSED: "Correct `spec.engine.args` for this vLLM.",
    Reason.ADAPTER_REFUSED: "Correct or remove the adapter that the message names in `spec.model.loras`, or raise "
    "`spec.model.maxLoraRank`.",
    Reason.MODEL_UNSUPPORTED: "Serve it without a KVCacheTier: nothing of it can be kept.",
    Reason.CONFIG_REFUSED: "Set `kvtier.dev/restart`, so that connector and configuration are of one release.",
    Reason.ENGINE_CRASHED: "`kubectl logs --previous` says why.",
    Reason.CONTAINER_CRASHED: "Correct it in `spec.engine.podTemplate.containers`.",
    Reason.ROLLOUT_STALLED: "See what the newest pods wait for.",
    Reason.SEEDS_DIFFER: "Wait for the rollout; if it stays, find what sets PYTHONHASHSEED in these pods.",
    Reason.PREFLIGHT_FAILED: "Do what the message says; the volume is tried again every few minutes.",
    Reason.OVER_BUDGET: "Wait for the janitor, or raise `spec.disk.budget.maxBytes`.",
    Reason.UNAVAILABLE: "See the reason of `Ready`.",
    Reason.ENGINES_OUTDATED: "Set `kvtier.dev/restart` when it suits you: the message has the command.",
    Reason.VLLM_UNSUPPORTED: "Set `spec.engine.image` to a release that the message names.",
    Reason.JANITOR_FAILING: "`kubectl logs --previous` of the pod says why; often `spec.janitor.resources.memory`.",
    Reason.JANITOR_IMAGE_PULL_FAILED: "Correct `spec.janitor.image`, or add `imagePullSecrets`.",
    Reason.JANITOR_NOT_SCHEDULED: "Make room on a node, or lower `spec.janitor.resources`.",
    Reason.JANITOR_REFUSED: "Raise the quota, or change what admission refused.",
    Reason.JANITOR_HINDERED: "Read the janitor's log.",
    Reason.JANITOR_UNREACHABLE: "Let the operator's pods reach the janitor's port, which the message names.",
    Reason.STORE_STARTING: "`kubectl describe` of the Deployment that the message names says why.",
    Reason.STORE_IMAGE_PULL_FAILED: "Correct its image in `spec.connector`, or add `imagePullSecrets`.",
    Reason.STORE_FAILING: "`kubectl logs --previous` of the pod says why; often its memory.",
    Reason.STORE_NOT_SCHEDULED: "Make room on a node.",
    Reason.STORE_REFUSED: "Raise the quota, or change what admission refused.",
    Reason.ROUTER_STARTING: "Read the router's log; see that it reaches port 8000 of the engines.",
    Reason.NO_ROUTE: "See why no engine is ready: `EnginesReady`.",
    Reason.ROUTER_IMAGE_PULL_FAILED: "Correct `spec.routing.router.image`, or add `imagePullSecrets`.",
    Reason.ROUTER_FAILING: "Correct `spec.routing.router.args`, or the image; `kubectl logs --previous` says why.",
    Reason.ROUTER_NOT_SCHEDULED: "Make room on a node, or lower `spec.routing.router.resources`.",
    Reason.ROUTER_REFUSED: "Raise the quota, or change what admission refused.",
    Reason.POOL_KIND_MISSING: "Install the definitions of Gateway API's inference extension, or remove "
    "`spec.routing.inferencePool`.",
    Reason.POOL_FAILED: "Do what the message says.",
    Reason.STORES_PAUSED: "Raise the budget, or let the claim grow.",
    Reason.VOLUME_FULL: "Let the claim grow, or remove what else is on it.",
    Reason.STRANGER: "Compare `tier.json` on the volume with the engine; another model must use another directory.",
    Reason.DETACHED: "See that the volume is mounted, reachable and writable; engines take it up by themselves.",
    Reason.KEY_MISSING: "Put the active key into the Secret.",
    Reason.CANARY_MISSED: "Compare `vllm:kvtier_disk_misses_total` of both pods; see that they mount one volume.",
    Reason.CANARY_NOT_STORED: "`vllm:kvtier_disk_shed_stores_total` says why; or set `spec.disk.mode` to ReadWrite.",
    Reason.CANARY_BUSY: "Add `--enable-prompt-tokens-details` to `spec.engine.args`.",
    Reason.CANARY_UNANSWERED: "Let the operator reach port 8000 of the pods, or turn the canary off.",
    Reason.CANARY_LOCKED: "Let the operator [read the key](privacy.md#keys-of-the-api), or turn the canary off.",
    Reason.STORE_UNREACHABLE: "Correct the address or password of the Redis, then set `kvtier.dev/restart`.",
    Reason.SINGLE_REPLICA: "Two replicas can prove it.",
    Reason.LOADING_LOSES: "Use faster storage, a larger CPU tier, or `spec.disk.mode: Bypass`.",
}
"""Reason to its remedy, where there is one."""


def render() -> str:
    """Return the document."""
    questions = "".join(f"| {question} | {answer} |\n" for question, answer in _QUESTIONS)
    parts = [_HEAD.replace("{questions}\n", f"{questions}\n")]
    for kind, claim in CONDITIONS.items():
        parts.append(f"\n## {kind}\n\n{claim}\n\n| Reason | Meaning | What to do |\n|---|---|---|\n")
        parts += [f"| `{each.value}` | {each.doc} | {REMEDIES.get(each, '')} |\n" for each in REASONS[kind]]
    common = ", ".join(f"`{each.value}`: {each.doc}" for each in (Reason.NOT_CHECKED, Reason.NOT_APPLICABLE))
    parts.append(f"\nAny condition can also be Unknown with {common}\n")
    return "".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Write the document, or say whether it is up to date."""
    return generated_page.run(arguments, prog="conditions_reference", file=REFERENCE, render=render)


if __name__ == "__main__":
    sys.exit(main())
