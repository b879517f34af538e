# SPDX-License-Identifier: Apache-2.0
"""What the matrix of models calls working, what it does not, and that its page says what was run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VERDICTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["verdicts"]
sys.path.insert(0, str(ROOT))

from e2e.engines import weights  # noqa: E402 - a folder beside the tests
from e2e.engines.weights import SHAPES, VOCABULARY  # noqa: E402 - a folder beside the tests
from e2e.matrix import asking, page  # noqa: E402 - as above
from e2e.matrix.cases import CLASSES, ModelClass  # noqa: E402 - as above
from e2e.matrix.engine import Round, ScoredAnswer  # noqa: E402 - as above
from e2e.matrix.proof import judge, judge_rewritten  # noqa: E402 - as above

MODEL = ModelClass(name="dense", title="Dense", shape="llama")
DRAFTING = ModelClass(name="draft", title="Draft", shape="llama", draft="llama")
RANKS = ModelClass(name="ranks", title="Ranks", shape="llama", ranks=(1, 2))
PICTURED = ModelClass(name="pictured", title="Picture", shape="qwen2_vl", asks="image", picture_at=200)
PREEMPTED = ModelClass(name="preempted", title="Preempted", shape="llama", must_preempt=True)
SLEEPING = ModelClass(name="sleeping", title="Sleeping", shape="llama", sleeps=True)
MODELS = {each.name: each for each in (DRAFTING, RANKS, PICTURED, PREEMPTED)}
READ, EXTERNAL, MISSES = "vllm:kvtier_disk_read_blocks", "vllm:external_prefix_cache_hits", "vllm:kvtier_disk_misses"


def answer(*tokens: int, logprob: float = -1.0, cached: int = 128) -> ScoredAnswer:
    logprobs = [{token: logprob} for token in tokens]
    return ScoredAnswer(tokens=list(tokens), logprobs=logprobs, cached_tokens=cached, prompt_tokens=200)


ANSWERS = [answer(1, 2), answer(3, 4)]


def row(
    disk: list[ScoredAnswer] = ANSWERS,
    *,
    model: ModelClass = MODEL,
    gpu: list[ScoredAnswer] = ANSWERS,
    alone: Sequence[ScoredAnswer] = (),
    woken: Round | None = None,
    **counts: float,
) -> dict[str, Any]:
    """Return the row of two prompts that the volume answers with ``disk``, and another engine's GPU with ``gpu``."""
    twin = answer(int(counts.pop("twin", 6)))
    made = {"cold": Round(answers=gpu), "gpu": Round(answers=gpu), "twins": Round(answers=[answer(5), twin])}
    strangers = counts.pop("strangers", 0)
    made |= ({"alone": Round(answers=list(alone))} if alone else {}) | ({"woken": woken} if woken else {})
    found = {READ: 2, EXTERNAL: 256, **{f"{MISSES}:{cause}": count for cause, count in counts.items()}}
    read = {
        "disk": Round(answers=disk, counts=found | {name: counts[name] for name in counts.keys() & found.keys()}),
        "pair": Round(answers=[answer(7, cached=0), answer(8)]),
        "strangers": Round(answers=[answer(9)] * bool(strangers), counts={READ: strangers}),
    }
    return judge(model, made, read)


def as_told(tokens: list[int], logprobs: list[dict[int, float]] | None = None, **more: Any) -> ScoredAnswer:
    found = answer(*tokens, **more)
    return found if logprobs is None else replace(found, logprobs=logprobs)


@pytest.mark.parametrize(("verdict", "given"), VERDICTS)
def test_only_equal_answers_out_of_the_volume_are_called_working(verdict: str, given: dict[str, Any]) -> None:
    lists = {name: [as_told(**each) for each in value] for name, value in given.items() if isinstance(value, list)}
    models = {name: MODELS[value] for name, value in given.items() if name == "model"}
    assert row(**{**given, **lists, **models})["verdict"] == verdict


