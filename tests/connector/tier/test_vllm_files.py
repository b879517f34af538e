# SPDX-License-Identifier: Apache-2.0
"""Files that the janitor takes for those of vLLM's fs tier are named by vLLM's own code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvtier_connector.janitor import vllm_files
from kvtier_connector.store.fs import LOCAL


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
