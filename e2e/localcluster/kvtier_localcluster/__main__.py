# SPDX-License-Identifier: Apache-2.0
"""`kvtier-localcluster up`: run a cluster until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shlex
import signal
import sys
from pathlib import Path

from kvtier_localcluster.cluster import ClusterSettings, LocalCluster
from kvtier_localcluster.errors import ClusterUnavailable

_DATA = Path(".kvtier/cluster")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="kvtier-localcluster", description="A Kubernetes cluster without containers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("up", help="run a cluster, and stop it with Ctrl-C")
    command.add_argument("--data", type=Path, default=_DATA, help=f"where volumes and logs go (default: {_DATA})")
    command.add_argument("--port", type=int, default=0, help="of the API server (default: a free one)")
    command.add_argument("--kubeconfig", type=Path, help="where to write it (default: into the data directory)")
    command.add_argument("--simulate", action="store_true", help="pods become Ready without any process")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    settings = ClusterSettings(data=given.data, port=given.port, kubeconfig=given.kubeconfig, simulate=given.simulate)
    try:
        asyncio.run(_serve(LocalCluster(settings)))
    except ClusterUnavailable as problem:
        print(f"kvtier-localcluster: {problem}", file=sys.stderr)
        return 1
    return 0


async def _serve(cluster: LocalCluster) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with cluster:
        print(f"The cluster is ready at {cluster.url}. Next, in another terminal:\n")
        print(f"    export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
        print("    kubectl get nodes,pods --all-namespaces\n")
        print("Ctrl-C stops the cluster and everything in it.", flush=True)
        await stopping.wait()
        print("stopping: pods end now, volumes stay", flush=True)


if __name__ == "__main__":
    sys.exit(main())
