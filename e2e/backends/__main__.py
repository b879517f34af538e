# SPDX-License-Identifier: Apache-2.0
"""Start each rendered case, and measure the first token: cold, from the tier, after a restart, on another replica."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from e2e.backends import cases as known
from e2e.backends import lmcache_memcpy
from e2e.backends.pod import Pod

VOCABULARY = 32000
HITS = "external_prefix_cache_hits_total"
CHUNK_TOKENS = 256
"""LMCache's: the end of a prompt that fills none may be computed."""
TRIES = 5
PASSWORD = "of-the-script"  # noqa: S105  of a Redis that only this machine reaches


class BackendRun:
    """One run: its settings, and what was measured so far, which is written as it comes."""

    def __init__(self, options: argparse.Namespace, document: Mapping[str, Any]) -> None:
        """Store."""
        self.options = options
        self.device = str(document["device"])
        self.tokens = 2048 if self.device == "cpu" else 16384
        self.rounds = 1 if self.device == "cpu" else 3
        self.results: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def left(self) -> float:
        """Return the seconds that the run may go on."""
        return float(self.options.seconds - (time.monotonic() - self._began))

    def keep(self) -> None:
        """Write what was measured."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        found = {"device": self.device, "prompt_tokens": self.tokens, "rounds": self.rounds, "cases": self.results}
        (self.options.out / "backends.json").write_text(json.dumps(found, indent=1) + "\n")


def prompt(seed: int, tokens: int) -> list[int]:
    """Return token ids that no other seed shares a beginning with."""
    return [random.Random(f"{seed}-{at}").randrange(1000, VOCABULARY) for at in range(tokens)]


def first_token(pod: Pod, ids: list[int]) -> tuple[float, list[int]]:
    """Return the milliseconds to an answer of one token, and then the eight tokens that a second request gets."""
    asked = {"model": pod_model(pod), "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    began = time.perf_counter()
    answer = json.loads(pod.ask("POST", "/v1/completions", asked))
    return 1000 * (time.perf_counter() - began), list(answer["choices"][0]["token_ids"])


def answer_of(pod: Pod, ids: list[int]) -> list[int]:
    """Return eight tokens."""
    asked = {"model": pod_model(pod), "prompt": ids, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return list(json.loads(pod.ask("POST", "/v1/completions", asked))["choices"][0]["token_ids"])


def pod_model(pod: Pod) -> str:
    """Return the name that the engine serves under."""
    return str(json.loads(pod.ask("GET", "/v1/models", None))["data"][0]["id"])


def forget(pod: Pod) -> None:
    """Empty the engine's own prefix cache, and leave what the connector keeps."""
    time.sleep(1.0)  # what is on its way to the tier arrives with a step or two
    for _ in range(20):
        pod.ask("POST", "/v1/completions", {"model": pod_model(pod), "prompt": [5] * 8, "max_tokens": 2})
        try:
            pod.ask("POST", "/reset_prefix_cache", None)
        except RuntimeError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the prefix cache cannot be emptied: blocks are still in use")


def hit(pod: Pod, ids: list[int]) -> tuple[float, list[int]]:
    """Return `first_token` of a prompt that the tier holds whole; of the last try if it never does.

    Blocks that are still being stored are computed again: on a busy machine, storing takes longer than `forget` waits.
    """
    for _ in range(TRIES):
        forget(pod)
        before = counted(pod).get(HITS, 0.0)
        took, token = first_token(pod, ids)
        if counted(pod).get(HITS, 0.0) - before > len(ids) - CHUNK_TOKENS:
            break
    return took, token


def measure(run: BackendRun, pod: Pod, result: dict[str, Any]) -> None:
    """Measure one engine that has computed nothing yet: cold, again from its tier."""
    ids = prompt(1, run.tokens)
    first_token(pod, prompt(99, run.tokens))  # kernels are chosen and memory is touched
    forget(pod)
    result["cold_ms"], token = first_token(pod, ids)
    is_lazy = "Lazy" in pod.title
    is_behind_memory = "node's disk" in pod.title
    if "storeThreshold 2" in pod.title:
        # Kept at the second offer.
        forget(pod)
        result["second_ms"], _ = first_token(pod, ids)
    if is_lazy or is_behind_memory:
        # Copied, or evicted from memory, when there is much else: so that is computed.
        for seed in range(50, 54):
            first_token(pod, prompt(seed, run.tokens))
    times, answers = [], []
    for _ in range(run.rounds):
        took, found = hit(pod, ids)
        times.append(took)
        answers.append(found)
    result["hit_ms"] = statistics.median(times)
    forget(pod)
    result["tokens"] = answer_of(pod, ids)
    result["same_tokens"] = all(found == token for found in answers)
    result["hit_tokens"] = counted(pod)


