# SPDX-License-Identifier: Apache-2.0
"""Capacity of the tiers of one engine in bytes and tokens, with notes for people. Pure."""

from __future__ import annotations

import math
from typing import Final

from kvtier_operator import quantity
from kvtier_operator.api import TierSpec
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.api.status_schema import Capacity
from kvtier_operator.plan import chunks, engine_args, nodes
from kvtier_operator.plan.chunks import Checkpoints, Chunking, bytes_of
from kvtier_operator.plan.decisions import Decisions, checkpoints_of, kv_of
from kvtier_operator.plan.model_layout import KvUnknown, ModelLayout
from kvtier_operator.plan.reported import UNKNOWN, add_reported
from kvtier_operator.snapshot import Snapshot

MEMORY_SHARE: Final = 0.92
"""vLLM's own ``--gpu-memory-utilization``."""

_LARGE_FILE_BYTES: Final = 64 << 20

WORKING_BYTES: Final = 2 << 30
"""Memory of activations, graphs and libraries on each device, roughly."""


def make_capacity(spec: TierSpec, decisions: Decisions, snapshot: Snapshot | None, config: str = "none") -> Capacity:
    """Return what the tiers hold; engines of the configuration with this digest report what is unknown."""
    disk = _disk_bytes(spec, snapshot)
    kv = kv_of(spec)
    if isinstance(kv, KvUnknown):
        found = Capacity(disk_bytes=disk, notes=(f"{UNKNOWN}: {kv.why}", *_chunk_notes(spec, kv)))
        return add_reported(found, snapshot, cpu_bytes=decisions.cpu_bytes, config_digest=config)
    tokens = chunks.tokens_of(decisions.chunking, kv)
    device, device_formula = _device_kv(spec, decisions, snapshot)
    found = Capacity(
        kv_bytes_per_token=kv.token_bytes,
        kv_formula=formula(kv),
        kv_groups=kv.attention_groups,
        chunk_tokens=tokens,
        chunk_bytes=None if tokens is None else chunks.bytes_of(tokens, kv),
        cpu_tokens=_held(decisions.cpu_bytes, kv, tokens),
        disk_bytes=disk,
        disk_tokens=None if disk is None else _held(disk, kv, tokens, on_disk=True),
        device_kv_bytes=device,
        device_kv_tokens=None if device is None else device // (kv.token_bytes * kv.device_copies),
        device_formula=device_formula,
    )
    found = add_reported(found, snapshot, cpu_bytes=decisions.cpu_bytes, config_digest=config)
    kept = checkpoints_of(spec, decisions.chunking)
    return _with_notes(found, kv, decisions.chunking, _checkpoint_notes(kept, kv, tokens))


def _checkpoint_notes(kept: Checkpoints, kv: ModelLayout, chunk_tokens: int | None) -> tuple[str, ...]:
    """Say from where on a later prompt can go on, and what that costs."""
    if kept.window_interval is not None:
        full = math.ceil(kv.layers.full / kv.layers_per_group) * kv.group_bytes
        windows = int((kv.token_bytes - full) * kept.window_share)
        text = (
            f"of two prompts, the second goes on from the last multiple of {kept.window_interval:,} tokens that they "
            f"share. Layers with a window of {kv.layers.window:,} tokens are kept there: "
            f"{quantity.show_bytes(windows)} for each token on the volume, beside {quantity.show_bytes(full)} of the "
            "others. With --prefix-cache-retention-interval in spec.engine.args, it goes on at other places"
        )
        return (text,)
    if kept.step_tokens is not None:
        state_bytes = 0 if chunk_tokens is None else kv.state_groups * bytes_of(chunk_tokens, kv)
        each = f" of {quantity.show_bytes(state_bytes)}" if state_bytes else ""
        text = (
            "of two prompts, the second goes on from the last state before they part. Of several requests, the engine "
            f"computes at most {kept.step_tokens:,} tokens of a prompt in a step, and keeps a state{each} at its end. "
            "Other steps are set by --long-prefill-token-threshold in spec.engine.args, and those of a single request "
            f"by --max-num-batched-tokens={kept.step_tokens}"
        )
        return (text,)
    return ()


