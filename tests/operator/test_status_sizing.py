# SPDX-License-Identifier: Apache-2.0
"""What a tier says of its sizes, of nodes with room for them or not, and of its volume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from healthy_tier import (
    DECISIONS,
    HEALTHY,
    NODE,
    NOON,
    READY,
    READY_POD,
    REF,
    USAGE,
    VIEW,
    changed,
    check_problem,
    check_verdict,
    conditions,
    varied,
    with_engines,
)
from tiers import tier

from kvtier_connector.contract.usage import GenerationUsage, Usage
from kvtier_operator import status
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.api.status_schema import PodSizing, TierStatus
from kvtier_operator.conditions import PlannedStage, Progress
from kvtier_operator.observe.pod_reports import read_metrics
from kvtier_operator.plan import Decisions, decide, engine_args, make_generation, report
from kvtier_operator.plan.chunks import Chunking
from kvtier_operator.plan.sizing import GIB, make_sizing
from kvtier_operator.snapshot import EngineReport, Engines, LiveJanitor, Node, Nodes, Pod

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def test_sizing_shows_every_term_and_the_generation_its_place() -> None:
    # The pages of plans/ have the numbers of the others.
    found = status.report(VIEW, {}, now=NOON)
    sizing = found["sizing"]
    terms = ("shm", "engineMemory", "ioWorker", "memory", "ephemeral")
    assert [sizing[f"{term}Bytes"] >> 20 for term in terms] == [65 << 10, 16 << 10, 1792, 84736, 17 << 10]
    assert [sizing[f"startup{part}Seconds"] for part in ("Base", "Pin", "Load", "")] == [300, 32, 30, 362]
    assert (sizing["cpuSize"], sizing["weightBytes"], sizing["kvGroups"]) == ("64Gi", 16100000000, 1)
    assert found["generation"]["root"].endswith(f"/serving.llama/{found['generation']['current']}")
    assert (found["replicas"], found["readyReplicas"]) == (2, 2)
    assert found["selector"] == "app.kubernetes.io/component=engine,kvtier.dev/tier=llama"


def on(*nodes: Node, pods: tuple[Pod, ...] = ()) -> Progress:
    """Return the view of a tier whose cluster has these nodes."""
    return varied(VIEW, snapshot=replace(HEALTHY, pods=pods, nodes=Nodes(nodes=nodes)))


TERMS = "engine 16 GiB + CPU tier 64 GiB + shared memory of vLLM 1 GiB + 1.75 GiB to move blocks"
NARROW = replace(NODE, memory_bytes=64 << 30)
LARGE = replace(NODE, memory_bytes=999 << 30, devices={"nvidia.com/gpu": 1})
TWO_ON_ONE = parse(tier(replicas=2, volume={"claim": {"size": "1Ti", "accessModes": ["ReadWriteOnce"]}}))
NONE_TAKES = "none of 1 nodes takes the engines (1 nvidia.com/gpu, no taint that it does not tolerate)"


@pytest.mark.parametrize(
    ("view", "reason", "words"),
    [
        (on(NARROW), "DoesNotFit", f"needs 82.8 GiB of memory ({TERMS})"),
        (on(NARROW), "DoesNotFit", "gpu-1, has 64 GiB and 32: lower spec.cpu.size to at most 45.2"),
        (on(replace(NODE, cpu_millis=3000)), "DoesNotFit", "CPUs"),
        (on(replace(NODE, devices={})), "NoNodeMatches", NONE_TAKES),
        # A volume of one node keeps all replicas on it.
        (varied(on(NARROW), spec=TWO_ON_ONE), "DoesNotFit", "has 64 GiB and 32: lower spec.cpu.size to at most 45.2"),
        (
            varied(on(NODE), spec=TWO_ON_ONE),
            "DoesNotFit",
            "2 engines need 166 GiB of memory, 8 CPUs, 2 nvidia.com/gpu",
        ),
        (
            varied(on(LARGE), spec=TWO_ON_ONE),
            "DoesNotFit",
            "on one node, since the volume is ReadWriteOnce. No node has",
        ),
    ],
)
def test_a_pod_that_fits_no_node_is_told_before_it_waits(view: Progress, reason: str, words: str) -> None:
    check_verdict(view, "SizingFits", "False", reason, words)


NOTHING = replace(HEALTHY, engines=Engines(generation=1, observed_generation=1), pods=())
SCALED_DOWN = parse(tier(replicas=0))


@pytest.mark.parametrize(
    ("view", "fits"),
    [
        # What was scheduled fits whatever the nodes look like.
        (on(replace(NODE, is_open=False), pods=(READY_POD,)), "True"),
        # Without a look at nodes, only pods tell; and no engine waits for a node.
        (changed(pods=()), "Unknown"),
        (varied(VIEW, spec=SCALED_DOWN, snapshot=NOTHING), "Unknown"),
        (varied(VIEW, spec=SCALED_DOWN, snapshot=replace(NOTHING, nodes=Nodes(nodes=()))), "Unknown"),
    ],
)
def test_what_cannot_be_known_of_nodes_takes_ready_away_from_no_tier(view: Progress, fits: str) -> None:
    found = conditions(view)
    assert [found[kind]["status"] for kind in ("Ready", "SizingFits", "HashSeedConsistent")] == ["True", fits, fits]


def test_a_cpu_tier_that_adds_little_fits_and_says_so() -> None:
    small = parse(tier(cpu={"size": "32Gi"}))
    decisions = decide(small, REF, None)
    assert isinstance(decisions, Decisions)
    snapshot = replace(HEALTHY, nodes=Nodes(nodes=(NODE,)))
    found = conditions(varied(VIEW, spec=small, snapshot=snapshot, decisions=decisions))["SizingFits"]
    assert found["status"] == "True"
    assert "the CPU tier holds 262,144 tokens and the accelerators' own KV cache about 461,056" in found["message"]
    assert "more than 56" in found["message"]


def test_a_message_stays_short_however_many_pods_there_are_and_however_much_others_say() -> None:
    strays = tuple(replace(READY_POD, name=f"llama-engine-{number}", hash_seed="7") for number in range(1000))
    found = conditions(changed(pods=strays))["HashSeedConsistent"]
    assert "llama-engine-4 (7, sha256_cbor) and 995 more. These engines" in found["message"]
    assert all(len(each["message"]) <= 4096 for each in conditions(with_engines(problem="x" * 100_000)).values())


def sized(cpu: int, memory: int = GIB, engines: int = 1, *, ranks: int = 1) -> PodSizing:
    engine = {"memory": str(memory), "tensorParallel": ranks, "args": [f"--data-parallel-size={engines}"]}
    decisions = Decisions(cpu_bytes=cpu, node_bytes=None, cpu_for="", chunking=Chunking(), weight_bytes=0, model_for="")
    return make_sizing(parse(tier(engine=engine)), decisions)


@pytest.mark.parametrize(("args", "engines"), TABLES["data_parallel"])
def test_data_parallel_engines_and_flags_are_read_alike_in_every_spelling(args: list[str], engines: int) -> None:
    assert engine_args.read(args).engines_per_pod == engines
    read = engine_args.read(TABLES["spellings"]["args"]).words
    assert {flag: list(words) for flag, words in read.items()} == TABLES["spellings"]["words"]


def test_every_term_fits_a_status_and_page_tables_count_for_each_process_that_maps_the_tier() -> None:
    found = report.terms(sized(1 << 62, 1 << 62, 9999), None, node_bytes=None)
    assert found["shmBytes"] == found["memoryBytes"] == 2**63 - 1
    one, eight = (sized(1 << 40, ranks=ranks) for ranks in (1, 8))
    assert eight.io_worker_bytes - one.io_worker_bytes == 7 * 2 * GIB
    assert eight.io_worker_bytes >= 9 * 2 * GIB


REPORT = EngineReport(token_bytes=14336, chunk_bytes=1835008)
UNKNOWN_MODEL: dict[str, Any] = {"model": {"name": "org/new-architecture"}}


def reported(*reports: EngineReport | None, runs: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return the sizing of a tier whose engines, which run this spec or another one, reported this."""
    before = varied(VIEW, spec=parse(tier(**(spec if runs is None else runs)))).stage
    assert isinstance(before, PlannedStage)
    pod = replace(READY_POD, config_digest=before.plan.config_digest)
    pods = tuple(replace(pod, name=f"e-{place}", report=report) for place, report in enumerate(reports))
    found = status.report(varied(VIEW, spec=parse(tier(**spec)), snapshot=replace(HEALTHY, pods=pods)), {}, now=NOON)
    sizing: dict[str, Any] = found["sizing"]
    return sizing


