# SPDX-License-Identifier: Apache-2.0
"""Decide what a tier becomes: spec and snapshot in, one complete plan or one refusal out.

Pure and total. A refusal is a value, with the remedy in its message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvtier_connector.contract import engine
from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.disk_spec import SHARED
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.api.status_schema import PodSizing
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.names import TierRef
from kvtier_operator.plan import chunks, digest, nodes
from kvtier_operator.plan import decisions as decided
from kvtier_operator.plan.decisions import Decisions, RenderedPods
from kvtier_operator.plan.janitor_config import JANITOR_IMAGE, JanitorPlan, make_janitor
from kvtier_operator.plan.model_layout import KvUnknown, attention_heads, has_uneven_heads
from kvtier_operator.plan.sizing import make_sizing
from kvtier_operator.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class CacheGeneration:
    """One set of mutually readable blocks: its identity, its digest, and where it lies in the pod."""

    digest: str
    identity: Mapping[str, Any]
    root: str


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """Everything the manifests need; nothing in it is read from a cluster again."""

    tier: TierRef
    spec: TierSpec
    connector_image: str
    janitor_image: str
    """Image of the janitor, where the tier names none."""
    decisions: Decisions
    sizing: PodSizing
    generation: CacheGeneration
    config_text: str
    config_digest: str
    live_text: str
    """Settings that engines follow without a restart: no digest of a pod template contains them."""
    claim_name: str
    is_on_one_node: bool = False
    """Whether only pods of one node can mount the volume."""
    is_janitor_in_the_way: bool = False
    """Whether the janitor's pod must end: a deleted claim is released, or an engine on another node waits for a volume
    of one node."""
    restart: str = ""
    """Value of the restart annotation that the pods are made for."""
    rendered: RenderedPods | None = None
    """Source of the engines that run, where the spec still asks for the same: it is applied again."""
    desired: TierPlan | None = None
    """The plan for new pods, where the pods are kept as they are."""
    listen_host: str = names.EVERY_IPV4_ADDRESS
    """Address that the servers in the pods listen on."""
    is_recorded: bool = False
    """Whether the Deployment is to note what its pods were made from."""

    @cached_property
    def janitor(self) -> JanitorPlan | None:
        """The plan of the janitor, for the generation that the engines use; None where the tier has none."""
        kv, chunking = decided.kv_of(self.spec), self.decisions.chunking
        return make_janitor(
            self.spec,
            self.tier,
            root=self.generation.root,
            image=self.janitor_image,
            chunk_tokens=chunking.tokens if isinstance(kv, KvUnknown) else chunks.tokens_of(chunking, kv),
        )


def make_plan(  # noqa: PLR0913  each by its name
    spec: TierSpec,
    snapshot: Snapshot,
    decisions: Decisions,
    *,
    connector_image: str,
    janitor_image: str = JANITOR_IMAGE,
    restart: str = "",
) -> TierPlan:
    """Decide everything else that the manifests need, as if no engine ran yet; see `parts.edit_impact.keep_pods`."""
    plan = _plan(spec, snapshot.tier, decisions, connector_image=connector_image, janitor_image=janitor_image)
    is_on_one_node = plan.is_on_one_node or (
        spec.connector.uses_volume and snapshot.claim is not None and SHARED not in snapshot.claim.access_modes
    )
    return replace(
        plan,
        restart=restart,
        is_recorded=True,
        is_on_one_node=is_on_one_node,
        is_janitor_in_the_way=releases_claim(spec, snapshot) or (is_on_one_node and _is_mount_stuck(snapshot)),
    )


def _is_mount_stuck(snapshot: Snapshot) -> bool:
    """Tell whether an engine waits for its volumes and none serves, beside which the janitor would be in no way."""
    alive = [pod for pod in snapshot.pods if not pod.is_terminating]
    return any(pod.mount_problem for pod in alive) and not any(pod.is_ready for pod in alive)


def releases_claim(spec: TierSpec, snapshot: Snapshot) -> bool:
    """Tell whether the claim was deleted and the user has stopped the engines: then no pod of ours may hold it."""
    is_empty = not snapshot.pods and "Pod" not in snapshot.unreadable
    are_stopped = is_empty if spec.engine.external else spec.replicas == 0
    return snapshot.claim is not None and snapshot.claim.is_terminating and are_stopped


def make_kept_plan(plan: TierPlan, rendered: RenderedPods) -> TierPlan:
    """Return the plan with what the engines that run were made from in the place of what would be made today."""
    try:
        document = json.loads(rendered.config)
        generation = CacheGeneration(digest=document["digest"], identity=document["identity"], root=document["root"])
    except (ValueError, TypeError, KeyError):
        return plan
    return replace(
        plan,
        rendered=rendered,
        desired=plan,
        generation=generation,
        config_text=rendered.config,
        config_digest=digest.digest_text(rendered.config),
    )


def make_unchecked_plan(
    spec: TierSpec,
    tier: TierRef,
    *,
    connector_image: str,
    janitor_image: str = JANITOR_IMAGE,
    snapshot: Snapshot | None = None,
) -> TierPlan:
    """Decide the same without a cluster: for rendering offline.

    Raises:
        SpecInvalid: it takes a look at the nodes, and the snapshot, if there is one, has none.
    """
    decisions = decide(spec, tier, snapshot)
    if isinstance(decisions, Refusal):
        if snapshot is None and decisions.reason is Reason.NODES_UNKNOWN:
            raise SpecInvalid(
                "spec.cpu.fraction",
                "is a share of nodes that are not known: give them with --nodes FILE, as `kubectl get nodes,pods -A "
                "-o yaml` prints them, or set spec.cpu.size",
            )
        field, _, message = decisions.message.partition(": ")
        raise SpecInvalid(field, message)
    return _plan(spec, tier, decisions, connector_image=connector_image, janitor_image=janitor_image)


def decide(
    spec: TierSpec, tier: TierRef, snapshot: Snapshot | None, *, may_assume: bool = False, is_running: bool = False
) -> Decisions | Refusal:
    """Decide what stands until the spec changes, or keep what was decided; the snapshot is None offline.

    It may assume an amount until there is a node to take a share of: a pod that waits makes an autoscaler act. Where
    engines run that were made from this spec, a release that would refuse it for new ones decides all the same.
    """
    kept = decided.read("" if snapshot is None else snapshot.engines.decisions)
    chunking, weight_bytes, model_for = decided.decide_model(spec, kept)
    unusable = (
        None if is_running else _refuse_block_tokens(spec) or _refuse_ranks(spec) or decided.refuse_canonical(spec)
    )
    if unusable is not None:
        return unusable
    cpu = nodes.decide_cpu(spec, tier, kept, None if snapshot is None else snapshot.nodes)
    assumed = cpu if isinstance(cpu, Refusal) else None
    if assumed is not None and not (may_assume and assumed.reason in nodes.ENDS_WITH_A_NODE):
        return assumed
    cpu_bytes, node_bytes = (nodes.assume(kept), None) if isinstance(cpu, Refusal) else cpu
    return Decisions(
        cpu_bytes=cpu_bytes,
        node_bytes=node_bytes,
        # Assumed for nothing in particular, it is decided as soon as it can be.
        cpu_for="" if assumed is not None else nodes.share_inputs(spec),
        assumed=assumed,
        chunking=chunking,
        weight_bytes=weight_bytes,
        model_for=model_for,
    )


def _plan(spec: TierSpec, tier: TierRef, decisions: Decisions, *, connector_image: str, janitor_image: str) -> TierPlan:
    generation, encryption = make_generation(spec, tier, decisions), spec.disk.encryption
    config_text = engine.encode(
        engine.ConnectorConfig(
            tier=str(tier),
            root=generation.root,
            digest=generation.digest,
            identity=generation.identity,
            keys_dir="" if encryption is None else names.KEYS_MOUNT,
            compression=spec.disk.compression,
            across_releases=spec.generations.across_releases,
            tenant_from=spec.disk.tenants.source,
            min_tokens=spec.disk.admission.min_tokens,
            min_reuse=spec.disk.admission.min_reuse,
            live_file=f"{names.CONFIG_MOUNT}/{engine.LIVE_FILE}",
            state_dir=names.ENGINE_STATE,
        )
    )
    return TierPlan(
        tier=tier,
        spec=spec,
        connector_image=connector_image,
        janitor_image=janitor_image,
        decisions=decisions,
        sizing=make_sizing(spec, decisions),
        generation=generation,
        config_text=config_text,
        config_digest=digest.digest_text(config_text),
        live_text=live_text(spec),
        claim_name=spec.volume.existing_claim or names.claim(tier),
        is_on_one_node=spec.connector.uses_volume
        and spec.volume.claim is not None
        and SHARED not in spec.volume.claim.access_modes,
    )


def live_text(spec: TierSpec) -> str:
    """Return what engines follow while they run."""
    encryption = spec.disk.encryption
    return engine.encode_live(
        spec.disk.mode,
        active_key="" if encryption is None else encryption.active_key,
        # Another tier's janitor permits stores of engines that share its blocks.
        # Whatever the connector is: engines of an earlier one may still run, and no janitor be left to bound them.
        needs_permit=spec.connector.blocks_of is not None or spec.janitor.enabled,
    )


def make_generation(spec: TierSpec, tier: TierRef, decisions: Decisions) -> CacheGeneration:
    """Return the generation that engines of this spec read and write."""
    identity = digest.identity(spec, decisions.chunking.settings())
    key = digest.digest(identity)
    owner = spec.connector.blocks_of or tier.name
    parts = (names.VOLUME_MOUNT, spec.volume.path.strip("/"), f"{tier.namespace}.{owner}", key)
    return CacheGeneration(digest=key, identity=identity, root="/".join(part for part in parts if part))


def _refuse_block_tokens(spec: TierSpec) -> Refusal | None:
    """Refuse what vLLM would refuse at startup: a file must hold whole blocks of the engine."""
    asked, kv = spec.disk.block_tokens, decided.kv_of(spec)
    if asked is not None and has_uneven_heads(decided.config_of(spec) or {}, spec.engine.tensor_parallel):
        return Refusal(
            Reason.BLOCKS_NOT_WHOLE,
            "spec.disk.blockTokens: some layers of this model have larger heads than others, or more of them, and so "
            "smaller blocks, which vLLM takes no one number for: leave it out",
        )
    if asked is None or isinstance(kv, KvUnknown) or kv.block_tokens is None or asked % kv.block_tokens == 0:
        return None
    rounded = -(-asked // kv.block_tokens) * kv.block_tokens
    return Refusal(
        Reason.BLOCKS_NOT_WHOLE,
        f"spec.disk.blockTokens: {asked} is no multiple of the {kv.block_tokens} tokens that one block of this "
        f"engine has: set {rounded}, or leave it out",
    )


def _refuse_ranks(spec: TierSpec) -> Refusal | None:
    """Refuse what vLLM would refuse at startup: each rank gets equally many attention heads."""
    heads, ranks = attention_heads(decided.config_of(spec) or {}), spec.engine.tensor_parallel
    if heads is None or heads % ranks == 0:
        return None
    fitting = ", ".join(str(count) for count in range(1, ranks + 1) if heads % count == 0)
    return Refusal(
        Reason.HEADS_NOT_DIVISIBLE,
        f"spec.engine.tensorParallel: {ranks} does not divide the {heads} attention heads of the model: set "
        f"one of {fitting}",
    )
