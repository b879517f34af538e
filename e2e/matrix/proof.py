# SPDX-License-Identifier: Apache-2.0
"""Runs one class of the matrix and returns its verdict with the evidence: works, works without disk, or refused.

One engine computes each prompt and answers it again from its own prefix cache. A second one, of another process, has
only the volume; its answers must be the same, token by token and probability by probability.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from e2e.engines import weights
from e2e.engines.process import EngineEnded
from e2e.engines.weights import PICTURE_TOKEN, SHAPES, VOCABULARY
from e2e.matrix import asking, rendering
from e2e.matrix.asking import Request
from e2e.matrix.cases import CHUNK_TOKENS, GPU_BLOCK_TOKENS, PICTURE_TOKENS, ModelClass
from e2e.matrix.engine import ANSWER_TOKENS, ForkedEngine, Round, ScoredAnswer
from e2e.matrix.rendering import Rendered

from kvtier_operator.errors import SpecInvalid

LIMIT_SECONDS: Final = 200.0
"""For a start, and for a round of answers."""
TOLERANCE: Final = 0.5
"""Largest difference of log-probabilities for engines that computed in pieces of other lengths.

bfloat16 lets an engine's own hit differ from computing the prompt by half as much."""
SEEN: Final = 0.05
"""Smallest change that another beginning must make if answers are compared to the last bit."""
AT_ONCE_COLD: Final = 8

ADAPTERS: Final = "adapters"
"""Claim with the adapters."""
ADAPTER_AGE_SECONDS: Final = 4.0
"""Adapters must be older than the next engine, by any clock that the tier trusts: then it knows what they hold."""

_UNLIKE = 99.0
_PICTURE_FIRST: Final = frozenset({"blip-2"})
"""Models before whose prompt vLLM puts the picture by itself."""
_KEPT: Final = ("--prefix-cache-retention-interval", "--long-prefill-token-threshold")
_READ = "vllm:kvtier_disk_read_blocks"
_MISSES = "vllm:kvtier_disk_misses:"
_EXTERNAL = "vllm:external_prefix_cache_hits"
_PREEMPTIONS = "vllm:num_preemptions"


def prove(model: ModelClass, work: Path, *, device: str, split_hits: str) -> dict[str, Any]:
    """Run a class below ``work``; return its row."""
    if model.needs and device == "cpu":
        return {"verdict": "not run", "message": model.needs}
    if model.module and find_spec(model.module) is None:
        return {"verdict": "not run", "message": f"vLLM imports {model.module} for it, which is not installed here"}
    directory, place = work / model.name, work / "weights" / model.name
    shutil.rmtree(directory, ignore_errors=True)
    weights.write(place, model.shape_on(device), is_drawn="--load-format=dummy" in model.args)
    for number, name in enumerate(model.loras):
        weights.write_lora(_adapter(directory, name), SHAPES[model.shape], seed=number)
    args = [*model.args, *(() if device == "cpu" else model.gpu_args), *_drafting(model, work)]
    try:
        writer, reader = (
            rendering.render(tier(model, place, device, (*args, *more), split_hits), directory).with_ranks(ranks)
            for ranks, more in zip(model.ranks, ((), model.reader_args), strict=True)
        )
    except SpecInvalid as error:
        return {"verdict": "refused", "by": "the operator", "message": str(error)}
    made_up = asking.prompts(VOCABULARY)
    if device != "cpu":
        spare = GPU_BLOCK_TOKENS if model.is_eagle else 0
        ahead = PICTURE_TOKENS if model.asks == "image" else 0
        made_up = asking.cut(made_up, chunk=CHUNK_TOKENS, block=GPU_BLOCK_TOKENS, spare=spare, ahead=ahead)
    prompts = _asked(model, made_up)
    first, *later = _asked(model, asking.sharing(VOCABULARY, model.pair_tokens))
    later = [replace(each, lora=first.lora, image=first.image) for each in later]
    twins = _asked(model, asking.twins(VOCABULARY))
    twins = [replace(each, lora=twins[0].lora, image=twins[0].image) for each in twins]
    if model.loras:
        time.sleep(ADAPTER_AGE_SECONDS)
    # Blocks of the last prompts have the least time to reach the volume.
    woken = {"woken": prompts} if model.sleeps else {}
    rounds = {"cold": prompts, **woken, "pair": [first], "gpu": prompts, "twins": twins}
    # Of prompts in one step, vLLM's CPU build gives those without an adapter another one's.
    at_once = {} if model.loras and device == "cpu" else {"cold": AT_ONCE_COLD}
    try:
        made = _run(writer, rounds, directory / "writer.log", at_once=at_once)
        # The first engine's own hit may come through the connector, so one without it answers, too.
        rounds = {"cold": prompts, "gpu": prompts} if device != "cpu" else {}
        alone = _run(writer.without_tier(), rounds, directory / "alone.log", at_once=at_once) if rounds else {}
        made |= {"alone": alone["gpu"]} if alone else {}
    except EngineEnded as error:
        return _without(writer, prompts, directory, message=str(error))
    stored = [path.stat().st_size for path in (directory / "volume").rglob("*.kvb")]
    rounds = {"strangers": _strangers(model, first), "disk": prompts, "pair": later}
    tokens, at_once = model.reader_tokens or ANSWER_TOKENS, dict.fromkeys(rounds, model.at_once)
    try:
        read = _run(reader, rounds, directory / "reader.log", at_once=at_once, answer_tokens=tokens)
    except EngineEnded as error:
        return {"verdict": "failed", "by": "the second engine", "message": str(error)}
    row = judge(model, made, read)
    # The flags by which the operator has windows and states kept in the middle of prompts.
    row["args"] = [word for word in writer.argv if word.startswith(_KEPT)]
    row |= {"stored_blocks": len(stored), "stored_bytes": sum(stored)}
    if model.loras:
        answers = [*made["pair"].answers, *made["gpu"].answers]
        row |= _rewrite(model, reader, directory, list(zip([first, *prompts], answers, strict=True)))
    return row