def test_sizes_that_the_config_does_not_tell_are_those_that_the_engines_reported() -> None:
    assert reported(REPORT)["kvBytesPerToken"] == 131072
    assert "kvBytesPerToken" not in reported(None, **UNKNOWN_MODEL)
    sizing = reported(None, REPORT, REPORT, **UNKNOWN_MODEL)
    assert (sizing["kvBytesPerToken"], sizing["chunkBytes"]) == (14336, 1835008)
    assert sizing["kvFormula"] == "reported by the engine e-1"
    assert (sizing["cpuTokens"], sizing["diskTokens"]) == ((64 << 30) // 14336, (2 << 40) // 14336)
    assert not any("unknown" in note for note in sizing.get("notes", ()))
    assert "kvBytesPerToken" not in reported(REPORT, replace(REPORT, token_bytes=8192), **UNKNOWN_MODEL)


@pytest.mark.parametrize("is_paused", [False, True])
def test_engines_of_an_earlier_model_do_not_tell_the_sizes_of_another(*, is_paused: bool) -> None:
    earlier = {"model": {"name": "org/earlier-architecture"}}
    assert "kvBytesPerToken" not in reported(REPORT, runs=earlier, **UNKNOWN_MODEL, paused=is_paused)


LIMITED = parse(tier(disk={"budget": {"maxBytes": "1Ti"}}))
CURRENT = make_generation(LIMITED, VIEW.tier, DECISIONS).digest
DAY = 86400.0


def view(usage: Usage | None = USAGE, *, silence: str = "", pods: tuple[Pod, ...] = (), **changes: Any) -> Progress:
    snapshot = replace(HEALTHY, janitor=LiveJanitor(pods=pods, usage=usage, silence=silence))
    return varied(VIEW, **{"spec": LIMITED, "snapshot": snapshot, **changes})


def usage(**changes: Any) -> Usage:
    return replace(USAGE, **changes)


def told(seen: Progress, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    return status.report(seen, previous or {}, now=NOON)


@pytest.mark.parametrize(
    ("seen", "condition", "reason", "words"),
    [
        (view(usage(**of), spec=parse(tier(disk={"budget": budget}))), condition, Reason(reason), words)
        for of, budget, condition, reason, words in TABLES["volumes"]
    ],
)
def test_a_problem_of_the_volume_is_told_in_its_condition_and_in_ready(
    seen: Progress, condition: str, reason: Reason, words: str
) -> None:
    check_problem(seen, condition, reason, words)


ENCRYPTED = parse(tier(disk={"encryption": {"secretName": "kv-keys", "activeKey": "2026-11"}}))


@pytest.mark.parametrize(
    ("report", "reason", "words"),
    [
        (EngineReport(**{name: tuple(value) if name == "refused" else value for name, value in report.items()}), *told)
        for report, *told in TABLES["engines_without_the_volume"]
    ],
    ids=str,
)
def test_an_engine_without_the_volume_is_named_with_the_reason(report: EngineReport, reason: str, words: str) -> None:
    pods = (replace(READY_POD, report=EngineReport()), replace(READY_POD, name="llama-engine-1", report=report))
    check_verdict(varied(changed(pods=pods), spec=ENCRYPTED), "DiskHealthy", "False", reason, words)


@pytest.mark.parametrize(("release", "reason"), [(1, "ReleaseCompared"), (2, "ReleaseRefused")])
def test_an_engine_of_another_release_is_healthy_and_named(release: int, reason: str) -> None:
    active = f'vllm:kvtier_disk_active{{engine="0"}} {release - 1}\n'
    metrics = f'{active}vllm:kvtier_disk_release{{engine="0"}} {release}.0\n'
    pods = (replace(READY_POD, report=read_metrics(metrics.encode())),)
    check_verdict(varied(changed(pods=pods)), "DiskHealthy", "True", reason, f"pod {READY_POD.name}")


@pytest.mark.parametrize(
    ("seen", "reason", "words"),
    [
        (view(None), "JanitorStarting", "see JanitorHealthy"),
        (view(usage(is_active=False)), "JanitorWaiting", "Lease/llama-janitor"),
        (view(spec=parse(tier(janitor={"enabled": False}))), "JanitorDisabled", "nothing is ever removed"),
    ],
)
@pytest.mark.parametrize("condition", ["DiskWithinBudget", "DiskHealthy"])
def test_without_a_report_nothing_is_known_and_the_engines_are_ready_all_the_same(
    condition: str, seen: Progress, reason: str, words: str
) -> None:
    assert check_verdict(seen, condition, "Unknown", reason, words)["Ready"]["status"] == "True"


WITHOUT_BUDGET = view(usage(used_bytes=1 << 50, volume_bytes=1 << 51, volume_free_bytes=1 << 50), spec=VIEW.spec)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (view(usage(is_counted=False, used_bytes=1 << 50)), "Unknown"),
        # What engines had begun to write.
        (view(usage(used_bytes=int((1 << 40) * 1.01))), "True"),
        (WITHOUT_BUDGET, "True"),
    ],
)
def test_the_budget_is_judged_when_everything_was_counted_and_without_one_the_volume_is_the_measure(
    seen: Progress, verdict: str
) -> None:
    reason = "Counting" if verdict == "Unknown" else conditions(seen)["DiskWithinBudget"]["reason"]
    assert check_verdict(seen, "DiskWithinBudget", verdict, reason, "")["DiskHealthy"]["status"] == "True"
    assert told(WITHOUT_BUDGET)["tiers"][1]["used"] == "50%"


