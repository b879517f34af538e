# SPDX-License-Identifier: Apache-2.0
"""What the matrix of models calls working, what it does not, and that its page says what was run."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from e2e.matrix import asking, page, proof  # noqa: E402 - a folder beside the tests
from e2e.matrix.classes import CLASSES, ModelClass  # noqa: E402 - as above
from e2e.matrix.proof import judge, judge_rewritten  # noqa: E402 - as above
from e2e.matrix.shapes import LLAMA, VOCABULARY  # noqa: E402 - as above

MODEL = ModelClass(name="dense", title="Dense", shape=LLAMA)
DRAFTING = replace(MODEL, name="draft", draft=LLAMA)
READ, EXTERNAL = "vllm:kvtier_disk_read_blocks", "vllm:external_prefix_cache_hits"


def answer(*tokens: int, logprob: float = -1.0, cached: int = 128) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "logprobs": [{str(token): logprob} for token in tokens],
        "cached_tokens": cached,
        "prompt_tokens": 200,
    }


def run(*, read: float = 2, external: float = 256, strangers: float = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    answers = [answer(1, 2), answer(3, 4)]
    made = {
        "answers": {"cold": answers, "gpu": answers, "twins": [answer(5), answer(6)]},
        "block_tokens": 128,
        "counts": {"gpu": {}},
        "seconds": {"start": 1},
    }
    found = {
        "answers": {"disk": copy.deepcopy(answers), "pair": [answer(7, cached=0), answer(8)], "strangers": []},
        "counts": {"disk": {READ: read, EXTERNAL: external}, "strangers": {READ: strangers}},
        "seconds": {"start": 1},
    }
    return made, found


def test_the_same_answers_from_the_volume_are_what_works() -> None:
    assert judge(MODEL, *run())["verdict"] == "works"


def test_an_engine_that_reads_nothing_works_without_disk() -> None:
    assert judge(MODEL, *run(read=0))["verdict"] == "works without disk"
    assert judge(MODEL, *run(external=0))["verdict"] == "works without disk"


@pytest.mark.parametrize(("model", "verdict"), [(MODEL, "wrong answers"), (DRAFTING, "works")])
def test_only_where_drafts_are_checked_later_tokens_may_round_otherwise(model: ModelClass, verdict: str) -> None:
    made, found = run()
    made["answers"]["twins"] = [answer(5), answer(6)]
    found["answers"]["disk"][0]["logprobs"][1] = {"2": -1.3}
    row = judge(model, made, found)
    assert (row["verdict"], row["first_difference"]) == (verdict, 0)
    # Nobody can say it of a row that does not tell the first token from the others.
    del row["first_difference"]
    assert proof.verdict(row, is_drafting=True) == "undecided"
    found["answers"]["disk"][0]["logprobs"][0] = {"1": -1.3}
    assert judge(model, made, found)["verdict"] == "wrong answers"


def test_right_answers_do_not_count_where_the_volume_was_too_slow() -> None:
    made, found = run()
    found["counts"]["disk"]["vllm:kvtier_disk_misses:absent"] = 3
    assert judge(MODEL, made, found)["verdict"] == "works"
    found["counts"]["disk"]["vllm:kvtier_disk_misses:deadline"] = 1
    assert judge(MODEL, made, found)["verdict"].startswith("undecided")


def test_another_token_is_a_wrong_answer() -> None:
    made, found = run()
    found["answers"]["disk"][1]["tokens"] = [3, 5]
    assert judge(MODEL, made, found)["verdict"] == "wrong answers"


def answers_of_ranks(first: float, second: float) -> dict[str, Any]:
    made, found = run()
    made["answers"]["gpu"][1]["logprobs"][0] = {"3": -1.0, "6": -1.1}
    found["answers"]["disk"][1] = {**answer(6, 9), "logprobs": [{"3": first, "6": second}, {"9": -7.0}]}
    return {"made": made, "read": found}


def test_of_two_tokens_that_are_as_good_as_each_other_other_ranks_may_take_either() -> None:
    ranks = ModelClass(name="ranks", title="Ranks", shape=LLAMA, ranks=(1, 2))
    row = judge(ranks, **answers_of_ranks(-1.1, -1.0))
    assert (row["verdict"], row["same_tokens"], row["ties"]) == ("works", 1, 1)
    assert judge(ranks, **answers_of_ranks(-1.9, -1.0))["verdict"] == "wrong answers"
    assert judge(MODEL, **answers_of_ranks(-1.1, -1.0))["verdict"] == "wrong answers"


def test_the_least_difference_is_a_wrong_answer_where_as_much_was_cached() -> None:
    made, found = run()
    found["answers"]["disk"][1] = answer(3, 4, logprob=-1.001)
    assert judge(MODEL, made, found)["verdict"] == "wrong answers"


def test_rounding_is_none_where_less_was_cached() -> None:
    made, found = run()
    found["answers"]["disk"][1] = answer(3, 4, logprob=-1.1, cached=0)
    assert judge(MODEL, made, found)["verdict"] == "works"


def test_a_block_read_for_another_identity_is_a_wrong_answer() -> None:
    assert judge(MODEL, *run(strangers=1))["verdict"].startswith("wrong answers")


def test_a_model_that_answers_alike_after_any_beginning_proves_nothing() -> None:
    made, found = run()
    made["answers"]["twins"] = [answer(5), answer(5)]
    assert judge(MODEL, made, found)["verdict"].startswith("blind")


def test_a_class_about_preemption_in_which_nothing_was_preempted_proves_nothing() -> None:
    model = ModelClass(name="preempted", title="Preempted", shape=LLAMA, must_preempt=True)
    assert judge(model, *run())["verdict"].startswith("blind")


def test_every_class_is_asked_at_least_32_prompts_of_differing_lengths_with_shared_beginnings() -> None:
    prompts = asking.prompts(VOCABULARY)
    assert len(prompts) >= 32
    assert len({len(prompt) for prompt in prompts}) >= 32
    for prompt in prompts:
        assert any(other is not prompt and other[:64] == prompt[:64] for other in prompts) or len(prompt) < 250


def test_each_class_has_a_name_of_its_own_and_reads_what_a_class_before_it_wrote() -> None:
    names = [each.name for each in CLASSES]
    assert len(set(names)) == len(names)
    for each in CLASSES:
        assert each.of in {"", *names[: names.index(each.name)]}


def test_the_page_says_what_was_run() -> None:
    assert page.PAGE.read_text() == page.text()


BEFORE = [answer(1, 2), answer(3, 4)]


def rewritten(now: list[dict[str, Any]], computed: list[dict[str, Any]], *, read: float = 0) -> dict[str, Any]:
    found = {"answers": {"rewritten": now}, "counts": {"rewritten": {READ: read}}}
    return judge_rewritten(BEFORE, found, {"answers": {"rewritten": computed}})


def test_a_rewritten_adapter_must_answer_as_it_does_without_the_tier_and_otherwise_than_before() -> None:
    other = [answer(5, 6), answer(7, 8)]
    row = rewritten(other, other)
    assert "verdict" not in row
    assert (row["rewritten_changed"], row["rewritten_right"]) == (2, 2)
    assert row["rewritten_tokens"] == [[[1, 2], [5, 6], [5, 6]], [[3, 4], [7, 8], [7, 8]]]
    assert rewritten(other, other, read=1)["verdict"].startswith("wrong answers")
    assert rewritten(BEFORE, other)["verdict"].startswith("wrong answers")
    assert rewritten(BEFORE, BEFORE)["verdict"].startswith("blind")


def test_rows_of_a_gpu_are_shown_apart_and_only_what_was_run(tmp_path: Path) -> None:
    ran = {**judge(MODEL, *run()), "vllm": "0.32.0"}
    there = {"verdict": "not run", "message": "needs 2 GPUs", "vllm": "0.32.0", "device": "cuda"}
    page.keep({"dense": {**ran, "device": "cpu"}, "gqa": {**ran, "device": "cuda"}}, tmp_path)
    page.keep({"dense": there}, tmp_path)
    here, _, on_gpu = page.text(tmp_path).partition("## On one")
    assert "| Dense (Llama) | works |" in here
    assert "| Grouped-query attention (Qwen3) | not run yet |" in here
    assert "| Grouped-query attention (Qwen3) | works | 2 of 2 |" in on_gpu
    assert "| Dense (Llama)" not in on_gpu
    assert "needs 2 GPUs" not in on_gpu
    page.keep({"gqa": there}, tmp_path)
    assert page.text(tmp_path).partition("## On one")[2] == on_gpu


def test_answers_that_differ_where_less_was_cached_decide_nothing_unless_both_tokens_are_as_good() -> None:
    made, found = run()
    made["answers"]["gpu"][1]["logprobs"][0] = {"3": -1.0, "6": -1.1}
    other = {**answer(6, 9, cached=0), "logprobs": [{"3": -1.1, "6": -1.0}, {"9": -7.0}]}
    found["answers"]["disk"][1] = other
    row = judge(MODEL, made, found)
    assert (row["verdict"], row["ties"]) == ("works", 1)
    other["logprobs"][0] = {"3": -1.9, "6": -1.0}
    assert judge(MODEL, made, found)["verdict"] == "undecided"
    found["answers"]["disk"][0] = answer(1, 2, logprob=-1.001)
    assert judge(MODEL, made, found)["verdict"] == "wrong answers"


@pytest.mark.parametrize(("spare", "ahead"), [(0, 0), (16, 0), (0, 16)])
def test_prompts_for_a_gpu_end_where_its_blocks_and_the_files_find_as_much(spare: int, ahead: int) -> None:
    prompts = asking.cut(asking.prompts(VOCABULARY), chunk=128, block=16, spare=spare, ahead=ahead)
    lengths = [len(prompt) + ahead for prompt in prompts]
    assert len(set(lengths)) > 20
    assert max(lengths) > 4 * min(lengths)
    for length in lengths:
        assert (length - 1) // 16 * 16 - spare == (length - 1) // 128 * 128 > 0


@pytest.mark.parametrize("path", sorted(page.RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_every_row_belongs_to_a_class(path: Path) -> None:
    assert path.stem in {each.name for each in CLASSES}
