# SPDX-License-Identifier: Apache-2.0
"""The verb ``warm``: sends the prompts of a file to the engines, which store their KV blocks.

Each prompt is sent with one token of answer. The text of a prompt is never printed or logged.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import urllib3

from kvtier_cli import client, output
from kvtier_cli.output import FINE, FOUND, counted
from kvtier_connector.store.scan import Tell
from kvtier_operator import names
from kvtier_operator.api.routing_spec import ROUTER
from kvtier_operator.errors import OperatorError

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
_ABOUT_ANSWERS: Final = frozenset(
    {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "n", "best_of", "echo"}
    | {"logprobs", "top_logprobs", "prompt_logprobs", "response_format", "structured_outputs", "temperature", "seed"}
)
"""Fields that do not change the blocks of a prompt, and may prevent an answer of one token."""
_ANSWER_SECONDS: Final = 900.0
_TRIES: Final = 4
"""Attempts of a request that meets a busy engine or a broken connection."""
RETRY_SECONDS: Final = 2.0
_NOT_FINE: Final = 300
"""HTTP statuses from here on are no success."""
_BUSY: Final = frozenset({429, 502, 503, 504})
_LOCKED: Final = frozenset({401, 403})
_FORWARDING: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request."""

    line: int
    """Line in the file, from 1."""
    path: str
    body: Mapping[str, Any]


@click.command(
    epilog=output.examples("kvtier warm llama prompts.jsonl", "kvtier warm http://llama-engine:8000 prompts.jsonl.gz")
)
@click.argument("target", shell_complete=client.complete_tier)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="prompts at once")
@click.option(
    "--times", type=click.IntRange(1, 100), help="requests a prompt  [default: disk.admission.minReuse of the tier]"
)
@click.option("--model", default="", help="model of prompts that name none  [default: the first that is served]")
@click.option("--key-variable", default="VLLM_API_KEY", show_default=True, help="environment variable with the API key")
@output.output_option()
@client.cluster_options
def warm(  # noqa: PLR0913 - options
    target: str,
    file: Path,
    *,
    concurrency: int,
    times: int | None,
    model: str,
    key_variable: str,
    output_format: str,
    where: client.Where,
) -> int:
    """Send the prompts of FILE to TARGET: the name of a tier, or the address of its Service (http://HOST:PORT).

    FILE is an OpenAI batch file, or has one {"messages": [...]}, {"prompt": "..."} or quoted text a line; .gz is
    unpacked. Every line is checked before the first is sent. Exit code 1: an engine did not take a prompt.
    """
    count = sum(1 for _ in read(file))
    if not count:
        raise click.UsageError(f"{file}: holds no prompt")
    with contextlib.ExitStack() as stack:
        url = target.rstrip("/").removesuffix("/v1")
        if "://" not in target:
            url, least = stack.enter_context(_forwarded(target, where))
            times = times or least
        engine = Endpoint(url, key=os.environ.get(key_variable, ""))
        model = model or (engine.request("/v1/models", None).get("data") or [{}])[0].get("id", "")
        tell = stack.enter_context(output.progress("prompt"))
        document = send(
            read(file), engine, model=model, times=times or 1, count=count, concurrency=concurrency, tell=tell
        )
    output.show(document, output_format, lambda: _page(document))
    return FOUND if document["failed"] else FINE


def _page(document: Mapping[str, Any]) -> str:
    text = f"{document['answered']} of {counted(document['prompts'], 'prompt')}, {document['promptTokens']:,} tokens"
    if document["failed"]:
        text += f"\nfirst problem: {document['problem']}; run it again: stored blocks are not computed again"
    return f"{text}\n"


def read(file: Path) -> Iterator[Prompt]:
    """Yield the prompts of a file; raise UsageError as `lines` and `parse` do."""
    return (parse(file, number, line) for number, line in lines(file))


def lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, with their numbers; what ends in .gz is unpacked.

    Raises:
        UsageError: it is no text, or no whole file of gzip.
    """
    number = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else click.open_file(file, "rb") as found:
            for number, line in enumerate(found, 1):
                if line.strip():
                    yield number, line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file}: line {number}: must be text in UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        problem = "not compressed with gzip; rename it" if "Not a gzipped" in str(error) else "damaged; copy it again"
        raise click.UsageError(f"{file}: is {problem}") from error


def parse(file: Path, number: int, line: str) -> Prompt:
    """Return the prompt of a line; raise UsageError for any other, with the line's number and never its text."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        # The library's own message repeats the text.
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise click.UsageError(f"{file}: line {number}: is no JSON{place}; write one JSON value a line") from None
    if isinstance(found, str):
        found = {"prompt": found}
    if isinstance(found, dict) and "body" in found:
        found = found["body"] if isinstance(found["body"], dict) else {}
    problem = ""
    if not isinstance(found, dict):
        problem = 'must be an object with "messages" or "prompt", or a quoted text'
    elif ("messages" in found) == ("prompt" in found):
        problem = 'must have one of "messages" and "prompt"'
    elif "messages" in found and not (found["messages"] and isinstance(found["messages"], list)):
        problem = "messages must be a list of one message or more"
    elif "prompt" in found and not (found["prompt"] and isinstance(found["prompt"], str | list)):
        problem = "prompt must be a text or a list of tokens, and not empty"
    if problem:
        raise click.UsageError(f"{file}: line {number}: {problem}")
    body = {name: value for name, value in found.items() if name not in _ABOUT_ANSWERS}
    path = CHAT if "messages" in found else TEXT
    return Prompt(line=number, path=path, body={**body, "max_tokens": 1, "temperature": 0})