GENERATIONS = (
    GenerationUsage(digest="aaaa", used_bytes=10, blocks=1, created=DAY, last_used=2 * DAY),
    GenerationUsage(digest=CURRENT, used_bytes=30, blocks=3, created=3 * DAY),
    GenerationUsage(digest="bbbb", used_bytes=20, blocks=2, created=2 * DAY, last_used=3 * DAY),
)


def test_generations_are_shown_the_current_one_first_and_those_of_one_engine_alone_as_unshared() -> None:
    found = told(view(usage(generations=GENERATIONS)))["generations"]
    shown = [(each["digest"], each["role"], each["usedBytes"]) for each in found]
    assert shown == [(CURRENT, "Current", 30), ("bbbb", "Previous", 20), ("aaaa", "Previous", 10)]
    assert (found[2]["created"], found[2]["lastUsed"]) == ("1970-01-02T00:00:00Z", "1970-01-03T00:00:00Z")
    assert "lastUsed" not in found[0]
    updated = replace(GENERATIONS[0], digest="aaaa.p0123456789abcdef")
    roles = {
        each["digest"]: each["role"] for each in told(view(usage(generations=(*GENERATIONS, updated))))["generations"]
    }
    assert (roles[updated.digest], roles["aaaa"]) == ("Unshared", "Previous")


