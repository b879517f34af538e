# SPDX-License-Identifier: Apache-2.0
"""Fills a tier before its users come: ``python3 -m kvtier_connector.janitor.warming``, in a pod with the volume.

Each prompt of a file is sent to the engines, with one token of answer. An engine names the blocks of the prompt in its
answer, and a prompt counts as warm when each of them lies on the volume, with the right header and length: nobody's
word is taken for it. What is there already costs the engine nothing, so it may be done again at any time.

Says lines of JSON, as the chores do. Nothing of a prompt or of an answer is ever written anywhere.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from kvtier_connector import contract
from kvtier_connector.contract import NAMES
from kvtier_connector.errors import ConfigInvalid, ConnectorError
from kvtier_connector.janitor import prompts
from kvtier_connector.janitor.chores import Lines
from kvtier_connector.janitor.prompts import Prompt
from kvtier_connector.store.format import HEADER_BYTES, Fault, decode_header, misplaced
from kvtier_connector.store.layout import find_home, home_of, parse_block_path

KEY_VARIABLE: Final = "VLLM_API_KEY"
_ANSWER_SECONDS: Final = 900.0
_FIRST_LOOK_SECONDS: Final = 0.05
_LONGEST_LOOK_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 2.0
_TRIES: Final = 5
"""Of a request that no engine takes at the moment."""
_BUSY: Final = frozenset({429, 502, 503, 504})
_LOCKED: Final = frozenset({401, 403})
_REMEDY: Final = (
    f"it asks for a key, and only one that is {KEY_VARIABLE} in spec.engine.env is known here; give it there, from a "
    "Secret, instead of by --api-key in spec.engine.args"
)

_REFUSALS: Final = {
    "tenant": "the engine keeps the prompt off the volume: it names no tenant as spec.disk.tenants asks for",
    "adapter": "the engine keeps the prompt off the volume: the files of its adapter cannot be told from others",
    "no_store": "the prompt says kvtier_store: false, so no block of it is written; leave that out",
    "weights": "the engine's weights were replaced, and it has no directory of these yet; send the prompt again",
}
"""By what an engine calls it."""


class _RefusedError(Exception):
    """An engine does not take a prompt; the message has nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How it is done."""

    url: str
    """Of the engines, without a path."""
    tier_dir: Path
    """Directory of the tier on the volume."""
    generation: str
    """Digest of the blocks that count: engines of another one may still answer while they are replaced."""
    offers: int = 1
    """How often an engine must see a prompt until it writes it."""
    model: str = ""
    """Named where a prompt names none; the first that the engines serve if empty."""
    key: str = field(default="", repr=False)
    concurrency: int = 4
    patience_seconds: float = 120.0
    """How long the volume may take to get the blocks of one prompt."""


@dataclass(kw_only=True)
class Result:
    """What came of it. One lock, the caller's."""

    prompts: int = 0
    warm: int = 0
    """Prompts whose every block is on the volume."""
    short: int = 0
    """Prompts without a whole block, which nobody can keep."""
    failed: int = 0
    """Prompts that no engine took."""
    blocks: int = 0
    """On the volume, each counted once."""
    bytes: int = 0
    missing: int = 0
    """Blocks that did not come."""
    problem: str = ""
    """The first, with the line of the file."""

    @property
    def is_whole(self) -> bool:
        """Whether all is there that can be."""
        return not (self.failed or self.missing)


