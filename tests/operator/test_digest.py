# SPDX-License-Identifier: Apache-2.0
"""Which fields start a generation, and what ``kvtier plan`` says before anything is applied: the pages of plans/.

A folder of plans/ is a case, planned for the nodes of plans/nodes.yaml. ``pytest --update-golden`` rewrites
expected.txt; the diff of that file is what a reviewer judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import live
import pytest
import yaml
from command import Command
from fake_cluster import FakeCluster, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import DEPLOYMENT, NOON, TIER_KEY, engine_pod, plan_of, tier

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.gather import gather
from kvtier_operator.kube.client import connect
from kvtier_operator.names import TierName
from kvtier_operator.parts.edit_impact import explain_edit
from kvtier_operator.plan import TierPlan, decide, diff, digest
from kvtier_operator.plan.report import describe_diff
from kvtier_operator.reconcile import Inputs, reconcile
from kvtier_operator.snapshot import Snapshot

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def digest_of(**changes: Any) -> str:
    parsed = parse(tier(**changes))
    return digest.digest(digest.identity(parsed, decide(parsed, names.tier_ref(tier()), None).chunking.settings()))


def test_the_digest_of_a_tier_never_changes_whatever_the_order_of_keys() -> None:
    # Every user's cache is under such a digest: a new value here throws all of them away and belongs in CHANGELOG.md.
    assert digest_of() == "d52b88e792be67e2"
    assert digest.digest({"a": 1, "b": {"c": [1], "d": None}}) == digest.digest({"b": {"d": None, "c": [1]}, "a": 1})


@pytest.mark.parametrize("change", TABLES["starts_a_generation"], ids=str)
def test_what_changes_the_bytes_or_names_of_blocks_starts_a_generation(change: dict[str, Any]) -> None:
    assert digest_of(**change) != digest_of()


@pytest.mark.parametrize("change", TABLES["keeps_the_cache"], ids=str)
def test_everything_else_keeps_the_cache(change: dict[str, Any]) -> None:
    assert digest_of(**change) == digest_of()


def body(*, ranks: int = 1, args: Sequence[str] = (), model: dict[str, Any] | None = None, on: bool = True) -> Any:
    engine = {"tensorParallel": ranks, "accelerator": {"perPod": ranks}, "args": list(args)}
    return tier(engine=engine, disk={"canonicalLayout": on}, **({} if model is None else {"model": model}))


def plan(**settings: Any) -> TierPlan:
    return plan_of(body(**settings))


def extra_config(made: TierPlan) -> dict[str, Any]:
    (container,) = engine_pod(made)["containers"]
    (word,) = (word for word in container["args"] if word.startswith("--kv-transfer-config="))
    return dict(json.loads(word.partition("=")[2])["kv_connector_extra_config"])


def test_engines_of_other_numbers_of_ranks_share_a_generation_only_in_the_canonical_layout() -> None:
    plans = [plan(ranks=ranks) for ranks in (1, 2, 4, 8)]
    assert len({made.generation.digest for made in plans}) == 1
    assert len({json.dumps(made.decisions.chunking.settings()) for made in plans}) == 1
    assert all(extra_config(made)["canonical_layout"] is True for made in plans)
    assert len({made.generation.digest for made in (plan(), plan(on=False), plan(on=False, ranks=2))}) == 3
    assert "canonical_layout" not in extra_config(plan(on=False))


@pytest.mark.parametrize(
    ("settings", "discards", "words"), TABLES["other_ranks"], ids=["kept", "discarded", "cannot be kept"]
)
def test_an_edit_of_the_ranks_is_explained(settings: dict[str, Any], discards: bool, words: str) -> None:
    before, after = (parse(body(ranks=ranks, **settings)) for ranks in (1, 2))
    found = explain_edit(before, after, names.tier_ref(tier()), connector_image="c:1")
    assert (found.discards_cache, found.restarted_pods) == (discards, 2)
    assert words in " ".join(diff.warnings(found))


@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_a_latent_is_the_same_on_every_rank(ranks: int) -> None:
    made = plan(ranks=ranks, model={"name": "org/latent", "config": TABLES["latent"]})
    assert made.generation.identity["engine_tensor_parallel"] == "any"


@pytest.mark.parametrize(("settings", "words"), TABLES["uncertified"])
def test_what_vllm_does_not_certify_is_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    found = decide(parse(body(**settings)), names.tier_ref(tier()), None)
    assert found.reason is Reason.LAYOUT_NOT_CANONICAL
    assert found.message.startswith("spec.disk.canonicalLayout: ")
    assert words in found.message
    assert found.message.endswith("engines of each tensorParallel keep blocks of their own")


TIER = names.tier_ref(tier())


def explain(before: dict[str, Any], after: dict[str, Any], *, warm_bytes: int | None = None) -> diff.Diff:
    return explain_edit(parse(tier(**before)), parse(tier(**after)), TIER, connector_image="c:1", warm_bytes=warm_bytes)


EDITS: list[tuple[dict[str, Any], bool, bool]] = TABLES["edits"]


@pytest.mark.parametrize(("edit", "discards", "restarts"), EDITS, ids=[str(edit) for edit, _, _ in EDITS])
def test_an_edit_tells_what_it_discards_and_restarts(edit: dict[str, Any], discards: bool, restarts: bool) -> None:
    found = explain({}, edit)
    assert found.discards_cache is discards
    assert found.restarted_pods == (2 if restarts else 0)
    assert any(change.is_new_generation for change in found.changes) is discards
    assert any(change.is_restart for change in found.changes) is restarts


def test_fields_that_cost_something_are_blamed_and_another_image_keeps_the_cache_it_verifies() -> None:
    found = explain({}, {"model": {"revision": "abc"}, "replicas": 3, "cpu": {"size": "32Gi"}}, warm_bytes=3 << 39)
    discarding, restarting = diff.warnings(found)
    assert "(1.5 TiB on the volume)" in discarding
    assert "engines with spec.model.revision;" in discarding
    assert restarting == "replaces 2 engine pods, one after another: spec.model.revision, spec.cpu.size changed"
    together = explain({}, {"engine": {"tensorParallel": 2, "accelerator": {"perPod": 2}}})
    assert "spec.engine.tensorParallel" in {change.field for change in together.changes if change.is_new_generation}
    verified = {"generations": {"acrossReleases": "Verified"}}
    found = explain(verified, {**verified, "engine": {"image": "vllm/vllm-openai:v0.33.0"}})
    kept, replaced = diff.warnings(found)
    assert not found.discards_cache
    assert kept.startswith("keeps the cache, verified at the first start")
    assert "spec.engine.image" in replaced


def test_the_warm_bytes_are_those_of_the_current_generation_and_of_no_other_field() -> None:
    found = explain({"disk": {"budget": {"maxBytes": "1Ti"}}}, {})
    assert [(change.field, change.before, change.after) for change in found.changes] == [
        ("spec.disk.budget.maxBytes", "1Ti", None)
    ]
    half, same, more = ({"cpu": {"size": None, "fraction": share}, "replicas": 2} for share in ("50%", "50%", "60%"))
    assert explain(half, {**same, "replicas": 3}).restarted_pods == 0
    assert explain(half, more).restarted_pods == 2
    assert explain({}, half).restarted_pods == 2
    assert not explain({}, half).discards_cache
    with pytest.raises(SpecInvalid, match="blockTokens: 96 is no multiple of the 64 tokens"):
        explain({}, {"disk": {"blockTokens": 96}, "engine": {"args": ["--block-size=64"]}})
    generations = [{"digest": "old", "usedBytes": 1}, {"digest": "now", "usedBytes": 2}]
    assert diff.warm_bytes({"generation": {"current": "now"}, "generations": generations}) == 2
    assert diff.warm_bytes({"tiers": [{"name": "cpu", "usedBytes": 1}, {"name": "disk", "usedBytes": 3}]}) == 3
    assert diff.warm_bytes({}) is None


@pytest.fixture
def upgraded() -> Snapshot:
    """Return what stands of a tier whose engines an earlier operator made, which had another generation of blocks."""
    cluster = FakeCluster(tier())
    run(cluster, image="c:0")
    note = json.loads(cluster.look(DEPLOYMENT)["metadata"]["annotations"][names.ANNOTATION_RENDERED])
    note["config"] = json.dumps({**json.loads(note["config"]), "digest": "feed"})
    cluster.edit(DEPLOYMENT, {"metadata": {"annotations": {names.ANNOTATION_RENDERED: json.dumps(note)}}})
    return gather(cluster, cluster.look(TIER_KEY), now=NOON)


def explain_live(snapshot: Snapshot, after: dict[str, Any], restart: str = "") -> diff.Diff:
    edited = parse(tier(**after))
    return explain_edit(parse(tier()), edited, TIER, connector_image="c:1", snapshot=snapshot, restart=restart)


def test_an_edit_or_restart_takes_up_an_upgrade_and_says_so_where_it_replaces_engines(upgraded: Snapshot) -> None:
    found = explain_live(upgraded, {"engine": {"args": ["--max-num-seqs", "8"]}})
    assert (found.restarted_pods, found.discards_cache, found.generation) == (2, True, "feed")
    told = "\n".join(diff.warnings(found))
    assert "blocks of generation feed" in told
    assert "the image of install-connector from c:0 to c:1" in told
    found = explain_live(upgraded, {"replicas": 3, "disk": {"mode": "Bypass"}})
    assert (found.restarted_pods, found.discards_cache, found.generation) == (0, False, "feed")
    assert diff.warnings(found) == ()
    found = explain_live(upgraded, {}, restart="now")
    assert (found.changes, found.restarted_pods) == ((), 2)
    assert "replaces 2 engine pods" in describe_diff("llama", found)


@settings(deadline=None)
@given(before=st.sampled_from([edit for edit, _, _ in EDITS]), after=st.sampled_from([edit for edit, _, _ in EDITS]))
def test_going_back_costs_what_going_forth_cost(before: dict[str, Any], after: dict[str, Any]) -> None:
    there, back = explain(before, after), explain(after, before)
    assert there.discards_cache == back.discards_cache
    assert (there.generation, there.new_generation) == (back.new_generation, back.generation)
    assert bool(there.changes) == (before != after)


ROOT = Path(__file__).parents[2]
PLANS = Path(__file__).parent / "plans"
NODES = PLANS / "nodes.yaml"
CASES = sorted(folder.name for folder in PLANS.iterdir() if folder.is_dir())


@pytest.mark.parametrize("case", CASES)
def test_a_plan_reads_as_it_was_reviewed(case: str, request: pytest.FixtureRequest, kvtier: Command) -> None:
    code, expected = 1 if case == "too-large" else 0, PLANS / case / "expected.txt"
    text = kvtier("plan", str(PLANS / case / "tier.yaml"), "--nodes", str(NODES), code=code)
    assert all(len(line) <= 132 for line in text.splitlines())
    if request.config.getoption("--update-golden"):
        expected.write_text(text)
    assert text == expected.read_text()


def test_the_example_in_the_documentation_is_what_is_printed(request: pytest.FixtureRequest) -> None:
    printed = (PLANS / "llama-8b-share" / "expected.txt").read_text().splitlines()
    example = "\n".join(f"    {line}".rstrip() for line in printed)
    page = ROOT / "docs" / "sizing.md"
    before, marker, rest = page.read_text().partition("compared by a test -->\n")
    _, end, after = rest.partition("\n\nRead it from the top.")
    wanted = before + marker + example + end + after
    if request.config.getoption("--update-golden"):
        page.write_text(wanted)
    assert page.read_text() == wanted


def write(path: Path, *bodies: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump_all(bodies))
    return str(path)


def test_the_numbers_for_programs_are_those_of_the_status(tmp_path: Path, kvtier: Command) -> None:
    (found,) = kvtier.json("plan", write(tmp_path / "tier.yaml", tier()))
    sizing = found["sizing"]
    assert (found["tier"], sizing["cpuTokens"], sizing["memoryBytes"]) == ("serving/llama", 524288, 331 << 28)
    assert "nodes" not in found


@pytest.mark.parametrize(("changes", "words"), TABLES["untold"])
def test_a_plan_names_what_it_lacks_for_the_accelerators_and_nothing_else(
    changes: dict[str, Any], words: str, tmp_path: Path, kvtier: Command
) -> None:
    text = kvtier("plan", write(tmp_path / "tier.yaml", tier(**changes)))
    (line,) = (each for each in text.splitlines() if each.startswith("accelerators, estimated"))
    assert line.endswith(f"  {words}")


def test_several_tiers_make_several_pages_and_a_config_tells_more_than_a_name(tmp_path: Path, kvtier: Command) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64}))
    file = write(tmp_path / "tier.yaml", tier(model={"name": "/models/mine"}))
    assert "4 layers x 2 x 64 x 4 KV heads x 2 B" in kvtier("plan", file, "--config", str(config))
    second = tier()
    second["metadata"]["name"] = "other"
    listed = {"apiVersion": "v1", "kind": "List", "items": [tier(), second]}
    text = kvtier("plan", write(tmp_path / "tiers.yaml", listed))
    assert text.startswith("serving/llama: ")
    assert "\n\nserving/other: " in text


@pytest.mark.parametrize(("words", "message"), TABLES["refused"])
def test_what_cannot_be_planned_is_said_in_words(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("tier.yaml"), tier())
    write(Path("share.yaml"), tier(cpu={"size": None, "fraction": "60%"}))
    Path("text.json").write_text("{")
    Path("numbers.json").write_text("[1]")
    Path("node.yaml").write_text("{apiVersion: v1, kind: Node, metadata: {}}")
    Path("image.png").write_bytes(b"\x89PNG\xff")
    code = 2 if "takes" in message else 1
    assert message in kvtier.fails("plan", *words.replace("TIER", "tier.yaml").split(), code=code)


def test_an_edit_is_told_field_by_field_and_in_sum(tmp_path: Path, kvtier: Command) -> None:
    old = tier(disk={"budget": {"maxBytes": "1Ti"}})
    old["status"] = {"generation": {"current": "x"}, "tiers": [{"name": "disk", "usedBytes": 5 << 40}]}
    new = tier(model={"revision": "abc"}, replicas=3)
    text = kvtier("plan", "--diff", write(tmp_path / "old.yaml", old), write(tmp_path / "new.yaml", new))
    assert "spec.model.revision        main    abc    empty cache, restart\n" in text
    assert "spec.replicas              2       3      no restart\n" in text
    assert "(5 TiB on the volume) cannot be read" in " ".join(text.split())
    assert "replaces 2 engine pods, one after another: spec.model.revision" in text


@pytest.mark.parametrize(("edit", "words"), TABLES["without_cost"])
def test_an_edit_that_costs_nothing_or_is_refused_says_so(
    edit: dict[str, Any], words: str, tmp_path: Path, kvtier: Command
) -> None:
    files = [write(tmp_path / "old.yaml", tier()), write(tmp_path / "new.yaml", tier(**edit))]
    text = kvtier("plan", "--diff", *files)
    assert words in " ".join(text.split())
    assert ("keeps the cache" in text) is not ("refused" in words or edit == {})


def test_an_edit_is_told_to_programs_in_the_words_of_the_api(tmp_path: Path, kvtier: Command) -> None:
    edited = tier(model={"name": "org/other", "config": {"num_hidden_layers": 4}})
    (found,) = kvtier.json("plan", "--diff", write(tmp_path / "a", tier()), write(tmp_path / "b", edited))
    assert found["generation"] != found["newGeneration"]
    assert {"restartedPods", "replicas", "warmBytes", "warnings"} <= found.keys()
    changes = {each["field"]: each for each in found["changes"]}
    assert changes["spec.model.name"]["isNewGeneration"] is True
    assert changes["spec.model.config"]["after"] == {"num_hidden_layers": 4}


def test_tiers_that_come_and_go_are_named(tmp_path: Path, kvtier: Command) -> None:
    other = tier()
    other["metadata"]["name"] = "other"
    assert kvtier.json("plan", "--diff", write(tmp_path / "a", tier()), write(tmp_path / "b", other)) == [
        {"tier": "serving/llama", "only": "before"},
        {"tier": "serving/other", "only": "after"},
    ]


def test_a_file_is_compared_with_what_the_cluster_has(tmp_path: Path, kvtier: Command, api: ApiServerThread) -> None:
    api.create(live.body())
    reconcile(connect(), TierName(namespace="default", name="llama"), Inputs(connector_image="c:1", clock=lambda: NOON))
    text = kvtier("plan", "--diff", write(tmp_path / "new.yaml", live.body(cpu={"size": "32Gi"})))
    assert "spec.cpu.size" in text
    assert "keeps the cache: generation " in text
    assert "replaces 2 engine pods, one after another: spec.cpu.size changed" in text


@pytest.mark.parametrize("command", [["render"], ["plan"], ["plan", "-o", "json"]])
def test_the_same_bytes_whatever_the_hash_seed_of_python(command: list[str]) -> None:
    def output(seed: str) -> bytes:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        full = str(ROOT / "crds" / "samples" / "full.yaml")
        return subprocess.run(
            [sys.executable, "-m", "kvtier_cli", *command, full], env=env, capture_output=True, check=True
        ).stdout

    assert output("1") == output("2")
