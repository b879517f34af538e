# SPDX-License-Identifier: Apache-2.0
"""Tenants: each reads and writes its own directory only, up to its quota, and what has no known tenant stays off."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from rig import ROW_BYTES, Rig, Rigs, keys, offloading_config
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request

from kvtier_connector.tier import hooks
from kvtier_connector.tier.hooks import Salt, scheduler
from kvtier_connector.tier.spec import KVTierSpec
from kvtier_connector.tier.tenants import find_tenant, tenant_of_salt

BLOCK_BYTES = ROW_BYTES + 4096


def directories(root: Path) -> dict[str, int]:
    """Return how many blocks each tenant has, and the common tree."""
    found: dict[str, int] = {}
    for path in root.rglob("*.kvb"):
        parts = path.relative_to(root).parts
        name = parts[1] if parts[0] == "tenants" else ""
        found[name] = found.get(name, 0) + 1
    return found


def with_tenant(rig: Rig, tenant: Any) -> Rig:
    rig.params = {"kvtier_tenant": tenant}
    return rig


def test_each_tenant_has_a_directory_of_its_own_and_reads_no_other(rigs: Rigs) -> None:
    writer = rigs.make(tenant_from="Parameter")
    with_tenant(writer, "acme").offload(keys(4))
    assert directories(rigs.root) == {"acme": 4}
    for tenant, expected in (("acme", 4), ("other", 0), (None, 0)):
        reader = with_tenant(rigs.make(tenant_from="Parameter"), tenant)
        assert reader.serve(keys(4)).hit_blocks == expected


def test_one_prompt_of_two_tenants_is_stored_twice(rigs: Rigs) -> None:
    for tenant in ("acme", "other"):
        with_tenant(rigs.make(tenant_from="Parameter"), tenant).offload(keys(3))
    assert directories(rigs.root) == {"acme": 3, "other": 3}


def test_a_request_without_the_parameter_uses_the_common_blocks(rigs: Rigs) -> None:
    rigs.make(tenant_from="Parameter").offload(keys(2))
    assert directories(rigs.root) == {"": 2}


def test_a_request_whose_tenant_cannot_be_told_is_computed_and_kept_off_the_volume(rigs: Rigs) -> None:
    rigs.make(tenant_from="Parameter").offload(keys(2))
    rig = rigs.make(tenant_from="Parameter")
    impossible: list[Any] = ["../escape", "UPPER", "", 7, ["acme"], "x" * 33]
    for number, tenant in enumerate(impossible):
        with_tenant(rig, tenant)
        assert rig.serve(keys(2), f"reader {number}").hit_blocks == 0
        rig.offload(keys(2, first=10 * number + 10), f"writer {number}")
    assert directories(rigs.root) == {"": 2}
    assert rig.metric("vllm:kvtier_disk_misses", "tenant") >= len(impossible)
    assert rig.metric("vllm:kvtier_disk_shed_stores", "tenant") == 2 * len(impossible)


def test_the_parameter_means_nothing_where_tenants_are_off(rigs: Rigs) -> None:
    with_tenant(rigs.make(), "acme").offload(keys(2))
    assert directories(rigs.root) == {"": 2}


@pytest.mark.parametrize("processes", [0, 2], ids=["threads", "movers"])
def test_stores_above_a_quota_are_refused_and_other_tenants_go_on(rigs: Rigs, processes: int) -> None:
    rig = rigs.make(
        io_processes=processes,
        tenant_from="Parameter",
        tenant_quotas={"acme": 2 * BLOCK_BYTES},
        default_quota_bytes=3 * BLOCK_BYTES,
    )
    with_tenant(rig, "acme").offload(keys(5), "one")
    with_tenant(rig, "other").offload(keys(5, first=10), "two")
    rig.params = None
    rig.offload(keys(5, first=20), "three")
    assert directories(rigs.root) == {"acme": 2, "other": 3, "": 5}
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_quota") == 5


def test_a_quota_counts_what_other_engines_wrote_before(rigs: Rigs) -> None:
    settings: dict[str, Any] = {
        "tenant_from": "Parameter",
        "tenant_quotas": {"acme": 3 * BLOCK_BYTES},
        "max_bytes": 1 << 30,
    }
    with_tenant(rigs.make(**settings), "acme").offload(keys(2))
    with_tenant(rigs.make(**settings), "acme").offload(keys(4, first=10))
    assert directories(rigs.root) == {"acme": 3}


def test_a_salt_is_a_directory_that_does_not_show_it(rigs: Rigs) -> None:
    rig = rigs.make(tenant_from="CacheSalt")
    rig.salt = "my secret salt"
    rig.offload(keys(2))
    tenant = hashlib.sha256(b"my secret salt").hexdigest()[:16]
    assert directories(rigs.root) == {tenant: 2}
    written = b"".join(path.read_bytes() for path in rigs.root.rglob("*") if path.is_file())
    assert b"my secret salt" not in written
    assert "my secret salt" not in repr(Salt("my secret salt"))
    rig.salt = ""
    rig.offload(keys(2, first=10), "unsalted")
    assert directories(rigs.root) == {tenant: 2, "": 2}


def test_where_the_salt_cannot_be_seen_nothing_is_cached(rigs: Rigs) -> None:
    rig = rigs.make(tenant_from="CacheSalt")
    rig.offload(keys(2))
    assert directories(rigs.root) == {}
    assert rig.metric("vllm:kvtier_disk_shed_stores", "tenant") == 2


def make_request(salt: str | None) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=1), None, cache_salt=salt)


@pytest.mark.parametrize(("salt", "tenant"), [("pepper", tenant_of_salt("pepper")), (None, ""), ("", "")])
def test_the_scheduler_passes_the_salt_of_a_request_on(salt: str | None, tenant: str) -> None:
    hooks.install()
    hooks.install()
    context = scheduler._create_req_context(make_request(salt))
    assert isinstance(context, ReqContext)
    assert find_tenant(context, "CacheSalt") == tenant
    assert find_tenant(context, "None") == ""


def test_the_spec_learns_the_engines_config_before_it_makes_the_tier() -> None:
    class StoppedError(Exception):
        pass

    class Config:
        def __getattr__(self, name: str) -> object:
            raise StoppedError(name)

    spec = KVTierSpec(offloading_config())
    config = Config()
    with pytest.raises(StoppedError):
        scheduler.OffloadingConnectorScheduler(spec, config, config)
    assert spec.engine_config is config