def warm(
    wanted: Iterable[Prompt], settings: Settings, tell: Callable[[float, int, int], None], *, count: int
) -> Result:
    """Send so many prompts and wait for their blocks; `tell` hears how far it is.

    A prompt is taken when there is somebody to send it, so that few of them are in memory at a time.
    """
    result, lock, known = Result(prompts=count), threading.Lock(), set[str]()
    engine = _Engine(settings)

    def one(prompt: Prompt) -> None:
        try:
            found, missing = _send(prompt, settings, engine)
            problem = f"{len(missing)} blocks did not come to the volume within {settings.patience_seconds:.0f} s"
        except _RefusedError as error:
            found, missing, problem = None, [], str(error)
        with lock:
            if found is None:
                result.failed += 1
            else:
                fresh = {path: size for path, size in found.items() if path not in known}
                known.update(fresh)
                result.blocks += len(fresh)
                result.bytes += sum(fresh.values())
                result.missing += len(missing)
                result.short += not (found or missing)
                result.warm += bool(found) and not missing
            if (found is None or missing) and not result.problem:
                result.problem = f"line {prompt.line}: {problem}"
            done = result.warm + result.short + result.failed
            tell(done / max(1, count), result.blocks, result.bytes)

    with ThreadPoolExecutor(settings.concurrency, thread_name_prefix="kvtier-warm") as pool:
        under_way: set[Future[None]] = set()
        for prompt in wanted:
            if len(under_way) >= settings.concurrency:
                ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for each in ended:
                    each.result()
            under_way.add(pool.submit(one, prompt))
        for each in under_way:
            each.result()
    return result


def _send(prompt: Prompt, settings: Settings, engine: _Engine) -> tuple[dict[str, int], list[str]]:
    """Return the prompt's blocks that are on the volume, with their sizes, and those that are not."""
    named = engine.ask(prompt, times=settings.offers)
    root, paths = _directory(named, settings), list(named["blocks"])
    found: dict[str, int] = {}
    for _ in _looks(settings.patience_seconds):
        found |= {f"{root.name}/{path}": size for path in paths if (size := _size(root, path)) is not None}
        paths = [path for path in paths if f"{root.name}/{path}" not in found]
        if not paths:
            break
    return found, paths


def _looks(seconds: float) -> Iterator[None]:
    wait, end = _FIRST_LOOK_SECONDS, time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_LOOK_SECONDS)


def _directory(named: Mapping[str, Any], settings: Settings) -> Path:
    """Return where the engine keeps blocks: in this tier and generation, or it is another's engine."""
    root, tier_dir = Path(str(named["directory"])), settings.tier_dir
    home = find_home(root.name)
    if home is None or root.parent.name != tier_dir.name:
        raise _RefusedError(f"the engine keeps its blocks in {root}, which is not below {tier_dir}")
    if home.digest != settings.generation:
        raise _RefusedError(
            f"the engine keeps blocks of generation {home.digest}, and {settings.generation} is to be warm: send them "
            "again when all engines are replaced"
        )
    return tier_dir / root.name


def _size(root: Path, path: str) -> int | None:
    """Return the length of a block that is there as it should be, None for one that is not."""
    key, home = parse_block_path(path), find_home(root.name)
    if key is None or home is None:
        raise _RefusedError("the engine names a block as this release does not; use images of one release")
    try:
        with (root / path).open("rb", buffering=0) as file:
            header = decode_header(memoryview(file.read(HEADER_BYTES)))
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if isinstance(header, Fault) or misplaced(header, key, home) is not None:
        return None
    return size if size == HEADER_BYTES + header.payload_bytes else None


