# SPDX-License-Identifier: Apache-2.0
"""The conditions of a tier, the closed set of their reasons, and the remedy of each. Pure.

Alerts and scripts match on these words: one is added freely, and renamed only with a line in the changelog.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self


class Reason(enum.Enum):
    """Every reason a condition can carry, with the sentence that explains it."""

    doc: str
    """The sentence."""

    def __new__(cls, value: str, doc: str) -> Self:
        """Make a member whose value is the reason and which knows its sentence."""
        member = object.__new__(cls)
        member._value_ = value
        member.doc = doc
        return member

    READY = "Ready", "Every engine serves and shares the volume."
    NOT_CHECKED = "NotChecked", "Something that stands before this check already failed."
    STORE_READY = "StoreReady", "The server that the operator makes for the connector answers."
    STORE_STARTING = "StoreStarting", "The server of the connector is on its way."
    STORE_IMAGE_PULL_FAILED = "StoreImagePullFailed", "The image of the server of the connector cannot be pulled."
    STORE_FAILING = "StoreFailing", "The server of the connector does not stay up."
    STORE_NOT_SCHEDULED = "StoreNotScheduled", "No node takes the server of the connector."
    STORE_REFUSED = "StoreRefused", "The pod of the server cannot be created (quota or admission)."
    STORE_UNREACHABLE = "StoreUnreachable", "Engines found no Redis when they started, and serve without it."
    NOT_APPLICABLE = "NotApplicable", "The connector of the tier leaves nothing to judge here."
    BOUND = "Bound", "The claim is bound."
    FITS = "Fits", "Every engine found a node with room for it."
    ENGINES_READY = "EnginesReady", "As many engines of this spec are ready as were asked for."
    SEEDS_AGREE = "SeedsAgree", "Every engine hashes blocks with the seed and algorithm of the spec."
    NO_ENGINES = "NoEngines", "There is no engine to judge by."
    SERVING = "Serving", "At least one engine serves."
    UNAVAILABLE = "Unavailable", "No engine serves."
    SCALED_TO_ZERO = "ScaledToZero", "spec.replicas is 0, so no engine is to serve."
    CURRENT = "Current", "Engines are as this operator makes them, and of a vLLM that the connector is tested with."
    ENGINES_OUTDATED = "EnginesOutdated", "Engines run as an earlier release of the operator made them."
    ENGINES_REPLACED = "EnginesReplaced", "Engines of an earlier spec are being replaced."
    VLLM_UNSUPPORTED = "VllmUnsupported", "The connector does not support the vLLM of spec.engine.image."
    IDLE = "Idle", "Nothing goes on; where Stalled or Paused is True, that says why."
    NOT_STALLED = "NotStalled", "No problem is known that stays until a person acts."
    ACTIVE = "Active", "The operator acts on changes."
    PAUSED = "Paused", "spec.paused or the annotation kvtier.dev/paused is true: nothing is changed until it is not."
    PROGRESSING = "Progressing", "The cluster is on its way to this spec."
    SPEC_INVALID = "SpecInvalid", "A field cannot be honoured; the message names it."
    OBJECT_NOT_OURS = "ObjectNotOurs", "An object that the tier needs to make exists and is not the tier's."
    APPLY_FAILED = "ApplyFailed", "The API server did not accept what was applied; it is tried again."
    CLAIM_MISSING = "ClaimMissing", "The claim does not exist."
    CLAIM_TERMINATING = "ClaimTerminating", "The claim was deleted; it goes when no pod uses it."
    CLAIM_LOST = "ClaimLost", "The volume behind the claim is gone."
    CLAIM_PENDING = "ClaimPending", "No volume is bound to the claim yet."
    CLAIM_EXPANDING = "ClaimExpanding", "The claim is bound and on its way to the size that was asked for."
    CLAIM_NOT_SHARED = "ClaimNotShared", "Several replicas need a claim that is ReadWriteMany."
    CLAIM_IMMUTABLE = "ClaimImmutable", "The spec asks for a change of the claim that Kubernetes does not allow."
    CLAIM_CANNOT_SHRINK = "ClaimCannotShrink", "The spec asks for less storage than the claim has."
    CLAIM_ALONE = "ClaimAlone", "No other tier is on the claim."
    BUDGETS_FIT = "BudgetsFit", "Other tiers are on the claim, and the budgets of all fit it."
    BUDGETS_OVERLAP = ("BudgetsOverlap", "Other tiers are on the claim, and together they may take more than it holds.")
    DOES_NOT_FIT = "DoesNotFit", "No node has room for an engine of this size."
    BLOCKS_NOT_WHOLE = "BlocksNotWhole", "spec.disk.blockTokens is no multiple of the engine's own block."
    LAYOUT_NOT_CANONICAL = (
        "LayoutNotCanonical",
        "spec.disk.canonicalLayout is set, and vLLM does not certify it for this model and engine.",
    )
    HEADS_NOT_DIVISIBLE = (
        "HeadsNotDivisible",
        "spec.engine.tensorParallel does not divide the attention heads of the model.",
    )
    NO_NODE_MATCHES = "NoNodeMatches", "No node has the labels, devices and absence of taints that an engine needs."
    NODES_UNKNOWN = "NodesUnknown", "A share of a node was asked for, and the operator may not look at nodes."
    NOT_SCHEDULED = "NotScheduled", "An engine waits for a node."
    PODS_REFUSED = "PodsRefused", "Engine pods cannot be created (quota or admission)."
    IMAGE_PULL_FAILED = "ImagePullFailed", "An image of an engine pod cannot be pulled."
    CONFIG_MISSING = "ConfigMissing", "An engine pod refers to a Secret or ConfigMap that is not there."
    INSTALL_FAILED = "InstallFailed", "The init container could not install the connector."
    OUT_OF_MEMORY = "OutOfMemory", "An engine was killed because it used more memory than its limit."
    HUB_UNREACHABLE = "HubUnreachable", "The pods cannot reach the model hub."
    TOKEN_REFUSED = "TokenRefused", "The model hub refuses the token, or its account may not have the model."
    MODEL_NOT_FOUND = "ModelNotFound", "There is no model of this name and revision."
    SHM_TOO_SMALL = "SharedMemoryTooSmall", "An engine found too little room in /dev/shm."
    STALE_SHM = "StaleSharedMemory", "Files of a dead engine in /dev/shm keep the next one from starting."
    DEVICE_MISSING = "DeviceMissing", "An engine found no accelerator, or no node has one left."
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory", "The model and its KV cache do not fit the accelerator."
    ARGS_REFUSED = "ArgsRefused", "vLLM does not take the flags that it was given."
    ADAPTER_REFUSED = "AdapterRefused", "vLLM cannot use an adapter of `spec.model.loras`."
    MODEL_UNSUPPORTED = "ModelUnsupported", "vLLM cannot run the model with a KV connector."
    CONFIG_REFUSED = "ConfigRefused", "The connector in the pod does not take its configuration."
    MULTI_ATTACH = "MultiAttach", "The volume is attached to another node and can be attached to one only."
    VOLUME_NOT_MOUNTED = "VolumeNotMounted", "A node cannot mount a volume of an engine pod."
    RUNTIME_CLASS_MISSING = "RuntimeClassMissing", "A node does not have the container runtime that was asked for."
    ENGINE_CRASHED = "EngineCrashed", "An engine ended by itself."
    CONTAINER_CRASHED = "ContainerCrashed", "A container that the user added to the pods ended by itself."
    ROLLOUT_STALLED = "RolloutStalled", "New engines did not become ready within their startup budget."
    ENGINES_ADDED = (
        "EnginesAdded",
        "Engines are added to, or replaced in, a tier that was ready; it stays Ready meanwhile.",
    )
    ENGINES_STARTING = "EnginesStarting", "Engines are on their way: scheduling, pulling, pinning memory, loading."
    PREFLIGHT_PASSED = "PreflightPassed", "The volume was tried and can be used."
    PREFLIGHT_RUNNING = "PreflightRunning", "The volume is being tried."
    PREFLIGHT_FAILED = "PreflightFailed", "The volume was tried and cannot be used."
    PREFLIGHT_OFF = (
        "PreflightOff",
        "The volume is not tried: spec.proof.preflight is Never, or spec.disk.mode keeps engines from writing.",
    )
    WITHIN_BUDGET = "WithinBudget", "The blocks take no more of the volume than spec.disk.budget allows."
    HEALTHY = "Healthy", "Engines and janitor use the volume, and nothing hinders them."
    JANITOR_DISABLED = "JanitorDisabled", "spec.janitor.enabled is false: the volume is neither measured nor cleared."
    JANITOR_MISSING = "JanitorMissing", "blocksOf names no tier with a janitor on the claim, so engines store nothing."
    JANITOR_STARTING = "JanitorStarting", "The janitor has not reported yet, or does not answer."
    JANITOR_UNREACHABLE = "JanitorUnreachable", "The janitor runs, and the operator cannot reach it."
    JANITOR_WAITING = "JanitorWaiting", "The janitor that answers is not the one that holds the Lease."
    JANITOR_RUNS = "JanitorRuns", "The janitor runs and reports."
    JANITOR_FAILING = "JanitorFailing", "The janitor does not stay up, so nothing is removed from the volume."
    JANITOR_IMAGE_PULL_FAILED = "JanitorImagePullFailed", "The janitor's image cannot be pulled."
    JANITOR_NOT_SCHEDULED = "JanitorNotScheduled", "No node takes the janitor."
    JANITOR_REFUSED = "JanitorRefused", "The janitor's pod cannot be created (quota or admission)."
    JANITOR_HINDERED = "JanitorHindered", "The janitor cannot read, remove or write what it must."
    ROUTED_BY_SERVICE = "RoutedByService", "The Service spreads connections over the engines."
    ROUTED_BY_CLIENT = "RoutedByClient", "The Service keeps each client's address with one engine."
    ROUTER_READY = "RouterReady", "The router serves, and knows engines."
    ROUTER_STARTING = "RouterStarting", "No pod of the router is ready yet."
    ROUTER_IMAGE_PULL_FAILED = "RouterImagePullFailed", "The router's image cannot be pulled."
    ROUTER_FAILING = "RouterFailing", "The router does not stay up."
    ROUTER_REFUSED = "RouterRefused", "The router's pods cannot be created (quota or admission)."
    ROUTER_NOT_SCHEDULED = "RouterNotScheduled", "No node takes the router."
    NO_ROUTE = "NoRoute", "The router has no engine to send requests to."
    POOL_KIND_MISSING = "PoolKindMissing", "The cluster does not know InferencePools of v1."
    POOL_FAILED = "PoolFailed", "The InferencePool could not be made, or is not the tier's."
    COUNTING = "Counting", "The janitor has not seen every file of the volume yet."
    OVER_BUDGET = "OverBudget", "The blocks take more than spec.disk.budget.maxBytes."
    STORES_PAUSED = "StoresPaused", "The janitor permits no stores, since eviction alone does not make room."
    VOLUME_FULL = "VolumeFull", "Less of the volume is free than spec.disk.budget.minFree asks for."
    STRANGER = (
        "Stranger",
        "An engine was refused by the directory of its generation, which belongs to another identity.",
    )
    DETACHED = "Detached", "An engine serves without the volume, which did not answer it when it started."
    KEY_MISSING = "KeyMissing", "The active key of spec.disk.encryption is missing or is not one, so nothing is stored."
    CANARY_LOADED = "CanaryLoaded", "A replica loaded from the volume what another one had computed."
    CANARY_FOUND = "CanaryFound", "A replica found on the volume what another one had computed, and computed it anyway."
    CANARY_PENDING = "CanaryPending", "No canary prompt has been sent to these engines yet."
    CANARY_MISSED = "CanaryMissed", "A replica does not find on the volume what another one has stored."
    CANARY_NOT_STORED = "CanaryNotStored", "Engines store nothing on the volume."
    CANARY_BUSY = "CanaryBusy", "Other requests blur what a canary prompt did."
    CANARY_UNANSWERED = "CanaryUnanswered", "An engine does not answer the operator's canary prompt."
    CANARY_LOCKED = "CanaryLocked", "Engines ask for a key that the operator does not have."
    CANARY_OFF = "CanaryOff", "spec.proof.canary.enabled is false."
    SINGLE_REPLICA = "SingleReplica", "One replica cannot show that it shares with another."
    LOADING_PAYS = "LoadingPays", "At least half of the hits of the last hour were read from the volume."
    LOADING_LOSES = "LoadingLoses", "Most hits of the last hour were computed, because that was quicker."
    NO_DISK_HITS = "NoDiskHits", "Too little was found on the volume to judge by."
    EFFECT_PENDING = "EffectPending", "Engines have not been watched for an hour yet."
    SEEDS_DIFFER = "SeedsDiffer", "Engines with another hash seed or algorithm still run; they share no blocks."


CONDITIONS: Final[Mapping[str, str]] = {
    "Ready": "The summary: all engines serve and share the volume, and a janitor clears it. Its reason is that of the "
    "first problem below.",
    "Available": "At least one engine serves, be it of this spec or of an earlier one: what alerts should watch.",
    "VolumeBound": "The volume that holds the blocks is there.",
    "SizingFits": "Nodes have room for the memory and devices of every engine.",
    "EnginesReady": "As many engines as asked for serve, all of them with the current spec.",
    "HashSeedConsistent": "All engines name blocks alike, so that they find each other's.",
    "StorageChecked": "The volume was tried before engines started on it: they may write, renames are atomic, there is "
    "room. `status.storage` shows how fast it is.",
    "DiskWithinBudget": "The blocks take no more of the volume than `spec.disk.budget` allows. Unknown until the "
    "janitor has counted.",
    "DiskHealthy": "Engines and janitor can use the volume. Unknown while the janitor does not report.",
    "JanitorHealthy": "The janitor runs and can do its work. Unknown until it has reported.",
    "RoutingReady": "Requests come to the engines as `spec.routing` says: the router serves, the `InferencePool` that "
    "was asked for is there.",
    "StoreReady": "The server that the operator makes for another connector runs: a Redis, or Mooncake's master.",
    "SharedCacheVerified": "A canary prompt that one replica computed was found on the volume by another one.",
    "DiskEffective": "Over the last hour, most hits on the volume were read rather than computed again. `Ready` does "
    "not depend on it.",
    "UpToDate": "Pods are what this operator would make, and of a vLLM that the connector is tested with. `Ready` "
    "does not depend on it.",
    "ClaimShared": "Other tiers keep their blocks on the same claim; the reason says whether all budgets fit it. "
    "`Ready` does not depend on it.",
    "Paused": "`spec.paused` is true and the operator changes nothing.",
    "Reconciling": "The operator or the cluster is still working towards the spec (kstatus).",
    "Stalled": "Nothing more will happen until a person acts (kstatus).",
}
"""Condition type to what it means when it is true."""

_BY_VALUE: Final = {reason.value: reason for reason in Reason}

REASONS: Final[Mapping[str, tuple[Reason, ...]]] = {
    kind: tuple(_BY_VALUE[name] for name in names.split())
    for kind, names in {
        "Ready": "Ready SpecInvalid ObjectNotOurs ApplyFailed BlocksNotWhole LayoutNotCanonical HeadsNotDivisible",
        "Available": "Serving Unavailable ScaledToZero",
        "VolumeBound": "Bound ClaimExpanding ClaimPending ClaimMissing ClaimTerminating ClaimLost ClaimNotShared "
        "ClaimImmutable ClaimCannotShrink",
        "SizingFits": "Fits DoesNotFit NoNodeMatches NodesUnknown DeviceMissing NoEngines",
        "EnginesReady": "EnginesReady EnginesStarting EnginesAdded NotScheduled PodsRefused RuntimeClassMissing "
        "ImagePullFailed ConfigMissing KeyMissing MultiAttach VolumeNotMounted InstallFailed OutOfMemory "
        "SharedMemoryTooSmall StaleSharedMemory HubUnreachable TokenRefused ModelNotFound DeviceMissing "
        "DeviceOutOfMemory ArgsRefused AdapterRefused ModelUnsupported ConfigRefused "
        "EngineCrashed ContainerCrashed RolloutStalled",
        "HashSeedConsistent": "SeedsAgree SeedsDiffer NoEngines",
        "StorageChecked": "PreflightPassed PreflightRunning PreflightFailed PreflightOff",
        "DiskWithinBudget": "WithinBudget OverBudget StoresPaused VolumeFull Counting JanitorStarting JanitorWaiting "
        "JanitorDisabled",
        "DiskHealthy": "Healthy JanitorHindered Stranger Detached KeyMissing JanitorStarting JanitorWaiting "
        "JanitorDisabled",
        "RoutingReady": "RoutedByService RoutedByClient RouterReady RouterStarting NoRoute ScaledToZero "
        "RouterImagePullFailed RouterFailing RouterNotScheduled RouterRefused PoolKindMissing "
        "PoolFailed",
        "StoreReady": "StoreReady StoreStarting StoreImagePullFailed StoreFailing StoreNotScheduled StoreRefused",
        "SharedCacheVerified": "CanaryLoaded CanaryFound CanaryPending CanaryMissed CanaryNotStored CanaryBusy "
        "CanaryUnanswered CanaryLocked CanaryOff SingleReplica StoreUnreachable",
        "DiskEffective": "LoadingPays LoadingLoses NoDiskHits EffectPending",
        "UpToDate": "Current EnginesOutdated VllmUnsupported EnginesReplaced",
        "JanitorHealthy": "JanitorRuns JanitorFailing JanitorImagePullFailed JanitorNotScheduled JanitorRefused "
        "JanitorHindered JanitorUnreachable JanitorMissing JanitorStarting JanitorWaiting JanitorDisabled",
        "ClaimShared": "ClaimAlone BudgetsFit BudgetsOverlap",
        "Paused": "Active Paused",
        "Reconciling": "Idle Progressing",
        "Stalled": "NotStalled",
    }.items()
}
"""Condition to the reasons that belong to it first; `Stalled` repeats the reason of what holds it up."""


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
    Reason.CANARY_LOCKED: "Let the operator [read the key](operations.md#api-keys), or turn the canary off.",
    Reason.STORE_UNREACHABLE: "Correct the address or password of the Redis, then set `kvtier.dev/restart`.",
    Reason.SINGLE_REPLICA: "Two replicas can prove it.",
    Reason.LOADING_LOSES: "Use faster storage, a larger CPU tier, or `spec.disk.mode: Bypass`.",
}
"""Reason to its remedy in a sentence, where there is one; the message of the condition has the details."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A legal "no" to a spec that is valid by itself: what is wrong in this cluster, and what to do about it."""

    reason: Reason
    message: str