def _run(
    rendered: Rendered,
    rounds: Mapping[str, Sequence[Request]],
    log: Path,
    *,
    at_once: Mapping[str, int] = MappingProxyType({}),
    answer_tokens: int = ANSWER_TOKENS,
) -> dict[str, Round]:
    """Ask an engine of its own round after round, until all lies on the volume; raise EngineEnded if it ends."""
    with ForkedEngine(rendered, log, limit_seconds=LIMIT_SECONDS) as engine:
        found = {}
        for name, requests in rounds.items():
            if name == "woken":
                engine.call("sleep")
            found[name] = engine.ask(requests, at_once=at_once.get(name, 1), answer_tokens=answer_tokens)
        engine.settle()
        return found


def _adapter(directory: Path, name: str) -> Path:
    return directory / "adapters" / ADAPTERS / name


def _rewrite(
    model: ModelClass, rendered: Rendered, directory: Path, before: Sequence[tuple[Request, ScoredAnswer]]
) -> dict[str, Any]:
    """Write an adapter anew at its place and ask for it again: no block of the old one may be found."""
    name = model.loras[0]
    weights.write_lora(_adapter(directory, name), SHAPES[model.shape], seed=len(model.loras))
    time.sleep(ADAPTER_AGE_SECONDS)
    known = [(request, answer) for request, answer in before if request.lora == name]
    rounds = {"rewritten": [request for request, _ in known]}
    try:
        found = _run(rendered, rounds, directory / "rewritten.log")["rewritten"]
        alone = _run(rendered.without_tier(), rounds, directory / "rewritten-without.log")["rewritten"]
    except EngineEnded as error:
        return {"verdict": "failed", "by": "the third engine", "message": str(error)}
    return judge_rewritten([answer for _, answer in known], found, alone.answers)


def judge_rewritten(before: Sequence[ScoredAnswer], found: Round, computed: Sequence[ScoredAnswer]) -> dict[str, Any]:
    """Compare what an adapter answered before it was written anew, what it answers now, and does without the tier."""
    now = found.answers
    changed = sum(one.tokens != other.tokens for one, other in zip(before, now, strict=True))
    right = sum(_is_same(*pair) for pair in zip(now, computed, strict=True))
    blocks = found.counts.get(_READ, 0)
    row: dict[str, Any] = {
        "rewritten": len(before),
        "rewritten_blocks": blocks,
        "rewritten_changed": changed,
        "rewritten_right": right,
    }
    if blocks or right < len(before):
        row["verdict"] = "wrong answers: an adapter that was rewritten"
    elif not changed:
        row["verdict"] = "blind: adapters change nothing"
    return row


def _without(writer: Rendered, prompts: Sequence[Request], directory: Path, *, message: str) -> dict[str, Any]:
    """Say whose fault it is that the first engine ended: run it once more without the tier."""
    try:
        _run(writer.without_tier(), {"cold": prompts}, directory / "without.log", at_once={"cold": AT_ONCE_COLD})
    except EngineEnded as error:
        return {"verdict": "refused", "by": "vLLM, without kvtier too", "message": str(error)}
    return {"verdict": "failed", "by": "kvtier", "message": message}


