# SPDX-License-Identifier: Apache-2.0
"""Keeps what vLLM compiles: one process writes it to the volume, and engines copy it to their own before they start.

What is compiled is code, and the volume is written to by every engine. So a cache is named by the digest of all its
files, which a person has put into the resource: what does not hash to it is not used, and costs a compilation. Stdlib
only, since the init container has nothing else. `write` runs an engine until it serves; `restore` runs in an init
container, and never keeps an engine from starting.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

DIRECTORIES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "torchinductor"}
"""What of the environment says where an engine keeps what it compiles, and how that is called here."""
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
_END_SECONDS = 60.0
_CHUNK = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Do as told; 0 when done, 1 when the engine did not serve or the volume does not take it."""
    options = _parser().parse_args(arguments)
    if options.verb == "restore":
        _say(restore(options.caches, options.digest, options.target))
        return 0
    try:
        done = write(options.caches, options.scratch, options.url, options.command, seconds=options.seconds)
    except (OSError, RuntimeError) as error:
        done = {"problem": str(error)}
    text = json.dumps(done)
    _say(text)
    if options.result:
        options.result.write_text(text)
    return 1 if "problem" in done else 0


def restore(caches: Path, digest: str, target: Path) -> str:
    """Copy a cache to where the engine looks for it, and say what came of it; a bad one is left alone.

    Args:
        caches: directory of all caches on the volume.
        digest: SHA-256 of the one that is trusted, see `digest_of`.
        target: below which ``vllm``, ``triton`` and ``torchinductor`` lie.
    """
    source, copy = caches / digest, target / f".compile-{uuid.uuid4().hex}"
    try:
        if not source.is_dir():
            return f"{source}: there is no such cache; the engine compiles anew"
        # What was copied is what is looked at: the volume may change in between.
        _copy(source, copy)
        found = digest_of(copy)
        if found != digest:
            return f"{source}: hashes to {found}, and is not used; the engine compiles anew"
        _copy(copy, target)
    except OSError as error:
        return f"{source}: cannot be used: {error}; the engine compiles anew"
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    return f"{source}: restored"


def write(caches: Path, scratch: Path, url: str, command: Sequence[str], *, seconds: float) -> dict[str, object]:
    """Run an engine until it serves, and put what it has compiled on the volume.

    Args:
        caches: directory of all caches on the volume.
        scratch: an own directory, where the engine compiles.
        url: what answers once the engine serves.
        command: of the engine.
        seconds: that it may take.

    Returns:
        The digest, how many files and bytes, and how long the engine took.

    Raises:
        RuntimeError: the engine ended, or did not serve in time, or compiled nothing.
        OSError: the volume does not take it.
    """
    variables = {name: str(scratch / each) for name, each in DIRECTORIES.items()}
    began = time.monotonic()
    with _running(command, {**os.environ, **variables}) as engine:
        while not _serves(url):
            if engine.poll() is not None:
                raise RuntimeError(f"the engine ended with {engine.returncode} before it served")
            if time.monotonic() - began > seconds:
                raise RuntimeError(f"the engine did not serve within {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        took = time.monotonic() - began
    files = list(_files(scratch))
    if not files:
        raise RuntimeError("the engine has compiled nothing: it runs eagerly, or keeps its cache elsewhere")
    digest = digest_of(scratch)
    size = sum((scratch / each).stat().st_size for each in files)
    _publish(scratch, caches, digest)
    return {"digest": digest, "files": len(files), "bytes": size, "seconds": round(took, 1)}


def digest_of(directory: Path) -> str:
    """Return the SHA-256 of all files there: their names, sizes and contents, in the order of their names."""
    total = hashlib.sha256()
    for name in _files(directory):
        content, size = hashlib.sha256(), 0
        with (directory / name).open("rb") as file:
            while piece := file.read(_CHUNK):
                content.update(piece)
                size += len(piece)
        total.update(f"{name}\0{size}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def _files(directory: Path) -> Iterator[str]:
    """Yield the regular files below, by their relative names; a link is none, for it may lead anywhere."""
    yield from sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file() and not path.is_symlink()
    )


def _copy(source: Path, target: Path) -> None:
    """Copy what `digest_of` looks at, and nothing else."""
    for name in _files(source):
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copied)


def _publish(scratch: Path, caches: Path, digest: str) -> None:
    if (caches / digest).is_dir():
        return
    caches.mkdir(parents=True, exist_ok=True)
    partial = caches / f".{digest}.{uuid.uuid4().hex}-partial"
    try:
        _copy(scratch, partial)
        partial.rename(caches / digest)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not (caches / digest).is_dir():  # another one was first
            raise


@contextlib.contextmanager
def _running(command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    # Of its own session, so that workers which outlive it end with it.
    engine = subprocess.Popen(list(command), env=environment, start_new_session=True)
    try:
        yield engine
    finally:
        engine.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS):  # noqa: S310 - the operator's own address
            return True
    except (urllib.error.URLError, OSError):
        return False


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m kvtier_connector.compile_cache")
    verbs = parser.add_subparsers(dest="verb", required=True)
    restoring = verbs.add_parser("restore", help="copy a cache to where the engine looks for it")
    restoring.add_argument("--digest", required=True, help="of the cache that is trusted")
    restoring.add_argument("--target", type=Path, required=True, help="directory of the engine's caches")
    writing = verbs.add_parser("write", help="run an engine until it serves, and keep what it has compiled")
    writing.add_argument("--scratch", type=Path, required=True, help="where the engine compiles")
    writing.add_argument("--url", required=True, help="what answers once it serves")
    writing.add_argument("--seconds", type=float, default=3600.0, help="that it may take")
    writing.add_argument("--result", type=Path, help="file for what came of it")
    writing.add_argument("command", nargs="+", help="of the engine, after --")
    for each in (restoring, writing):
        each.add_argument("--caches", type=Path, required=True, help="directory of all caches on the volume")
    return parser


if __name__ == "__main__":
    sys.exit(main())
