# SPDX-License-Identifier: Apache-2.0
"""A shell in which pages and scripts are run as they stand, with an embedded cluster behind it.

kubectl, helm, kvtier, the chart, the operator, the janitor and the store are real. vLLM is a light engine, and docker,
kind and pip are stood in for by programs that note what they were told.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import ci_tools
import light_cluster
from waiting import until

from kvtier_localcluster.cluster import ClusterSettings, ClusterThread, default_images
from kvtier_localcluster.node.environment import ImageProfile
from kvtier_localcluster.node.services import NodeSettings

ROOT = Path(__file__).resolve().parents[2]
NOTE = '#!/bin/sh\nfor word in "$(basename "$0")" "$@"; do printf "%s\\t" "$word"; done >>"$NOTES"\necho >>"$NOTES"\n'
"""A program that notes what it was told to do, and does nothing."""
HELM = """#!/bin/sh
# One machine stands for all nodes, and the operator's metrics would take the port of their own Service.
case "$1" in install|upgrade) set -- "$@" --set metrics.enabled=false;; esac
exec {helm} "$@"
"""
MAKE = '#!/bin/sh\nexec {make} --dry-run "$@" >/dev/null\n'
"""What the targets do is tried where they belong: tests/demo, and the embedded cluster's own tests."""
_FENCE = re.compile(r"^ *```([a-z]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^#+ (.*)$|((?:^ {4,}\S.*\n)+)", re.MULTILINE)
_TOOL = r"kvtier|kubectl|helm|make|docker|kind|export|bash"
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ +)*(?:{_TOOL})\s")


class Command(NamedTuple):
    """A command of a page, with the lines that the page shows below it."""

    section: str
    text: str
    shown: tuple[str, ...]


def commands(page: Path) -> Iterator[Command]:
    section = ""
    for title, block in _BLOCK.findall(_FENCE.sub("", page.read_text())):
        section = title or section
        lines = [line.strip() for line in re.sub(r"\\\n\s*", "", block).splitlines()]
        starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
        for at, end in pairwise([*starts, len(lines)]):
            yield Command(section, lines[at][2:], tuple(lines[at + 1 : end]))
        if not starts:
            yield from (Command(section, line, ()) for line in lines if _COMMAND.match(line))


def tiers(page: Path) -> str:
    """Return the tiers that a page shows as YAML, as one file."""
    found = [text for language, text in _FENCE.findall(page.read_text()) if language == "yaml"]
    return "---\n".join(text for text in found if "kind: KVCacheTier" in text)


def matches(shown: tuple[str, ...], printed: str) -> bool:
    """Tell whether what was printed is what is shown: `…` is any text, alone any lines, and numbers may differ."""
    lines = [r"(?:.*\n)*?" if line == "…" else _pattern(line) + r"\s*\n" for line in shown]
    return re.fullmatch("".join(lines), printed.rstrip("\n") + "\n") is not None


def _pattern(line: str) -> str:
    words = [re.sub(r"\d[\d.,]*", "0", re.escape(word).replace("…", ".*")) for word in line.split()]
    return r"\s*" + r"\s+".join(words).replace("0", r"[\d.,]+")


@dataclass(frozen=True)
class Shell:
    """A shell, and the notes of what its stand-ins were told."""

    environment: dict[str, str]
    folder: Path
    kubeconfig: Path

    def run(self, command: str, *, seconds: float = 280) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def see(self, command: Command, *, seconds: float = 120) -> str:
        """Run a command until it prints what the page shows; return what differs, empty if nothing does."""
        printed = ""

        def is_as_shown() -> bool:
            nonlocal printed
            done = self.run(command.text)
            printed = done.stdout + done.stderr
            return done.returncode == 0 and (not command.shown or matches(command.shown, done.stdout))

        may_repeat = any(f" {verb} " in command.text for verb in ("get", "status", "inspect"))
        try:
            until(is_as_shown, seconds=seconds if may_repeat else 0, pause_seconds=1)
        except AssertionError:
            return f"$ {command.text}\n{printed}"
        return ""

    def told(self, *program: str) -> list[list[str]]:
        """Return the words of each command of a stand-in that begins like this."""
        lines = [line.strip("\t").split("\t") for line in Path(self.environment["NOTES"]).read_text().splitlines()]
        return [words[len(program) :] for words in lines if words[: len(program)] == list(program)]


@contextmanager
def running(folder: Path, images: Mapping[str, str]) -> Iterator[Shell]:
    """Run an embedded cluster that knows images of ours under these names.

    Args:
        folder: an empty folder.
        images: the prefix of an image, and which of ours it is: operator, connector or janitor.
    """
    programs = folder / "bin"
    programs.mkdir()
    tools = {name: str(ci_tools.load("helm").binary(name)) for name in ("kubectl", "helm")}
    make = subprocess.run(["which", "make"], capture_output=True, text=True, check=True).stdout.strip()
    scripts = {**dict.fromkeys(("docker", "kind"), NOTE), "helm": HELM.format(**tools), "make": MAKE.format(make=make)}
    for name, text in scripts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "kubectl").symlink_to(tools["kubectl"])
    ours = {each.prefix: each for each in default_images()}["ghcr.io/kvtier/operator:"]
    installer = light_cluster.make_image(folder / "image")
    profiles = {
        "operator": ImageProfile(prefix="", environment=ours.environment, entrypoint=ours.entrypoint),
        "connector": ImageProfile(prefix="", environment={"PYTHONPATH": str(installer)}),
        "janitor": ImageProfile(prefix="", environment=ours.environment),
    }
    known = [replace(profiles[kind], prefix=prefix) for prefix, kind in images.items()]
    settings = ClusterSettings(
        data=folder / "cluster",
        node=NodeSettings(images=[*known, *default_images()], stop_grace_seconds=2),
        allocatable={"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"},
    )
    checkout = folder / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        (checkout / path.name).symlink_to(path)
    with ClusterThread(settings) as cluster:
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "KUBECONFIG": str(cluster.kubeconfig),
            "HOME": str(folder),
            "NOTES": str(folder / "notes"),
        }
        (folder / "notes").touch()
        yield Shell(environment, checkout, cluster.kubeconfig)