def _asked(model: ModelClass, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    settings: Mapping[str, Mapping[str, Any]] = {"salted": {"salt": "pepper"}, "embedded": {"embedding": 3}}
    made = [Request(tokens=each, **settings.get(model.asks, {})) for each in prompts]
    if model.asks == "lora":
        names = (*model.loras, "")
        made = [replace(each, lora=names[number % len(names)]) for number, each in enumerate(made)]
    if model.asks == "image":
        mark = () if SHAPES[model.shape]["model_type"] in _PICTURE_FIRST else (PICTURE_TOKEN,)
        place = model.picture_at
        made = [
            replace(each, tokens=(*tokens[:place], *mark, *tokens[place:]), image=number // asking.PROMPTS_A_STEM)
            for number, (each, tokens) in enumerate(zip(made, prompts, strict=True))
        ]
    return made


def _strangers(model: ModelClass, request: Request) -> list[Request]:
    """Return a request that was computed under identities under which it was not."""
    others: Mapping[str, Sequence[Mapping[str, Any]]] = {
        "salted": [{"salt": ""}, {"salt": "another"}],
        "embedded": [{"embedding": 4}],
        "lora": [{"lora": name} for name in (*model.loras, "") if name != request.lora],
        "image": [{"image": 100}],
    }
    return [replace(request, **other) for other in others.get(model.asks, ())]


def _drafting(model: ModelClass, work: Path) -> list[str]:
    if not model.draft:
        return []
    place = work / "weights" / f"{model.name}-draft"
    write = weights.write_eagle if model.draft_method == "eagle" else weights.write
    write(place, SHAPES[model.draft], seed=weights.SEED + 1)
    settings = {"method": model.draft_method, "model": str(place), "num_speculative_tokens": 2}
    return [f"--speculative-config={json.dumps(settings)}"]


def tier(model: ModelClass, place: Path, device: str, args: Sequence[str], split_hits: str) -> dict[str, Any]:
    """Return the tier that a user would apply."""
    config = json.loads((place / "config.json").read_text())
    is_cpu = device == "cpu"
    flags = ["--enforce-eager", "--dtype=bfloat16", "--max-model-len=4096", *args]
    # Pictures are made into tokens with the words around them.
    flags += [] if model.asks == "image" else ["--skip-tokenizer-init"]
    # Tiny engines share one machine, and its GPUs.
    flags += ["--gpu-memory-utilization=0.1", f"--kv-cache-memory-bytes={'256M' if is_cpu else '1G'}"]
    # By CUDA's own messages, which need no GPU to reach another one's memory.
    flags += ["--disable-custom-all-reduce"] if max(model.ranks) > 1 and not is_cpu else []
    loras = [{"name": name, "source": {"claim": ADAPTERS, "path": name}} for name in model.loras]
    disk: dict[str, Any] = {"splitHits": split_hits}
    disk |= {"blockTokens": model.block_tokens} if model.block_tokens else {}
    disk |= {"canonicalLayout": True} if model.has_other_ranks else {}
    spec = {
        "model": {"name": str(place), "config": config, **({"loras": loras} if loras else {})},
        "engine": {"accelerator": {"resource": "none" if is_cpu else "nvidia.com/gpu"}, "args": flags},
        "cpu": {"size": "256Mi"},
        "volume": {"existingClaim": "blocks"},
        "disk": disk,
        # No janitor runs here whose permit engines would store by.
        "janitor": {"enabled": False},
    }
    return rendering.body_of("matrix", spec)


def judge(model: ModelClass, made: Mapping[str, Round], read: Mapping[str, Round]) -> dict[str, Any]:
    """Compare the answers and say what they show."""
    gpu, disk, pair = made["gpu"].answers, read["disk"].answers, read["pair"].answers
    counts, alone = read["disk"].counts, made["alone"].answers if "alone" in made else []
    both = list(zip(gpu, disk, strict=True))
    # Two engines that found as much of a prompt compute the rest by the same steps, to the same bits.
    alike = [(one, other) for one, other in both if one.cached_tokens == other.cached_tokens]
    alike = alike if model.at_once == 1 and not model.has_other_ranks else []
    strangers, before = read["strangers"].answers, model.picture_at // CHUNK_TOKENS
    lengths = [answer.prompt_tokens for answer in gpu]
    row: dict[str, Any] = {
        "prompts": len(gpu),
        "lengths": [min(lengths), max(lengths)],
        "prompt_tokens": sum(lengths),
        "same_tokens": sum(one.tokens == other.tokens for one, other in both),
        # In another order of adding up, of two tokens that are as good as each other either may come first.
        "ties": sum(
            (model.has_other_ranks or one.cached_tokens != other.cached_tokens) and is_tie(one, other)
            for one, other in both
        ),
        "alike": len(alike),
        "alike_difference": max(
            (difference(*pair) if pair[0].tokens == pair[1].tokens else _UNLIKE for pair in alike), default=0.0
        ),
        # The first token of an answer needs no draft, wherever drafts are.
        "first_difference": max((difference(*pair, tokens=1) for pair in alike), default=0.0),
        "largest_difference": round(max(difference(*pair) for pair in both), 6),
        "recompute_difference": round(max(map(difference, made["cold"].answers, gpu)), 6),
        "twins_difference": difference(*made["twins"].answers),
        "alone": len(alone),
        "alone_difference": max(map(difference, alone, disk), default=0.0),
        "alone_same": sum(map(_is_same, alone, disk)),
        "disk_blocks": counts.get(_READ, 0),
        "external_tokens": counts.get(_EXTERNAL, 0),
        # Blocks that were on the volume and were computed instead.
        "missed_blocks": sum(
            count for name, count in counts.items() if name.startswith(_MISSES) and name != f"{_MISSES}absent"
        ),
        "strangers": len(strangers),
        # The files before a picture are the same for all pictures.
        "stranger_blocks": max(0, read["strangers"].counts.get(_READ, 0) - len(strangers) * before),
        "preemptions": counts.get(_PREEMPTIONS, 0),
        "pair_tokens": pair[0].cached_tokens,
        # After two more that the second engine has computed itself.
        "later_tokens": pair[-1].cached_tokens,
        "pair_common": model.pair_tokens * 2 // 3,
    }
    row["verdict"] = _verdict(row, is_drafting=model.is_drafting)
    if model.sleeps:
        row["woken_same"] = sum(_is_same(*pair) for pair in zip(gpu, made["woken"].answers, strict=True))
        row["woken_blocks"] = made["woken"].counts.get(_READ, 0)
        if row["woken_same"] < row["prompts"] or not row["woken_blocks"]:
            row["verdict"] = "wrong answers after a sleep, or none from the volume"
    if model.must_preempt and not row["preemptions"]:
        row["verdict"] = "blind: nothing was preempted"
    return row


def _verdict(row: Mapping[str, Any], *, is_drafting: bool) -> str:
    """Say in one word what the numbers show; `is_drafting` is whether tokens are computed in steps with drafts."""
    # Where every bit is compared, any difference that another beginning makes would show.
    if row["twins_difference"] <= (SEEN if row["alike"] == row["prompts"] else TOLERANCE):
        return "blind: the answers do not depend on the prefix"
    if row["stranger_blocks"]:
        return "wrong answers: blocks were read for another identity"
    # An engine's own hit and computing differ by the rounding of this model, with no volume involved.
    rounding = max(TOLERANCE, min(row["recompute_difference"], 2 * TOLERANCE))
    if row["alike_difference"] and not (is_drafting and row["alike_difference"] <= rounding):
        return "wrong answers"
    # Which drafts are accepted decides how many tokens a step computes, and so how it rounds; not so the first token.
    if row["alike_difference"] and row["first_difference"]:
        return "wrong answers"
    if row["same_tokens"] + row["ties"] < row["prompts"] or row["largest_difference"] > rounding:
        return "undecided" if row["alike"] else "wrong answers"
    if row["alone"] and (row["alone_same"] < row["prompts"] or row["alone_difference"] > rounding):
        return "wrong answers: an engine without the tier gives others"
    if row["missed_blocks"]:
        return "undecided: the volume was too slow"
    return "works" if row["disk_blocks"] and row["external_tokens"] else "works without disk"


def _is_same(one: ScoredAnswer, other: ScoredAnswer) -> bool:
    return one.tokens == other.tokens or is_tie(one, other)


def is_tie(one: ScoredAnswer, other: ScoredAnswer) -> bool:
    """Tell whether two answers part at a token that is about as probable as the one in its place, to both."""
    for token, instead, left, right in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        if token != instead:
            known = [each.get(number) for each in (left, right) for number in (token, instead)]
            probable = [value for value in known if value is not None]
            return len(probable) == len(known) and max(probable) - min(probable) <= TOLERANCE
    return False


def difference(one: ScoredAnswer, other: ScoredAnswer, *, tokens: int = ANSWER_TOKENS) -> float:
    """Return how far the log-probabilities of so many tokens of two answers lie apart, as far as they can be compared.

    After tokens that differ they do not; those of unlike tokens are not alike at all.
    """
    worst = 0.0
    pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
    parted = next((number for number, (token, instead) in pairs if token != instead), ANSWER_TOKENS)
    for left, right in list(zip(one.logprobs, other.logprobs, strict=True))[: min(parted + 1, tokens)]:
        shared = left.keys() & right.keys()
        worst = max([worst, *(abs(left[token] - right[token]) for token in shared)])
        worst = worst if shared else _UNLIKE
    return worst