def send(  # noqa: PLR0913 - keywords
    prompts: Iterable[Prompt], engine: Endpoint, *, model: str, times: int, count: int, concurrency: int, tell: Tell
) -> dict[str, Any]:
    """Send `count` prompts, each `times` times over one connection, and return the totals.

    Prompts are read as they are sent, so that few are in memory.
    """
    result: dict[str, Any] = {"prompts": count, "answered": 0, "failed": 0, "promptTokens": 0, "problem": ""}
    lock, slots = threading.Lock(), threading.Semaphore(concurrency)

    def one(prompt: Prompt) -> None:
        tokens, problem = 0, ""
        try:
            answer = engine.request(prompt.path, {"model": model, **prompt.body}, times=times)
            tokens = (answer.get("usage") or {}).get("prompt_tokens", 0)
        except click.ClickException as error:
            problem = f"line {prompt.line}: {error.message}"
        finally:
            slots.release()
        with lock:
            result["failed" if problem else "answered"] += 1
            result["promptTokens"] += tokens
            result["problem"] = result["problem"] or problem
            done = result["answered"] + result["failed"]
            tell(done / count, done, 0)

    with ThreadPoolExecutor(concurrency, thread_name_prefix="warm") as pool:
        for prompt in prompts:
            slots.acquire()
            pool.submit(one, prompt)
    return result


class Endpoint:
    """An OpenAI endpoint. Any thread may call it."""

    def __init__(self, url: str, *, key: str = "") -> None:
        """Store the address, without ``/v1``, and the API key."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise click.UsageError(f"{url}: must be http://HOST:PORT or the name of a tier")
        self._url, self._path = url, parts.path
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def request(self, path: str, body: Mapping[str, Any] | None, *, times: int = 1) -> dict[str, Any]:
        """Return the answer to a request, which is sent `times` times over one connection.

        Raises:
            ClickException: no engine takes it; the message never repeats the prompt.
        """
        method, status = "GET" if body is None else "POST", 0
        retries = urllib3.Retry(
            _TRIES - 1,
            status_forcelist=_BUSY,
            allowed_methods=None,
            backoff_factor=RETRY_SECONDS,
            raise_on_status=False,
            respect_retry_after_header=False,
        )
        try:
            with urllib3.connection_from_url(self._url, retries=retries, timeout=_ANSWER_SECONDS) as pool:
                for _ in range(times):
                    answer = pool.request(method, self._path + path, json=body, headers=self._headers)
                    status, problem = answer.status, f"{path} answers {answer.status} {answer.reason}"
                    if status >= _NOT_FINE:
                        break
                else:
                    found = answer.json()
                    return found if isinstance(found, dict) else {}
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:
            why = type(getattr(error, "reason", None) or error).__name__
            problem = f"no engine answers at {self._url} ({why})"
        hint = ": set the variable of --key-variable to the API key" if status in _LOCKED else ""
        raise click.ClickException(f"{problem}{hint}")


@contextlib.contextmanager
def _forwarded(tier: str, where: client.Where) -> Iterator[tuple[str, int]]:
    """Forward a port to the tier's Service; yield the local address and the tier's ``minReuse``."""
    namespace = where.asked_namespace
    try:
        body = where.client.tier(namespace, tier)
    except OperatorError as error:
        raise click.UsageError(f"{tier}: {error}; or name the Service's address, http://…") from error
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise click.UsageError(f"{tier}: needs kubectl to forward a port: install it, or name the Service's address")
    spec, ref = body["spec"], names.tier_ref(body)
    service = names.router(ref) if (spec.get("routing") or {}).get("type") == ROUTER else names.engine(ref)
    command = [kubectl, "port-forward", f"--namespace={namespace}", f"service/{service}", f":{names.HTTP_PORT}"]
    command += [f"--context={where.context}"] if where.context else []
    command += [f"--kubeconfig={where.kubeconfig}"] if where.kubeconfig else []
    least = ((spec.get("disk") or {}).get("admission") or {}).get("minReuse", 1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if match := _FORWARDING.search(line):
                    # kubectl prints a line for each connection and blocks once the pipe is full.
                    threading.Thread(target=collections.deque, args=(process.stdout, 0), daemon=True).start()
                    yield f"http://127.0.0.1:{match[1]}", least
                    return
            raise click.UsageError(
                f"{tier}: no port can be forwarded to service/{service}: {said.strip()}; kvtier status {tier} says more"
            )
        finally:
            process.terminate()
