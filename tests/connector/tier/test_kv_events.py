# SPDX-License-Identifier: Apache-2.0
"""The volume's KV events are vLLM's, so that who reads an engine's reads these."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from vllm.distributed import kv_events as vllm
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvtier_connector.janitor import events, vllm_files
from kvtier_connector.store.fs import LOCAL

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


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B-Instruct", "/models/tiny"])
@pytest.mark.parametrize("digest_bytes", [8, 16, 32])
def test_the_janitor_sees_what_vllm_writes(tmp_path: Path, model: str, digest_bytes: int) -> None:
    root = tmp_path / "0123456789abcdef"
    mapper = FileMapper(
        root_dir=str(root),
        model_name=model,
        tokens_per_hash=16,
        blocks_per_file=4,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        rank=1,
        dtype="bfloat16",
    )
    path = Path(mapper.get_file_name(make_offload_key(os.urandom(digest_bytes), 3)))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"block")
    config = Path(mapper.get_config_file_path())
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    assert vllm_files.is_generation(LOCAL, str(root))
    found = [file for files in vllm_files.walk(LOCAL, str(tmp_path), root.name) for file in files]
    relative = str(path.relative_to(tmp_path))
    assert [(file.path, file.size, file.is_partial) for file in found] == [(relative, 5, False)]