def test_the_use_of_each_tier_is_shown_stays_and_is_written_once() -> None:
    assert told(view(usage(used_bytes=1 << 39, blocks=9)))["tiers"] == [
        {"name": "cpu", "capacityBytes": 64 << 30},
        {"name": "disk", "capacityBytes": 1 << 40, "usedBytes": 1 << 39, "blocks": 9, "used": "50%"},
    ]
    before = told(view(usage(generations=GENERATIONS)))
    after = told(view(None, silence="refused"), before)
    assert (after["tiers"], after["generations"]) == (before["tiers"], before["generations"])
    assert told(view(usage(is_counted=False, used_bytes=1)), before)["tiers"] == before["tiers"]
    assert TierStatus.model_validate(before).tiers[1]["used"] == "100%"
    assert status.changes(before, told(view(usage(generations=GENERATIONS)), before)) == {}


def test_a_missing_secret_of_the_keys_is_named_with_the_command_that_makes_it() -> None:
    reason = 'MountVolume.SetUp failed for volume "kvtier-keys": secret "kv-keys" not found'
    waiting = replace(READY_POD, is_ready=False, mount_problem=f"FailedMount: {reason}")
    found = conditions(varied(changed(pods=(waiting,), engines=replace(READY, ready=0)), spec=ENCRYPTED))
    assert found["EnginesReady"]["reason"] == "KeyMissing"
    assert "kubectl create secret generic kv-keys -n serving" in found["EnginesReady"]["message"]
    assert found["Stalled"]["status"] == "True"