def formula(kv: ModelLayout) -> str:
    """Write how the bytes of a token come about."""
    groups = f" x {kv.attention_groups} groups" if kv.attention_groups > 1 else ""
    return f"{kv.layers_per_group} layers x {kv.formula}{groups}"


def _held(capacity: int, kv: ModelLayout, tokens: int | None, *, on_disk: bool = False) -> int:
    if tokens is None:
        return capacity // kv.token_bytes
    return chunks.held_tokens(capacity, kv, chunk_tokens=tokens, on_disk=on_disk)


def _disk_bytes(spec: TierSpec, snapshot: Snapshot | None) -> int | None:
    """Return what the blocks may take: the budget, or else the claim."""
    if spec.disk.budget.max_bytes is not None:
        return spec.disk.budget.max_bytes
    if spec.volume.claim is not None:
        return spec.volume.claim.size_bytes
    return None if snapshot is None or snapshot.claim is None else snapshot.claim.requested_bytes


def _device_kv(spec: TierSpec, decisions: Decisions, snapshot: Snapshot | None) -> tuple[int, str] | tuple[None, None]:
    """Estimate the KV cache on the devices of one engine: what weights and working memory leave of them."""
    if spec.engine.accelerator.resource == NO_ACCELERATOR:
        return None, None
    memory = nodes.device_memory(spec, None if snapshot is None else snapshot.nodes)
    if memory is None or decisions.weight_bytes is None:
        return None, None
    args = engine_args.read(spec.engine.args)
    devices = spec.engine.tensor_parallel * args.pipeline_parallel
    share = args.gpu_memory_utilization or MEMORY_SHARE
    left = max(0, int(devices * (memory * share - WORKING_BYTES)) - decisions.weight_bytes)
    said = (
        f"{devices} x ({quantity.show_bytes(memory)} x {share:g} - {quantity.show_bytes(WORKING_BYTES)}) - "
        f"{quantity.show_bytes(decisions.weight_bytes)} of weights"
    )
    return left, said


def _chunk_notes(spec: TierSpec, kv: KvUnknown | ModelLayout) -> tuple[str, ...]:
    if spec.disk.block_tokens is not None or isinstance(kv, ModelLayout):
        return ()
    return ("files hold one block of vLLM each, which is small for many models; spec.disk.blockTokens sets more",)


def _with_notes(found: Capacity, kv: ModelLayout, chunking: Chunking, first: tuple[str, ...]) -> Capacity:
    notes = list(first)
    if found.chunk_tokens is None:
        notes.append("how many tokens a file holds is known only to the engine: its blocks hold a state of the model")
    elif chunking.tokens is not None and found.chunk_bytes is not None and found.chunk_bytes > _LARGE_FILE_BYTES:
        notes.append(
            f"one file takes {quantity.show_bytes(found.chunk_bytes)}: prompts that share less than "
            f"{found.chunk_tokens} tokens share nothing; lower spec.disk.blockTokens"
        )
    if kv.has_states:
        notes.append("this model also keeps states, of a fixed size for each prompt: tiers hold somewhat fewer tokens")
    if found.device_kv_bytes == 0:
        notes.append("the weights leave no room for KV on the accelerators: use more of them or larger ones")
    cpu, device = found.cpu_tokens, found.device_kv_tokens
    if cpu is not None and device is not None and cpu < device:
        notes.append(
            f"the CPU tier holds {cpu:,} tokens and the accelerators' own KV cache about {device:,}: what the one "
            f"evicts, the other seldom has; give the CPU tier more than {quantity.show_bytes(device * kv.token_bytes)}"
        )
    return found.model_copy(update={"notes": tuple(notes)})
