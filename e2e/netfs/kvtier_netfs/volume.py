# SPDX-License-Identifier: Apache-2.0
"""A file system that two nodes share, the processes that serve it, and what is to be undone at its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

START_SECONDS = 30.0
"""A server or a mount that is not there after so long never will be."""
_END_SECONDS = 10.0
ADDRESS = "10.77.0.1"
"""Of the servers, in a network of their own that nothing can leave; some refuse 127.0.0.1."""
_NETWORK = f"ip link set lo up && ip address add {ADDRESS}/32 dev lo && exec sleep infinity"
_LISTENS = "0A"


class UnavailableError(Exception):
    """This machine cannot have the file system; the message says what is missing."""


class Servers:
    """The processes of one file system, by name. One thread."""

    def __init__(self, log_directory: Path) -> None:
        """Keep what they say in files of this directory."""
        self._log_directory = log_directory
        self._inside: list[str] = []
        self._commands: dict[str, Sequence[str]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def make_network(self) -> None:
        """Let what is added from now on have a network of its own, in which it finds `ADDRESS` and nothing else."""
        self.add("network", ["unshare", "--net", "sh", "-c", _NETWORK])
        holder = self._running["network"].pid
        wait_for(lambda: ADDRESS in _addresses(holder), "there is a network")
        self._inside = ["nsenter", f"--net=/proc/{holder}/ns/net"]

    def listens(self, port: int) -> bool:
        """Say whether a server of that network takes connections at the port."""
        sockets = Path(f"/proc/{self._running['network'].pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == _LISTENS for line in sockets)

    def run(self, *command: str) -> str:
        """Run a command in that network, as `run` does."""
        return run(*self._inside, *command)

    def add(self, name: str, command: Sequence[str]) -> None:
        """Start a process that stays in the foreground."""
        self._commands[name] = [*self._inside, *command]
        self.start(name)

    def start(self, name: str) -> None:
        """Start it again after `kill`."""
        with (self._log_directory / f"{name}.out").open("ab") as log:
            # Of its own session: an interrupted test still ends it in order.
            self._running[name] = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """End it as a crash does."""
        process = self._running.pop(name)
        process.kill()
        process.wait(_END_SECONDS)

    def pause(self, *names: str) -> None:
        """Stop answering, without closing a connection."""
        for name in names:
            self._running[name].send_signal(signal.SIGSTOP)

    def resume(self, *names: str) -> None:
        """Answer again."""
        for name in names:
            self._running[name].send_signal(signal.SIGCONT)

    def has_ended(self, name: str) -> bool:
        """Say whether it ended by itself."""
        return self._running[name].poll() is not None

    def stop(self, name: str) -> None:
        """End it in order, or after a while by force; one that does not run is fine."""
        process = self._running.pop(name, None)
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)

    def said(self, name: str) -> str:
        """Return the end of what it said."""
        return (self._log_directory / f"{name}.out").read_text(errors="replace")[-500:]


class SharedVolume(ABC):
    """One file system, mounted as by two nodes. Use it as a context; what it started ends with the context."""

    name: ClassVar[str]
    commands: ClassVar[dict[str, str]]
    """Programs that must be on PATH, and the Debian package of each."""
    serving: ClassVar[tuple[str, ...]]
    """The servers that hold files, by name."""
    disk_mib: int = 4096
    """Of each server's disk, an image that takes what is written to it."""

    def __init__(self, base: Path, *, options: str = "") -> None:
        """Store the settings.

        Args:
            base: An empty directory of its own, on a local disk.
            options: More options of the mounts, as after ``-o``.
        """
        self.base = base
        self.a, self.b = base / "a", base / "b"
        self.mounts = (self.a, self.b)
        self.options = options
        self.servers = Servers(base)
        self._undo = contextlib.ExitStack()

    @classmethod
    def why_not(cls) -> str:
        """Say what is missing here; empty if nothing is."""
        if os.geteuid() != 0:
            return "only root can mount here"
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            return "there is no /dev/fuse"
        commands = {"ip": "iproute2", "nsenter": "util-linux", **cls.commands}
        missing = sorted({package for command, package in commands.items() if shutil.which(command) is None})
        return f"install {', '.join(missing)}" if missing else ""

    def __enter__(self) -> Self:
        """Start and mount it; raise UnavailableError where that is not possible."""
        if reason := self.why_not():
            raise UnavailableError(reason)
        with self._undo as undo:
            for directory in (self.base, *self.mounts):
                directory.mkdir(parents=True, exist_ok=True)
            undo.callback(self.servers.stop, "network")
            self.servers.make_network()
            self._up()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Unmount it, end its servers and remove what they had."""
        self._undo.close()
        shutil.rmtree(self.base, ignore_errors=True)

    @abstractmethod
    def _up(self) -> None:
        """Start servers and mount; note how each step is undone."""

    def _image(self, name: str, *, mib: int, options: str = "") -> Path:
        """Mount an xfs of its own on a loop device."""
        image, directory = self.base / f"{name}.img", self.base / name
        directory.mkdir()
        with image.open("wb") as file:
            file.truncate(mib << 20)
        run("mkfs.xfs", "-q", "-f", str(image))
        run("mount", "-o", ",".join(part for part in ("loop", "noatime", options) if part), str(image), str(directory))
        self._undo.callback(unmount, directory)
        return directory

    def _serve(self, name: str, command: Sequence[str]) -> None:
        self.servers.add(name, command)
        self._undo.callback(self.servers.stop, name)

    def _mount(self, name: str, directory: Path, command: Sequence[str]) -> None:
        """Start a FUSE client, and wait until its mount is there."""
        self._serve(name, command)
        self._undo.callback(unmount, directory)
        wait_for(
            lambda: os.path.ismount(directory) or self.servers.has_ended(name),
            f"{directory} is mounted: {self.servers.said(name)}",
        )
        if not os.path.ismount(directory):
            raise UnavailableError(f"{name}: {self.servers.said(name)}")


def run(*command: str) -> str:
    """Run a command to its end; raise UnavailableError with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def unmount(directory: Path) -> None:
    """Unmount, also while files are open or the server is gone."""
    if subprocess.run(["umount", str(directory)], capture_output=True, check=False).returncode != 0:
        subprocess.run(["umount", "--lazy", str(directory)], capture_output=True, check=False)


def wait_for(condition: Callable[[], object], what: str, *, seconds: float = START_SECONDS) -> None:
    """Wait for a condition; raise UnavailableError when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise UnavailableError(f"after {seconds:g} s it is not so that {what}")
        time.sleep(0.05)


def _addresses(process: int) -> str:
    found = subprocess.run(
        ["nsenter", f"--net=/proc/{process}/ns/net", "ip", "-brief", "address"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout
