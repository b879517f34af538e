# SPDX-License-Identifier: Apache-2.0
"""The verb ``bench``: one workload against several targets, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from kvtier_cli import client as targets
from kvtier_cli import output as answers
from kvtier_cli.bench import client, endpoints, picture, results, trace, workloads
from kvtier_cli.bench.client import LOWEST_TOKEN
from kvtier_cli.bench.endpoints import Target
from kvtier_cli.bench.results import Pass
from kvtier_cli.bench.workloads import Request, Sizes
from kvtier_cli.output import FINE, FOUND, INTERRUPTED
from kvtier_operator.errors import OperatorError

WORKLOADS: Final = ("single", "turns", "shared", "never")
_COMPARED: Final = 2


@dataclass(kw_only=True)
class Run:
    """What is asked, and what came of it so far."""

    plan: list[tuple[str, list[Request]]]
    """Passes by name."""
    concurrency: int
    between: str
    done: list[Pass] = field(default_factory=list)


@click.command
@click.argument("targets_", metavar="TARGET...", nargs=-1, required=True)
@click.option(
    "-w", "--workload", default="single", show_default=True, help=f"{', '.join(WORKLOADS)}, or a trace of Mooncake's"
)
@click.option("--model", default="", help="name of the model  [default: the first that a target serves]")
@click.option("--requests", type=click.IntRange(1), help="prompts; of a trace, its first ones")
@click.option("--tokens", type=click.IntRange(16), default=2048, show_default=True, help="of a prompt")
@click.option("--output-tokens", type=click.IntRange(1), default=32, show_default=True, help="of an answer, at most")
@click.option("--turns", type=click.IntRange(1), default=4, show_default=True, help="of a conversation")
@click.option("--concurrency", type=click.IntRange(1), help="requests at once  [default: 1 for single, else 8]")
@click.option("--passes", type=click.IntRange(1), help="over the same prompts  [default: 2 for single, else 1]")
@click.option("--between", default="", metavar="COMMAND", help="shell command before each pass but the first")
@click.option("--speed", type=click.FloatRange(0), default=1.0, show_default=True, help="of a trace; 0 does not wait")
@click.option("--seed", type=int, default=0, show_default=True, help="another one makes other prompts")
@click.option(
    "--vocabulary",
    type=click.IntRange(LOWEST_TOKEN + 10),
    default=2000,
    show_default=True,
    help="prompts are made of tokens below this number",
)
@click.option("--metrics", "pages", multiple=True, metavar="NAME=URL", help="where a target's metrics are")
@click.option("--no-metrics", is_flag=True, help="do without shares of hits")
@click.option("--plain", is_flag=True, help="send nothing that only vLLM knows")
@click.option("--key-variable", default="VLLM_API_KEY", show_default=True, help="variable with the endpoints' key")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="directory for table, picture and JSON")
@answers.output_option()
@targets.cluster_options
def bench(targets_: tuple[str, ...], *, workload: str, out: Path | None, output: str, **options: Any) -> int:
    """Send the same prompts to each TARGET, and compare times, hits and answers.

    A TARGET is the name of a tier, an address such as http://llama-engine:8000, or NAME=ADDRESS. Prompts are random
    tokens, the same in each run with the same --seed: a second run finds the blocks of the first, and --seed 1 does
    not. Exit code 1: a request or a whole pass failed, or two targets gave different answers.
    """
    where = targets.Where(**{name: options.pop(name) for name in ("namespace", "context", "kubeconfig")})
    plan = _plan(workload, options)
    run = Run(
        plan=plan,
        concurrency=options["concurrency"] or (1 if workload == "single" else 8),
        between=options["between"],
    )
    about = {
        "workload": workload,
        "seed": options["seed"],
        "requests": len(plan[0][1]),
        "concurrency": run.concurrency,
        "targets": list(targets_),
    }
    ask = {
        "model": options["model"],
        "key": os.environ.get(options["key_variable"], ""),
        "is_plain": options["plain"],
        "vocabulary": options["vocabulary"],
        "seed": options["seed"],
    }
    pages = dict(_page(each) for each in options["pages"])
    is_interrupted = False
    with contextlib.ExitStack() as stack:
        # All of them first: who is not there is told before the first one has worked for an hour.
        opened = [
            stack.enter_context(
                endpoints.opened(each, where, wants_metrics=not options["no_metrics"], metrics=pages, **ask)
            )
            for each in targets_
        ]
        _refuse_too_long(opened, plan)
        try:
            _play_all(opened, run)
        except KeyboardInterrupt:
            is_interrupted = True
    found = results.document(run.done, **about)
    if out is not None:
        _write(found, run.done, out)
    answers.show(found, output, lambda: results.page(found))
    if is_interrupted:
        return INTERRUPTED
    has_failed = any(each["failed"] or each["problem"] for each in found["passes"])
    is_good = not found["answers"]["different"] and not has_failed
    return FINE if is_good else FOUND


def _page(word: str) -> tuple[str, str]:
    name, _, url = word.partition("=")
    if "://" not in url:
        raise click.UsageError(f"--metrics {word}: must be NAME=URL, with the name of a target")
    return name, url


def _plan(workload: str, options: Mapping[str, Any]) -> list[tuple[str, list[Request]]]:
    """Return the passes."""
    requests, tokens, output = options["requests"], options["tokens"], options["output_tokens"]
    passes = options["passes"] or (_COMPARED if workload == "single" else 1)
    prelude: list[tuple[str, list[Request]]] = []
    if workload not in WORKLOADS:
        file = Path(workload)
        if not file.is_file():
            raise click.UsageError(f"--workload {workload}: must be {', '.join(WORKLOADS)}, or a file with a trace")
        try:
            played = trace.read(file, limit=requests, speed=options["speed"], most_output=output)
        except (trace.TraceInvalid, OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--workload: {error}") from error
        name = "trace"
    else:
        name = workload
        count = requests or {"single": 3, "turns": 8, "shared": 16, "never": 16}[workload]
        sizes = Sizes(
            turns=options["turns"],
            first_tokens=tokens,
            turn_output=output,
            sharers=count,
            shared_tokens=tokens,
            shared_output=output,
            single_tokens=(tokens,),
            single_repetitions=count,
            single_output=output,
            never_prompts=count,
            never_tokens=tokens,
            never_output=output,
        )
        played = {
            "single": lambda: workloads.singles(sizes),
            "turns": lambda: workloads.conversations(sizes, count),
            "shared": lambda: workloads.sharers(sizes),
            "never": lambda: workloads.never(sizes, 0),
        }[workload]()
        prelude = [("prefix", workloads.shared_prefix(sizes))] if workload == "shared" else []
    again = [f"{name} {number}" if number > _COMPARED else f"{name} again" for number in range(2, passes + 1)]
    return [*prelude, *((each, played) for each in (name if passes == 1 else f"{name} first", *again))]


def _refuse_too_long(opened: list[Target], plan: list[tuple[str, list[Request]]]) -> None:
    longest = max(
        sum(tokens for _, tokens in each["parts"]) + each["output_tokens"] for _, requests in plan for each in requests
    )
    for target in opened:
        if target.longest is not None and longest > target.longest:
            raise click.UsageError(
                f"{target.name}: takes {target.longest} tokens of prompt and answer, and the longest request has "
                f"{longest}: lower --tokens, --turns or --output-tokens; a trace may be cut with --requests"
            )


def _play_all(opened: list[Target], run: Run) -> None:
    total = len(opened) * sum(len(requests) for _, requests in run.plan)
    with answers.progress("request") as tell:

        def told() -> None:
            count = sum(len(done.samples) for done in run.done)
            tell(count / total, count, 0)

        for target in opened:
            reached = target
            for number, (name, requests) in enumerate(run.plan):
                each = Pass(target=target.name, name=name, wanted=len(requests))
                run.done.append(each)
                try:
                    if number and run.between:
                        _between(run.between, reached)
                        reached = reached if reached.anew is None else reached.anew()
                    each.before = reached.counts()
                except (click.ClickException, OperatorError, OSError) as error:
                    # What was measured before may have taken hours, and the next pass may find it well again.
                    each.problem = error.message if isinstance(error, click.ClickException) else str(error)
                    continue
                with _noted(each, reached):
                    playing = client.play(
                        reached.endpoint, requests, at_a_time=run.concurrency, samples=each.samples, tell=told
                    )
                    each.seconds = asyncio.run(playing)


@contextlib.contextmanager
def _noted(each: Pass, target: Target) -> Iterator[None]:
    """Count what the engines count meanwhile, and keep what there is if it is interrupted."""
    try:
        yield
    finally:
        each.samples.sort(key=lambda sample: sample.number)
        each.seconds = each.seconds or max((sample.started + sample.took for sample in each.samples), default=0.0)
        with contextlib.suppress(OperatorError, OSError):
            each.after = target.counts()


def _between(command: str, target: Target) -> None:
    environment = {**os.environ, "KVTIER_BENCH_TARGET": target.name, "KVTIER_BENCH_URL": target.endpoint.url}
    done = subprocess.run(command, shell=True, check=False, env=environment)  # noqa: S602  the person's own command
    if done.returncode:
        raise click.ClickException(f"--between: the command ended with {done.returncode}")


def _write(found: results.Document, passes: list[Pass], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(found, indent=2) + "\n")
    (out / "bench.txt").write_text(results.page(found))
    with (out / "requests.jsonl").open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in results.lines(passes))
    try:
        picture.draw(found, out / "bench.png")
    except picture.NoMatplotlib:
        click.echo("no picture: pip install matplotlib draws one", err=True)