def test_classes_are_asked_32_prompts_with_shared_beginnings_and_the_page_says_what_was_run() -> None:
    prompts = asking.prompts(VOCABULARY)
    assert len(prompts) >= 32
    assert len({len(prompt) for prompt in prompts}) >= 32
    for prompt in prompts:
        assert any(other is not prompt and other[:64] == prompt[:64] for other in prompts) or len(prompt) < 250
    assert page.PAGE.read_text() == page.text()


@pytest.mark.parametrize(
    ("now", "read", "verdict"),
    [
        ([answer(5, 6), answer(7, 8)], 0, None),
        ([answer(5, 6), answer(7, 8)], 1, "wrong answers: an adapter that was rewritten"),
        (ANSWERS, 0, "wrong answers: an adapter that was rewritten"),
    ],
)
def test_a_rewritten_adapter_must_answer_as_it_does_without_the_tier(
    now: list[ScoredAnswer], read: float, verdict: str | None
) -> None:
    found = judge_rewritten(ANSWERS, Round(answers=now, counts={READ: read}), [answer(5, 6), answer(7, 8)])
    assert found.get("verdict") == verdict


@pytest.mark.parametrize(
    ("answers", "read", "works"), [(ANSWERS, 2, True), ([ANSWERS[0], answer(3, 5)], 2, False), (ANSWERS, 0, False)]
)
def test_an_engine_that_slept_must_answer_as_before_and_read_the_volume(
    answers: list[ScoredAnswer], read: float, works: bool
) -> None:
    assert (row(model=SLEEPING, woken=Round(answers=answers, counts={READ: read}))["verdict"] == "works") is works


def test_an_adapter_that_changes_nothing_proves_nothing_and_every_row_belongs_to_a_class() -> None:
    assert judge_rewritten(ANSWERS, Round(answers=ANSWERS), ANSWERS)["verdict"].startswith("blind")
    assert {path.stem for path in page.RESULTS.rglob("*.json")} <= {each.name for each in CLASSES}


def test_rows_of_a_gpu_are_shown_apart_and_only_what_was_run(tmp_path: Path) -> None:
    ran = {**row(), "args": [], "vllm": "0.32.0"}
    there = {"verdict": "not run", "message": "needs 2 GPUs", "vllm": "0.32.0", "device": "cuda"}
    page.keep("dense", {**ran, "device": "cpu"}, tmp_path)
    page.keep("gqa", {**ran, "device": "cuda"}, tmp_path)
    page.keep("dense", there, tmp_path)
    text = page.text(tmp_path)
    here, _, on_gpu = text.partition("## On one")
    assert "| Dense (Llama) | works |" in here
    assert "| Grouped-query attention (Qwen3) | not run yet |" in here
    assert "| Grouped-query attention (Qwen3) | works | 2 of 2 |" in on_gpu
    assert "| Dense (Llama)" not in on_gpu
    assert "needs 2 GPUs" not in on_gpu
    page.keep("gqa", there, tmp_path)
    assert page.text(tmp_path) == text


@pytest.mark.parametrize(("spare", "ahead"), [(0, 0), (16, 0), (0, 16)])
def test_prompts_for_a_gpu_end_where_its_blocks_and_the_files_find_as_much(spare: int, ahead: int) -> None:
    prompts = asking.cut(asking.prompts(VOCABULARY), chunk=128, block=16, spare=spare, ahead=ahead)
    lengths = [len(prompt) + ahead for prompt in prompts]
    assert len(set(lengths)) > 20
    assert max(lengths) > 4 * min(lengths)
    for length in lengths:
        assert (length - 1) // 16 * 16 - spare == (length - 1) // 128 * 128 > 0


def test_a_model_whose_weights_the_engine_draws_has_a_file_that_identifies_them(tmp_path: Path) -> None:
    drawn = [each for each in CLASSES if "--load-format=dummy" in each.args]
    for each in drawn:
        weights.write(tmp_path / each.name, SHAPES[each.shape], is_drawn=True)
        assert "architectures" in json.loads((tmp_path / each.name / "config.json").read_text())
    assert len({(tmp_path / each.name / "pytorch_model.bin").read_text() for each in drawn}) == len(drawn) > 1