def measure_again(pod: Pod, result: dict[str, Any], tokens: int, field: str) -> None:
    """Measure an engine that starts with nothing in its memory."""
    first_token(pod, prompt(98, tokens))
    first_token(pod, prompt(99, tokens))  # which the first engine has computed as well: the way of a hit is warm, too
    ids = prompt(1, tokens)
    before = counted(pod)
    result[field], _ = first_token(pod, ids)
    read = {name: value - before.get(name, 0) for name, value in counted(pod).items()}
    result[field.replace("_ms", "_hit_tokens")] = read
    result["same_tokens"] = result.get("same_tokens", True) and answer_of(pod, ids) == result["tokens"]


def counted(pod: Pod) -> dict[str, float]:
    """Return what vLLM itself counts of hits beyond its own cache."""
    found: dict[str, float] = {}
    for line in pod.ask("GET", "/metrics", None).decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")):
            found[name.split("{")[0].removeprefix("vllm:")] = float(value)
    return found


def wait_ready(run: BackendRun, pods: list[Pod], results: Mapping[str, dict[str, Any]], seconds: float) -> list[Pod]:
    """Wait until each engine answers or has failed, and return those that serve."""
    deadline = time.monotonic() + min(seconds, run.left())
    waiting, serving = list(pods), []
    while waiting:
        for pod in list(waiting):
            problem = "did not serve in time" if time.monotonic() > deadline else ""
            try:
                if pod.is_ready():
                    waiting.remove(pod)
                    serving.append(pod)
                    results[pod.title].setdefault("start_seconds", []).append(round(pod.start_seconds or 0, 1))
                    run.say(f"{pod.title}: serves after {pod.start_seconds:.0f} s")
                    continue
            except RuntimeError as error:
                problem = str(error)
            if problem:
                waiting.remove(pod)
                results[pod.title]["problem"] = problem
                run.say(f"{pod.title}: {problem}: {pod.last_words()}")
                run.keep()
                pod.stop()
        time.sleep(0.5)
    return serving


def short(result: Mapping[str, Any]) -> str:
    """Return the times of one case."""
    names = [name for name in ("cold_ms", "hit_ms", "replica_ms") if name in result]
    return ", ".join(f"{name[:-3]} {result[name]:.0f} ms" for name in names)


def guarded(run: BackendRun, result: dict[str, Any], stage: str, work: Callable[[], None]) -> None:
    """Do one stage; what goes wrong is noted, and the next case has its turn."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  whatever it is, the other cases are worth measuring
        result["problem"] = f"{stage}: {type(error).__name__}: {error}"[:900]
        run.say(f"{result['title']}: {result['problem']}")
    run.keep()


def started(run: BackendRun, kind: str, port: int, chosen: list[Mapping[str, Any]], work: Path) -> list[Pod]:
    """Start an engine of each of these cases."""
    made = []
    for at, case in enumerate(chosen):
        preload = run.options.lmcache_preload if "LMCache" in case["title"] else ""
        env = {"LMCACHE_RESP_PASSWORD": PASSWORD, **({"LD_PRELOAD": preload} if preload else {})}
        if case.get("needs_memcpy"):
            lmcache_memcpy.install(work / "plugins")
            env["PYTHONPATH"] = f"{work / 'plugins'}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
        name = f"{case['tier']['metadata']['name']}-{kind}"
        made.append(Pod(case, work, port=port + at, name=name, more_env=env))
    for pod in made:
        pod.start()
    return made


def wave(run: BackendRun, cases: list[Mapping[str, Any]], work: Path) -> None:
    """Start engines of several cases at the same time, measure one after the other, and do it again in new ones."""
    results: dict[str, dict[str, Any]] = {
        case["title"]: {"title": case["title"], "args": case["args"]} for case in cases
    }
    for case in cases:
        results[case["title"]] |= {"shares": case["shares"], "memcpy": case.get("needs_memcpy", False)}
    run.results += list(results.values())
    pods = started(run, "a", run.options.port, cases, work)
    try:
        for pod in wait_ready(run, pods, results, run.options.start_seconds):
            guarded(run, results[pod.title], "first engine", partial(measure, run, pod, results[pod.title]))
            run.say(f"{pod.title}: {short(results[pod.title])}")
        is_wanted = run.options.second == "all"
        alive = [case for case in cases if "problem" not in results[case["title"]] and (case["shares"] or is_wanted)]
        if alive and run.left() > 0:
            second(run, alive, pods, results, work)
    finally:
        for pod in pods:
            pod.stop()
        if run.options.logs:
            keep_logs(run, pods)


def second(
    run: BackendRun, cases: list[Mapping[str, Any]], pods: list[Pod], results: Mapping[str, dict[str, Any]], work: Path
) -> None:
    """Measure new engines, and add them to those that run.

    The first engines go on: these are other replicas. They have computed nothing, so they are restarts as well.
    """
    for pod in pods:
        # LMCache's cache server has one port for each pod, and all pods here have one address.
        if "MultiProcess" in pod.title:
            pod.stop()
    made = started(run, "b", run.options.port + 50, cases, work)
    pods += made
    for pod in wait_ready(run, made, results, run.options.start_seconds):
        result = results[pod.title]
        guarded(run, result, "second engine", partial(measure_again, pod, result, run.tokens, "replica_ms"))
        run.say(f"{pod.title}: {short(result)}")


def keep_logs(run: BackendRun, pods: list[Pod]) -> None:
    """Keep the ends of what engines have logged."""
    with (run.options.out / "engines.log").open("a") as log:
        for pod in pods:
            text = pod.log.read_text(errors="replace") if pod.log.exists() else ""
            log.write(f"===== {pod.title} {pod.log.name}\n{pod.reasons()}{text[-6000:]}\n")


def clear(work: Path, cases: list[Mapping[str, Any]]) -> None:
    """Remove what an earlier run has left of these cases: their volumes hold the very prompts that are asked."""
    for case in cases:
        for path in work.glob(f"{case['tier']['metadata']['name']}-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def redis(run: BackendRun, program: str) -> Iterator[None]:
    """Run two Redis with the operator's own flags while cases need them: with a password, and without."""
    if not program:
        yield
        return
    words = ["--save", "", "--appendonly", "no", "--maxmemory", str(12 << 30), "--bind", "127.0.0.1"]
    words += ["--maxmemory-policy", "allkeys-lru"]
    each = (["--port", "6379", "--requirepass", PASSWORD], ["--port", str(known.OPEN_PORT)])
    with (run.options.out / "redis.log").open("wb") as log:
        commands = [[*program.split(), *words, *more] for more in each]
        made = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) for command in commands]
    try:
        yield
    finally:
        for process in made:
            process.terminate()
            process.wait(10)


