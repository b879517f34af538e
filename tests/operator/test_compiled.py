# SPDX-License-Identifier: Apache-2.0
"""What engines have compiled: who may write it, who copies it, and whose word that takes."""

from __future__ import annotations

from typing import Any

import kubernetes_schemas
import pytest
from tiers import tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.names import Manifest
from kvtier_operator.parts import compiled, render
from kvtier_operator.plan import TierPlan, make_unchecked_plan

DIGEST = "0f" * 32


def plan(**spec: Any) -> TierPlan:
    body = tier(**spec)
    return make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="c:1")


def pod(planned: TierPlan) -> Manifest:
    deployment = next(
        each
        for each in render(planned)
        if each["metadata"]["name"] == "llama-engine" and "spec" in each and each["kind"] == "Deployment"
    )
    found: Manifest = deployment["spec"]["template"]
    return found


def test_engines_compile_for_themselves_unless_told_otherwise() -> None:
    assert [each["name"] for each in pod(plan())["spec"]["initContainers"]] == ["install-connector"]


def test_a_cache_is_copied_by_its_digest_from_a_volume_that_cannot_be_written() -> None:
    spec = pod(plan(engine={"compileCache": {"digest": DIGEST}}, volume={"path": "team"}))["spec"]
    restoring = spec["initContainers"][1]
    assert restoring["name"] == "restore-compiled"
    assert f"--digest={DIGEST}" in restoring["args"]
    assert "--caches=/var/lib/kvtier/team/.compiled/serving.llama" in restoring["args"]
    mounts = {each["name"]: each.get("readOnly", False) for each in restoring["volumeMounts"]}
    assert mounts == {"blocks": True, "scratch": False}
    places = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    target = next(word for word in restoring["args"] if word.startswith("--target="))
    assert places["VLLM_CACHE_ROOT"] == f"{target.removeprefix('--target=')}/vllm"
    assert places["TORCHINDUCTOR_CACHE_DIR"] == f"{target.removeprefix('--target=')}/torchinductor"


def test_a_cache_changes_no_block() -> None:
    with_cache = plan(engine={"compileCache": {"digest": DIGEST}})
    assert with_cache.generation.digest == plan().generation.digest


def test_the_job_is_an_engine_that_no_service_finds() -> None:
    own = {"initContainers": [{"name": "get-model", "image": "busybox:1"}]}
    planned = plan(engine={"compileCache": {"digest": DIGEST}, "podTemplate": own})
    template = pod(planned)
    job = compiled.job(
        names.tier_ref(tier()), template, name="llama-compile-1", root=planned.generation.root, deadline_seconds=60
    )
    kubernetes_schemas.validate(job, "1.37")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert not names.selector(names.tier_ref(tier())).items() <= labels.items()
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    engine = template["spec"]["containers"][0]
    words = container["args"]
    assert words[words.index("--") + 1 :] == [*engine["command"], *engine["args"]]
    assert container["resources"] == engine["resources"]
    assert "--url=http://0.0.0.0:8000/health" in words
    assert {each["name"] for each in spec["initContainers"]} == {"install-connector", "get-model"}
    assert "readinessProbe" not in container


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"engine": {"compileCache": {"digest": "latest"}}}, "spec.engine.compileCache.digest"),
        ({"engine": {"compileCache": {}}}, "spec.engine.compileCache.digest"),
        (
            {"engine": {"compileCache": {"digest": DIGEST}}, "connector": {"type": "VLLMOffloading"}},
            "spec.engine.compileCache: lies on the volume",
        ),
    ],
)
def test_what_names_no_cache_is_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecInvalid, match=words):
        parse(tier(**spec))
