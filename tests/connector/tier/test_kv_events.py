# SPDX-License-Identifier: Apache-2.0
"""The volume's KV events are vLLM's, so that who reads an engine's reads these."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events as vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvtier_connector.contract import janitor
from kvtier_connector.janitor import events
from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts import render
from kvtier_operator.plan import make_unchecked_plan

STORED = events.BlockStored(
    block_hashes=[b"\x01" * 32],
    parent_block_hash=b"\x02" * 32,
    token_ids=[],
    block_size=64,
    lora_id=None,
    medium=events.MEDIUM,
    lora_name=None,
    group_idx=1,
    locality=events.REMOTE,
    ownership="ns/llama/aa",
)


def test_vllms_own_decoder_reads_what_is_published() -> None:
    removed = events.BlockRemoved(block_hashes=[7], medium=events.MEDIUM, group_idx=1, ownership="ns/llama/aa")
    payload = events.encode([events.AllBlocksCleared(), STORED, removed], seconds=12.5)
    batch = msgspec.msgpack.decode(payload, type=vllm.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    cleared, stored, gone = batch.events
    assert isinstance(cleared, vllm.AllBlocksCleared)
    assert isinstance(stored, vllm.BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == (STORED.block_hashes, STORED.parent_block_hash)
    assert (stored.block_size, stored.medium, stored.group_idx) == (64, vllm.MEDIUM_STORAGE, 1)
    assert (stored.locality, stored.ownership, stored.lora_name) == ("REMOTE", "ns/llama/aa", None)
    assert isinstance(gone, vllm.BlockRemoved)
    assert (gone.block_hashes, gone.medium) == ([7], vllm.MEDIUM_STORAGE)


def test_a_field_that_vllm_does_not_know_is_not_published() -> None:
    for ours, theirs in (
        (events.BlockStored, vllm.BlockStored),
        (events.BlockRemoved, vllm.BlockRemoved),
        (events.AllBlocksCleared, vllm.AllBlocksCleared),
    ):
        assert set(ours.__struct_fields__) <= set(theirs.__struct_fields__)


def rendered(**kv_events_spec: Any) -> dict[str, dict[str, Any]]:
    """Return the containers of engine and janitor, by the kind of pod, and the janitor's document."""
    body = {
        "apiVersion": "kvtier.dev/v1beta1",
        "kind": "KVCacheTier",
        "metadata": {"name": "llama", "namespace": "serving"},
        "spec": {
            "model": {"name": "meta-llama/Llama-3.1-8B-Instruct"},
            "cpu": {"size": "8Gi"},
            "volume": {"claim": {"size": "20Gi"}},
            "kvEvents": kv_events_spec,
        },
    }
    plan = make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="c:1")
    found = {(each["kind"], each["metadata"]["name"]): each for each in render(plan)}
    containers = {
        name: found["Deployment", f"llama-{name}"]["spec"]["template"]["spec"]["containers"][0]
        for name in ("engine", "janitor")
    }
    return {**containers, "config": found["ConfigMap", "llama-janitor"]["data"]}


def test_vllm_takes_the_rendered_flag_for_what_it_is_meant() -> None:
    engine = rendered(blockHashes="Bytes")["engine"]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = [word for word in engine["args"] if word.startswith(("--model=", "--kv-events-config="))]
    found = parser.parse_args(flags).kv_events_config
    assert isinstance(found, KVEventsConfig)
    assert (found.enable_kv_cache_events, found.publisher) == (True, "zmq")
    assert (found.endpoint, found.replay_endpoint) == ("tcp://*:5557", "tcp://*:5757")
    assert found.topic == "kv@$(KVTIER_POD_IP):8000@meta-llama/Llama-3.1-8B-Instruct"
    env = {each["name"]: each for each in engine["env"]}
    assert env["KVTIER_POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"]["value"] == "0"


def test_the_janitor_publishes_as_the_engines_do_and_knows_how_long_a_block_is() -> None:
    found = rendered()
    config = janitor.decode(found["config"][janitor.JANITOR_CONFIG_FILE])
    assert (config.events_port, config.events_integer_hashes) == (5557, True)
    assert config.events_topic == "kv@llama-volume@meta-llama/Llama-3.1-8B-Instruct"
    assert config.block_tokens == 64
    ports = {port["name"]: port["containerPort"] for port in found["janitor"]["ports"]}
    assert ports == {"metrics": 9400, "kv-events": 5557}


def test_events_without_a_janitor_are_refused_by_name() -> None:
    body: dict[str, Any] = {"model": {"name": "m"}, "cpu": {"size": "8Gi"}, "volume": {"claim": {"size": "20Gi"}}}
    spec = {**body, "kvEvents": {}, "janitor": {"enabled": False}}
    with pytest.raises(SpecInvalid, match=r"spec.kvEvents: needs the janitor.*set spec.janitor.enabled to true"):
        parse({"apiVersion": "kvtier.dev/v1beta1", "kind": "KVCacheTier", "metadata": {"name": "x"}, "spec": spec})