def problems(results: list[dict[str, Any]]) -> list[str]:
    """Return what is not as promised: each case hits, its tokens are equal, and what is shared is read by another."""
    found = []
    for result in results:
        hits = [result.get(name, {}).get(HITS, 0) for name in ("hit_tokens", "replica_hit_tokens")]
        told = {
            result.get("problem", ""): "problem" not in result,
            "tokens differ": result.get("same_tokens"),
            "no hit": hits[0],
            "another engine found nothing": hits[1] or not result["shares"],
        }
        found += [f"{result['title']}: {problem}" for problem, is_well in told.items() if not is_well]
    return found


def main() -> None:
    """Run what fits into the time."""
    parser = argparse.ArgumentParser(prog="python -m e2e.backends", description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="what e2e.backends.render wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/kvtier-backends/work"))  # noqa: S108  the script's own
    parser.add_argument("--only", nargs="*", help="titles of cases")
    parser.add_argument("--at-a-time", type=int, default=1, help="engines that start together")
    parser.add_argument("--second", choices=["all", "shared"], default="all", help="cases with a second engine")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything")
    parser.add_argument("--start-seconds", type=float, default=900, help="for one start")
    parser.add_argument("--redis", default="", help="command of a redis-server; none leaves the user's on port 6379")
    parser.add_argument("--lmcache-preload", default="", help="LD_PRELOAD of engines with LMCache")
    parser.add_argument("--logs", action="store_true", help="keep the ends of the engines' logs")
    parser.add_argument("--must-hit", action="store_true", help="exit with 1 unless each case hit, with equal tokens")
    options = parser.parse_args()
    document = json.loads(options.cases.read_text())
    cases = [case for case in document["cases"] if not options.only or case["title"] in options.only]
    model = Path(cases[0]["tier"]["spec"]["model"]["name"])
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(document["config"]))
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    clear(options.work, cases)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    run = BackendRun(options, document)
    for at in range(0, len(cases), options.at_a_time):
        if run.left() <= 0:
            run.say("no time left for the rest")
            break
        # A new one for each: cases have the same prompts, and some the same keys.
        with redis(run, options.redis):
            wave(run, cases[at : at + options.at_a_time], options.work)
    run.keep()
    for result in run.results:
        print(f"{result['title']}: {short(result)} {result.get('problem', '')}")
    left_out = {case["title"] for case in cases} - {result["title"] for result in run.results}
    wrong = [*problems(run.results), *(f"{title}: there was no time for it" for title in sorted(left_out))]
    if options.must_hit and wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