class _Engine:
    """The engines behind one address. Any thread."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.url.rstrip("/")
        parts = urllib.parse.urlsplit(self._url)
        self._host, self._port, self._base = parts.hostname or "", parts.port, parts.path
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        if settings.key:
            self._headers["Authorization"] = f"Bearer {settings.key}"
        self._model = settings.model
        self._lock = threading.Lock()

    def ask(self, prompt: Prompt, *, times: int) -> Mapping[str, Any]:
        """Send a prompt this often to one engine, for each counts what it is offered, and return its blocks' names."""
        body = {"model": self._served(), **prompt.body}
        answer = self._request(prompt.path, json.dumps(body).encode(), times=times)
        named = (answer.get("kv_transfer_params") or {}).get(NAMES)
        if not isinstance(named, dict) or not isinstance(named.get("blocks"), list) or "directory" not in named:
            raise _RefusedError(
                "the engine does not say which blocks a prompt has: its connector is of another release, or it serves "
                "without the volume (kvtier status)"
            )
        if named.get("refused"):
            raise _RefusedError(_REFUSALS.get(str(named["refused"]), "the engine keeps the prompt off the volume"))
        return named

    def _served(self) -> str:
        with self._lock:
            if not self._model:
                listed = self._request("/v1/models", None).get("data") or [{}]
                self._model = str(listed[0].get("id", ""))
            return self._model

    def _request(self, path: str, body: bytes | None, *, times: int = 1) -> dict[str, Any]:
        """Send a request over one connection, which leads to one engine whatever stands before it."""
        for attempt in range(1, _TRIES + 1):
            # No proxy: whatever there is, it is for what lies outside of the cluster.
            connection = self._connect(self._host, self._port, timeout=_ANSWER_SECONDS)
            try:
                for _ in range(times):
                    connection.request("GET" if body is None else "POST", self._base + path, body, self._headers)
                    with connection.getresponse() as answer:
                        text = answer.read()  # all of it, or the connection cannot be used again
                    if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                        break
                found = json.loads(text) if answer.status < HTTPStatus.MULTIPLE_CHOICES else None
            except (OSError, ValueError, http.client.HTTPException) as error:
                if attempt == _TRIES:
                    raise _RefusedError(f"no engine answers at {self._url}: {type(error).__name__}") from None
            else:
                if isinstance(found, dict):
                    return found
                if answer.status < HTTPStatus.MULTIPLE_CHOICES:
                    raise _RefusedError(f"the engine answers {path} with something else than an object")
                # What else it says may repeat the prompt.
                if answer.status not in _BUSY or attempt == _TRIES:
                    why = f"the engine answers {path} with {answer.status} {answer.reason}"
                    raise _RefusedError(f"{why}: {_REMEDY}" if answer.status in _LOCKED else why)
            finally:
                connection.close()
            time.sleep(_RETRY_SECONDS * attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")


def main(arguments: Sequence[str] | None = None) -> int:
    """Warm a tier; return 0 when all is on the volume, 1 when something is not, 2 for what is no list of prompts."""
    options = _parser().parse_args(arguments)
    said = Lines()
    try:
        config = contract.decode(options.config.read_text(encoding="utf-8"))
        # All are looked at before the first is sent: a line that is no prompt is told of now, and not after an hour.
        count = sum(1 for _ in prompts.read(options.prompts))
        settings = Settings(
            url=options.url,
            tier_dir=Path(config.root).parent,
            generation=options.generation or home_of(config.root).digest,
            offers=config.min_reuse,
            model=options.model,
            key=os.environ.get(KEY_VARIABLE, ""),
            concurrency=options.concurrency,
            patience_seconds=options.patience,
        )
        result = warm(prompts.read(options.prompts), settings, said.tell, count=count)
    except (ConnectorError, OSError) as error:
        document, status = {"problem": str(error)}, 2 if isinstance(error, ConfigInvalid) else 1
    else:
        document, status = asdict(result), 0 if result.is_whole else 1
    said.write({"status": status, "document": document})
    if options.result is not None:
        options.result.write_text(json.dumps(document))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m kvtier_connector.janitor.warming")
    parser.add_argument("--prompts", type=Path, required=True, help="one JSON value a line; .gz is unpacked")
    parser.add_argument("--url", required=True, help="of the engines, such as http://llama-engine:8000")
    parser.add_argument("--config", type=Path, required=True, help="the connector's document")
    parser.add_argument("--generation", default="", help="digest of the blocks that count (default: the document's)")
    parser.add_argument("--model", default="", help="name to ask for (default: the first that is served)")
    parser.add_argument("--concurrency", type=int, default=4, help="prompts under way at once (4)")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds that blocks may take to be written (120)"
    )
    parser.add_argument("--result", type=Path, help="also write the result to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
