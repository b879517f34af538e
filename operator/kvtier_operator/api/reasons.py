# SPDX-License-Identifier: Apache-2.0
"""The conditions of a tier, and the closed set of their reasons. Pure.

Alerts and scripts match on these words: one is added freely, and renamed only with a line in the changelog. The page
``docs/conditions.md`` says what each of them means and what to do; a test holds the two together.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Reason(enum.Enum):
    """Every reason a condition can carry."""

    READY = "Ready"
    NOT_CHECKED = "NotChecked"
    STORE_READY = "StoreReady"
    STORE_STARTING = "StoreStarting"
    STORE_IMAGE_PULL_FAILED = "StoreImagePullFailed"
    STORE_FAILING = "StoreFailing"
    STORE_NOT_SCHEDULED = "StoreNotScheduled"
    STORE_REFUSED = "StoreRefused"
    STORE_UNREACHABLE = "StoreUnreachable"
    NOT_APPLICABLE = "NotApplicable"
    BOUND = "Bound"
    FITS = "Fits"
    ENGINES_READY = "EnginesReady"
    SEEDS_AGREE = "SeedsAgree"
    NO_ENGINES = "NoEngines"
    NO_PODS = "NoPods"
    PODS_CLAIMED_TWICE = "PodsClaimedTwice"
    NOT_ATTACHED = "NotAttached"
    ATTACHED_OUTDATED = "AttachedOutdated"
    SERVING = "Serving"
    UNAVAILABLE = "Unavailable"
    SCALED_TO_ZERO = "ScaledToZero"
    CURRENT = "Current"
    ENGINES_OUTDATED = "EnginesOutdated"
    ENGINES_REPLACED = "EnginesReplaced"
    VLLM_UNSUPPORTED = "VllmUnsupported"
    IDLE = "Idle"
    NOT_STALLED = "NotStalled"
    ACTIVE = "Active"
    PAUSED = "Paused"
    PROGRESSING = "Progressing"
    SPEC_INVALID = "SpecInvalid"
    OBJECT_NOT_OURS = "ObjectNotOurs"
    APPLY_FAILED = "ApplyFailed"
    CLAIM_MISSING = "ClaimMissing"
    CLAIM_TERMINATING = "ClaimTerminating"
    CLAIM_LOST = "ClaimLost"
    CLAIM_PENDING = "ClaimPending"
    CLAIM_EXPANDING = "ClaimExpanding"
    CLAIM_NOT_SHARED = "ClaimNotShared"
    CLAIM_IMMUTABLE = "ClaimImmutable"
    CLAIM_CANNOT_SHRINK = "ClaimCannotShrink"
    CLAIM_ALONE = "ClaimAlone"
    BUDGETS_FIT = "BudgetsFit"
    BUDGETS_OVERLAP = "BudgetsOverlap"
    DOES_NOT_FIT = "DoesNotFit"
    BLOCKS_NOT_WHOLE = "BlocksNotWhole"
    LAYOUT_NOT_CANONICAL = "LayoutNotCanonical"
    HEADS_NOT_DIVISIBLE = "HeadsNotDivisible"
    NO_NODE_MATCHES = "NoNodeMatches"
    NODES_UNKNOWN = "NodesUnknown"
    NOT_SCHEDULED = "NotScheduled"
    PODS_REFUSED = "PodsRefused"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONFIG_MISSING = "ConfigMissing"
    INSTALL_FAILED = "InstallFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    HUB_UNREACHABLE = "HubUnreachable"
    TOKEN_REFUSED = "TokenRefused"  # noqa: S105  a word, not a token
    MODEL_NOT_FOUND = "ModelNotFound"
    SHM_TOO_SMALL = "SharedMemoryTooSmall"
    STALE_SHM = "StaleSharedMemory"
    DEVICE_MISSING = "DeviceMissing"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    ARGS_REFUSED = "ArgsRefused"
    ADAPTER_REFUSED = "AdapterRefused"
    MODEL_UNSUPPORTED = "ModelUnsupported"
    CONFIG_REFUSED = "ConfigRefused"
    MULTI_ATTACH = "MultiAttach"
    VOLUME_NOT_MOUNTED = "VolumeNotMounted"
    RUNTIME_CLASS_MISSING = "RuntimeClassMissing"
    ENGINE_CRASHED = "EngineCrashed"
    CONTAINER_CRASHED = "ContainerCrashed"
    ROLLOUT_STALLED = "RolloutStalled"
    ENGINES_ADDED = "EnginesAdded"
    ENGINES_STARTING = "EnginesStarting"
    PREFLIGHT_PASSED = "PreflightPassed"
    PREFLIGHT_RUNNING = "PreflightRunning"
    PREFLIGHT_FAILED = "PreflightFailed"
    PREFLIGHT_OFF = "PreflightOff"
    WITHIN_BUDGET = "WithinBudget"
    HEALTHY = "Healthy"
    JANITOR_DISABLED = "JanitorDisabled"
    JANITOR_MISSING = "JanitorMissing"
    JANITOR_STARTING = "JanitorStarting"
    JANITOR_UNREACHABLE = "JanitorUnreachable"
    JANITOR_WAITING = "JanitorWaiting"
    JANITOR_RUNS = "JanitorRuns"
    JANITOR_FAILING = "JanitorFailing"
    JANITOR_IMAGE_PULL_FAILED = "JanitorImagePullFailed"
    JANITOR_NOT_SCHEDULED = "JanitorNotScheduled"
    JANITOR_REFUSED = "JanitorRefused"
    JANITOR_HINDERED = "JanitorHindered"
    ROUTED_BY_SERVICE = "RoutedByService"
    ROUTED_BY_CLIENT = "RoutedByClient"
    ROUTER_READY = "RouterReady"
    ROUTER_STARTING = "RouterStarting"
    ROUTER_IMAGE_PULL_FAILED = "RouterImagePullFailed"
    ROUTER_FAILING = "RouterFailing"
    ROUTER_REFUSED = "RouterRefused"
    ROUTER_NOT_SCHEDULED = "RouterNotScheduled"
    NO_ROUTE = "NoRoute"
    POOL_KIND_MISSING = "PoolKindMissing"
    POOL_FAILED = "PoolFailed"
    COUNTING = "Counting"
    OVER_BUDGET = "OverBudget"
    STORES_PAUSED = "StoresPaused"
    VOLUME_FULL = "VolumeFull"
    STRANGER = "Stranger"
    DETACHED = "Detached"
    KEY_MISSING = "KeyMissing"
    RELEASE_COMPARED = "ReleaseCompared"
    RELEASE_REFUSED = "ReleaseRefused"
    CANARY_LOADED = "CanaryLoaded"
    CANARY_FOUND = "CanaryFound"
    CANARY_PENDING = "CanaryPending"
    CANARY_MISSED = "CanaryMissed"
    CANARY_NOT_STORED = "CanaryNotStored"
    CANARY_BUSY = "CanaryBusy"
    CANARY_UNANSWERED = "CanaryUnanswered"
    CANARY_LOCKED = "CanaryLocked"
    CANARY_OFF = "CanaryOff"
    SINGLE_REPLICA = "SingleReplica"
    LOADING_PAYS = "LoadingPays"
    LOADING_LOSES = "LoadingLoses"
    NO_DISK_HITS = "NoDiskHits"
    EFFECT_PENDING = "EffectPending"
    SEEDS_DIFFER = "SeedsDiffer"


CONDITIONS: Final = (
    "Ready",
    "Available",
    "VolumeBound",
    "SizingFits",
    "EnginesReady",
    "HashSeedConsistent",
    "StorageChecked",
    "DiskWithinBudget",
    "DiskHealthy",
    "JanitorHealthy",
    "RoutingReady",
    "StoreReady",
    "SharedCacheVerified",
    "DiskEffective",
    "UpToDate",
    "ClaimShared",
    "Paused",
    "Reconciling",
    "Stalled",
)
"""Types of conditions, in the order of the status."""


@dataclass(frozen=True)
class Refusal:
    """A legal "no" to a spec that is valid by itself: what is wrong in this cluster, and what to do about it."""

    reason: Reason
    message: str
