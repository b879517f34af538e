# SPDX-License-Identifier: Apache-2.0
"""`kvtier-localcluster`: start and stop a cluster from the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvtier_localcluster.cluster import ClusterSettings, LocalCluster, is_running
from kvtier_localcluster.datadir import DataDirectory
from kvtier_localcluster.errors import ClusterUnavailable

_DATA = Path(".kvtier/cluster")
_START_SECONDS = 60
_STOP_SECONDS = 60
_POLL_SECONDS = 0.1
_NOT_RUNNING = 3


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(arguments)
    data = DataDirectory(options.data.resolve())
    try:
        return int(options.run(options, data))
    except ClusterUnavailable as problem:
        print(f"kvtier-localcluster: {problem}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier-localcluster", description="A Kubernetes cluster without containers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("up", _up, "start a cluster, and stop it with Ctrl-C"),
        ("down", _down, "stop the cluster that runs on a data directory"),
        ("status", _status, "say whether a cluster runs, and where"),
        ("env", _env, "print what points kubectl at the cluster, for `eval`"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument("--data", type=Path, default=_DATA, help=f"where volumes and logs go (default: {_DATA})")
        if name == "up":
            command.add_argument("--port", type=int, default=0, help="of the API server (default: a free one)")
            command.add_argument("--kubeconfig", type=Path, help="where to write it (default: into the data directory)")
            command.add_argument("--detach", action="store_true", help="return when the cluster is ready")
            command.add_argument("--simulate", action="store_true", help="pods become Ready without any process")
    return parser


def _up(options: argparse.Namespace, data: DataDirectory) -> int:
    if options.detach:
        return _up_detached(options, data)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    settings = ClusterSettings(
        data=data.root, port=options.port, kubeconfig=options.kubeconfig, simulate=options.simulate
    )
    asyncio.run(_serve(LocalCluster(settings)))
    return 0


async def _serve(cluster: LocalCluster) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with cluster:
        _print_next_steps(cluster.url, cluster.kubeconfig, "Ctrl-C stops the cluster and everything in it.")
        await stopping.wait()
        print("stopping: pods end now, volumes stay", flush=True)


def _up_detached(options: argparse.Namespace, data: DataDirectory) -> int:
    if is_running(data):
        message = f"a cluster is running on {data.root} already: stop it with `kvtier-localcluster down`"
        raise ClusterUnavailable(message)
    data.root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "kvtier_localcluster", "up", "--data", str(data.root), "--port", str(options.port)]
    command += ["--kubeconfig", str(options.kubeconfig.absolute())] if options.kubeconfig else []
    command += ["--simulate"] if options.simulate else []
    with data.output.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # found there as it was found here
        )
    deadline = time.monotonic() + _START_SECONDS
    while (running := _description(data)) is None or running["pid"] != process.pid:
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise ClusterUnavailable(f"the cluster did not start: {data.output.read_text().strip()[-1000:]}")
        time.sleep(_POLL_SECONDS)
    process.returncode = 0  # it outlives us: Popen would warn about a child without a wait
    _print_next_steps(str(running["url"]), Path(str(running["kubeconfig"])), "`kvtier-localcluster down` stops it.")
    return 0


def _down(_: argparse.Namespace, data: DataDirectory) -> int:
    running = _running(data)
    os.kill(int(str(running["pid"])), signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while is_running(data):
        if time.monotonic() > deadline:
            raise ClusterUnavailable(f"process {running['pid']} does not end: look into {data.output}")
        time.sleep(_POLL_SECONDS)
    print(f"stopped; volumes stay in {data.root / 'pvc'}")
    return 0


def _status(_: argparse.Namespace, data: DataDirectory) -> int:
    running = _description(data)
    if running is None:
        print(f"no cluster runs on {data.root}")
        return _NOT_RUNNING
    print(f"running: process {running['pid']}, {running['url']}, kubeconfig {running['kubeconfig']}")
    return 0


def _env(_: argparse.Namespace, data: DataDirectory) -> int:
    print(f"export KUBECONFIG={shlex.quote(str(_running(data)['kubeconfig']))}")
    return 0


def _running(data: DataDirectory) -> dict[str, object]:
    found = _description(data)
    if found is None:
        raise ClusterUnavailable(f"no cluster runs on {data.root}: start one with `kvtier-localcluster up`")
    return found


def _description(data: DataDirectory) -> dict[str, object] | None:
    """Return where the cluster is, if one is running and ready."""
    if not is_running(data):
        return None
    try:
        found: dict[str, object] = json.loads(data.description.read_text())
    except (OSError, ValueError):
        return None  # it is starting
    return found


def _print_next_steps(url: str, kubeconfig: Path, how_to_stop: str) -> None:
    print(f"The cluster is ready at {url}. Next, in another terminal:\n")
    print(f"    export KUBECONFIG={shlex.quote(str(kubeconfig))}")
    print("    kubectl get nodes,pods --all-namespaces\n")
    print(how_to_stop, flush=True)


if __name__ == "__main__":
    sys.exit(main())
