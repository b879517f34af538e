# SPDX-License-Identifier: Apache-2.0
"""Each connector as it is rendered: read by vLLM's own parser and classes, and by those of the programs behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from healthy_tier import READY_POD
from tiers import rendered

from kvtier_operator import names, quantity
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import CONDITIONS, Reason
from kvtier_operator.conditions import Problem
from kvtier_operator.gather import read_neighbours
from kvtier_operator.parts.edit_impact import explain_edit
from kvtier_operator.snapshot import ContainerStatus, Engines, Snapshot
from kvtier_operator.status import not_applicable

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
READER = Path(__file__).with_name("vllm_reads.py")
RELEASES = ("0.32.0", "0.33.0")

VOLUME = {"VolumeBound", "ClaimShared", "StorageChecked"}
JANITOR = {"DiskHealthy", "DiskWithinBudget", "JanitorHealthy"}
OURS = {"SharedCacheVerified", "DiskEffective"}

CASES: dict[str, dict[str, Any]] = TABLES["read_by_vllm"]
CHILDREN = TABLES["children_of_hybrids"]


def stored(case: str, **more: Any) -> dict[tuple[str, str], Any]:
    """Return the objects of a golden case whose spec is changed."""
    body = yaml.safe_load((GOLDEN / case / "tier.yaml").read_text())
    body["spec"] |= more
    return rendered(body)


def engine(made: dict[tuple[str, str], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's container and its volumes by name."""
    (deployment,) = (each for (kind, name), each in made.items() if kind == "Deployment" and name.endswith("-engine"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = (each for each in pod["containers"] if each["name"] == names.ENGINE_CONTAINER)
    return container, {each["name"]: each for each in pod["volumes"]}


def transfer_config(case: str) -> dict[str, Any]:
    (word,) = (word for word in engine(stored(case))[0]["args"] if word.startswith("--kv-transfer-config="))
    return dict(json.loads(word.partition("=")[2]))


def environment(case: str) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in engine(stored(case))[0]["env"]}


@pytest.fixture(scope="module", params=RELEASES)
def vllm(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what a release of vLLM makes of each rendered command line, and what our modules have started there."""
    release = subprocess.run(
        [sys.executable, ROOT / ".ci/vllm_release.py", request.param], check=True, capture_output=True, text=True
    ).stdout.strip()
    ours = f"{ROOT / 'connector'}:{ROOT / 'operator'}"
    asked = {case: engine(stored(case))[0]["args"] for case in (*CASES, *CHILDREN, "lmcache-processes")}
    done = subprocess.run(
        [sys.executable, READER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{release}:{ours}" if release else ours, "VLLM_LOGGING_LEVEL": "ERROR"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answers["read"].keys() == asked.keys()
    return answers


def test_vllm_reads_each_command_line_finds_children_of_hybrids_and_the_cache_server(vllm: dict[str, Any]) -> None:
    for case, expected in CASES.items():
        answer = vllm["read"][case]
        assert {key: answer.get(key) for key in expected} == expected, case
    for case, expected in CHILDREN.items():
        answer = vllm["read"][case]
        assert (answer["class"], answer["policy"]) == ("MultiConnector", "recompute")
        found = [{key: child.get(key) for key in one} for child, one in zip(answer["children"], expected, strict=True)]
        assert found == expected, case
    answer = vllm["read"]["lmcache-processes"]
    assert answer["class"] in {"LMCacheMPConnector", "LMCacheMPConnectorUpstream", "needs lmcache"}
    assert answer["document"]["kv_connector_extra_config"]["lmcache.mp.autostart"] is True


def test_importing_the_connector_the_spec_and_the_tier_starts_nothing(vllm: dict[str, Any]) -> None:
    started = vllm["started"]
    assert {f"kvtier_connector.vllm_adapter.{each}" for each in ("connector", "spec", "secondary_tier")} <= set(
        started["modules"]
    )
    assert (started["threads"], started["cuda"]) == ([], False)


def test_nothing_of_the_document_is_lost_on_the_way(vllm: dict[str, Any]) -> None:
    for case, answer in vllm["read"].items():
        written = transfer_config(case)
        found = answer["document"]
        assert found["kv_connector"] == written["kv_connector"]
        assert found["kv_connector_extra_config"] == written.get("kv_connector_extra_config", {})


def tier(connector: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((GOLDEN / "minimal" / "tier.yaml").read_text())
    body["spec"] |= ({"connector": connector} if connector else {}) | more
    return body


def test_the_generation_is_of_what_changes_blocks_and_parts_the_small_redis() -> None:
    before = parse(tier({"type": "VLLMTiering"}))
    after = parse(tier({"type": "VLLMTiering", "vllmTiering": {"readThreads": 64}}))
    found = explain_edit(before, after, names.tier_ref(tier()), connector_image="connector:test")
    assert not found.discards_cache
    assert found.restarted_pods == 1
    ports = [trial_port(), trial_port(hash={"seed": "7"}), trial_port(hash={"seed": "8"})]
    assert len(set(ports)) == len(ports)
    assert trial_port(replicas=5) == ports[0]


@pytest.mark.parametrize(
    ("connector", "kinds"),
    [
        ({"type": "SimpleCPU"}, {*VOLUME, *JANITOR, *OURS}),
        ({"type": "VLLMTiering"}, OURS),
        ({"type": "Bundled"}, set()),
        ({"type": "Hybrid", "hybrid": {"nixl": {}}}, set()),
        ({"type": "Hybrid", "hybrid": {"nixl": {"blocksOf": "other"}}}, JANITOR),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_conditions_say_where_there_is_nothing_to_judge(connector: dict[str, Any], kinds: set[str]) -> None:
    spec = parse(tier(connector))
    said = {kind: not_applicable(kind, spec) for kind in CONDITIONS}
    assert {kind for kind, problem in said.items() if problem is not None} == kinds
    for problem in filter(None, said.values()):
        assert (problem.reason, problem.is_known) == (Reason.NOT_APPLICABLE, False)
        assert "spec.connector.type" in problem.message


def pod_with(message: str) -> Snapshot:
    check = ContainerStatus(name=names.REDIS_CHECK_CONTAINER, image="c", exit_code=0, exit_message=message)
    pod = replace(READY_POD, name="llama-engine-0", containers=(check,))
    return Snapshot(tier=names.tier_ref(tier()), claim=None, engines=Engines(), pods=(pod,), live={})


def test_a_redis_that_did_not_answer_is_told_with_the_field() -> None:
    spec = parse(tier({"type": "LMCache", "lmcache": {"redis": {"url": "redis://redis.cache:6379"}}}))
    told = not_applicable("SharedCacheVerified", spec, pod_with('{"problem": "Connection refused"}'))
    assert (told.reason, told.is_known) == (Reason.STORE_UNREACHABLE, False)
    for part in ("llama-engine-0", "Connection refused", "spec.connector.lmcache.redis", "kvtier.dev/restart"):
        assert part in told.message
    for silent in ('{"problem": ""}', "", "what else", "[]"):
        assert not_applicable("SharedCacheVerified", spec, pod_with(silent)).reason is Reason.NOT_APPLICABLE


def trial_port(**more: Any) -> int:
    """Return where the Redis listens, which its Service, its pod and the engines must agree about."""
    made = stored("lmcache-trial", **more)
    (told,) = made["Service", "llama-redis"]["spec"]["ports"]
    (container,) = made["Deployment", "llama-redis"]["spec"]["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    assert told["port"] == told["targetPort"] == port
    assert container["args"][:2] == ["--port", str(port)]
    assert f'"redis://llama-redis.serving.svc:{port}"' in json.dumps(engine(made))
    return int(port)


def mooncake(made: dict[tuple[str, str], Any], folder: Path) -> Any:
    """Return what vLLM's own class reads of the file."""
    from vllm.distributed.mooncake_store import MooncakeStoreConfig  # noqa: PLC0415  takes seconds

    texts = (each["data"]["mooncake.json"] for each in made.values() if "mooncake.json" in each.get("data", {}))
    (folder / "mooncake.json").write_text(next(texts))
    return MooncakeStoreConfig.from_file(str(folder / "mooncake.json"))


def test_mooncakes_own_class_reads_the_file(tmp_path: Path) -> None:
    read = mooncake(stored("mooncake"), tmp_path)
    assert read.master_server_address == "llama-mooncake.serving.svc:50051"
    assert (read.mode, read.global_segment_size, read.local_buffer_size) == ("embedded", 32 << 30, 4 << 30)
    assert environment("mooncake")["MOONCAKE_CONFIG_PATH"] == "/etc/kvtier/mooncake.json"


def test_mooncakes_disk_is_that_of_an_owner_and_the_master_is_told(tmp_path: Path) -> None:
    def flags(config: dict[str, Any], **master: Any) -> list[str]:
        made = rendered(
            tier({"type": "Mooncake", "mooncake": {"config": {"protocol": "tcp", **config}, "master": master}})
        )
        if config.get("mode"):
            read = mooncake(made, tmp_path)
            assert (read.mode, read.global_segment_size, read.enable_offload) == ("standalone-store", 0, True)
        return list(made["Deployment", "llama-mooncake"]["spec"]["template"]["spec"]["containers"][0]["args"])

    assert flags({"mode": "standalone-store", "enable_offload": True}) == ["--port=50051", "--enable_offload=true"]
    assert flags({"enable_offload": True}, args=["-enable_offload=false"])[1:] == ["-enable_offload=false"]
    assert flags({}) == ["--port=50051"]


# flexkv/common/config.py of taco-project/FlexKV, commit 0079590724e44d2bdaa6a18a81862ea41af1dbdc: UserConfig, and names
# that a file may override.
FLEXKV_FIELDS = {"cpu_cache_gb", "ssd_cache_gb", "ssd_cache_dir", "enable_gds"}
FLEXKV_OVERRIDES = {"evict_ratio", "index_accel", "max_file_size_gb", "transfer_sms_h2d", "transfer_sms_d2h"}


def flexkv(config: dict[str, Any]) -> tuple[int, int, list[str], dict[str, Any], dict[str, Any]]:
    """Return memory, disk and directories as FlexKV reads them, the engine's container and the volumes."""
    made = rendered(tier({"type": "FlexKV", "flexKV": {"config": config}}))
    texts = (each["data"]["flexkv.json"] for each in made.values() if "flexkv.json" in each.get("data", {}))
    document = json.loads(next(texts))
    assert document.keys() <= FLEXKV_FIELDS | FLEXKV_OVERRIDES
    memory, disk = document.get("cpu_cache_gb", 16), document.get("ssd_cache_gb", 0)
    assert memory > 0
    assert disk == 0 or disk > memory
    directories = [each.strip() for each in document.get("ssd_cache_dir", "./ssd_cache").split(";") if each.strip()]
    return memory, disk, directories, *engine(made)


def test_flexkv_gets_memory_and_a_directory_of_the_nodes_disk_or_of_the_user() -> None:
    memory, disk, _, plain, volumes = flexkv({})
    assert (memory, disk) == (64, 0)
    assert "kvtier-offload" not in volumes
    memory, disk, directories, container, volumes = flexkv({"ssd_cache_gb": 500, "evict_ratio": 0.1})
    assert (memory, disk) == (64, 500)
    assert volumes["kvtier-offload"]["emptyDir"]["sizeLimit"] == "501Gi"
    assert directories == [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "kvtier-offload"]
    assert {"config", "kvtier-offload"} <= {each["name"] for each in container["volumeMounts"]}
    asked = [each["resources"]["requests"]["ephemeral-storage"] for each in (plain, container)]
    assert quantity.parse_bytes(asked[1]) - quantity.parse_bytes(asked[0]) == 500 << 30
    memory, disk, directories, _, volumes = flexkv({"cpu_cache_gb": 8, "ssd_cache_gb": 9, "ssd_cache_dir": "/a;/b"})
    assert (memory, disk, directories) == (8, 9, ["/a", "/b"])
    assert "kvtier-offload" not in volumes


def test_the_nodes_disk_holds_the_blocks_of_every_engine_in_the_pod() -> None:
    def limit(*args: str) -> str:
        body = tier({"type": "SimpleCPU", "simpleCPU": {"medium": "Disk"}}, engine={"args": list(args)})
        return str(engine(rendered(body))[1]["kvtier-offload"]["emptyDir"]["sizeLimit"])

    assert (limit(), limit("--data-parallel-size=4")) == ("65Gi", "257Gi")


def test_blocks_of_a_tier_that_is_not_there_or_has_no_janitor_are_not_stored() -> None:
    spec = parse(tier({"type": "Hybrid", "hybrid": {"nixl": {"blocksOf": "other"}}}))
    owner = {**tier(), "metadata": {"name": "other", "namespace": "default"}}
    without = {**owner, "spec": {**owner["spec"], "janitor": {"enabled": False}}}

    def told(kind: str, *others: dict[str, Any]) -> Problem:
        ref = names.tier_ref(tier())
        found = not_applicable(kind, spec, Snapshot(tier=ref, neighbours=read_neighbours(others, ref)))
        assert found is not None
        return found

    for others, words in (((), "there is no tier other on this claim"), ((without,), "the tier other has no janitor")):
        found = told("JanitorHealthy", *others)
        assert (found.reason, found.is_known, found.is_met) == (Reason.JANITOR_MISSING, True, False)
        assert f"{words}, so these engines get no permit" in found.message
        assert "see JanitorHealthy" in told("DiskHealthy", *others).message
    assert told("JanitorHealthy", owner).reason is Reason.NOT_APPLICABLE
