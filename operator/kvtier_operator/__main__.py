# SPDX-License-Identifier: Apache-2.0
"""The command ``kvtier``: run the operator, render or plan a tier offline, check a volume, tell the version."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace

import yaml

from kvtier_operator import __version__, manifests, names, offline, plan_command
from kvtier_operator import settings as settings_module
from kvtier_operator.errors import OperatorError
from kvtier_operator.plan import make_unchecked_plan
from kvtier_operator.settings import Settings
from kvtier_operator.spec import parse

CHECKER = "kvtier_connector.store.check"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 refused or failed, 2 misused."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "check":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        settings = settings_module.parse(os.environ)
        if options.command == "run":
            return _run(settings, options)
        if options.command == "render":
            return _render(settings, options)
        if options.command == "plan":
            return plan_command.run(settings, options)
        if options.command == "check":
            return _check(rest)
    except (OperatorError, OSError) as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
    print(__version__)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description="Keep the KV cache of vLLM alive on a shared volume.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the operator until it is told to stop")
    scope = run.add_mutually_exclusive_group()
    scope.add_argument("-n", "--namespace", action="append", default=[], help="serve this namespace (may be repeated)")
    scope.add_argument("-A", "--all-namespaces", action="store_true", help="serve every namespace (the default)")
    run.add_argument(
        "--liveness", metavar="URL", help="answer the kubelet at http://ADDRESS:PORT, /healthz and /readyz"
    )
    run.add_argument("--leader-elect", action="store_true", help="wait for the Lease, so that several may run")
    run.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics there")
    run.add_argument("--webhook-cert", metavar="FILE", help="certificate of the admission webhook; none serves none")
    run.add_argument("--webhook-key", metavar="FILE", help="key of that certificate")
    run.add_argument("--webhook-port", type=int, metavar="PORT", help="where the webhook listens (9443)")
    run.add_argument("--log-format", choices=("plain", "full", "json"), default="full")
    run.add_argument("-v", "--verbose", action="store_true", help="log what kopf sees, too")
    render = commands.add_parser("render", help="print the objects of a tier, without a cluster")
    render.add_argument("file", help="YAML file with KVCacheTier resources, or - for standard input")
    render.add_argument("--nodes", metavar="FILE", help="nodes and pods, where spec.cpu.fraction is a share of them")
    plan_command.add_arguments(commands.add_parser("plan", help="say what a tier takes and holds, or an edit costs"))
    # What follows is read by the checker itself, --help included.
    commands.add_parser("check", help="check the block files under a directory", add_help=False)
    commands.add_parser("version", help="print the version")
    return parser


def _run(settings: Settings, options: argparse.Namespace) -> int:
    # kopf and the client take a second to import, which no other command needs.
    from kvtier_operator.process import run  # noqa: PLC0415  takes a second

    settings = replace(
        settings,
        namespaces=() if options.all_namespaces else tuple(options.namespace) or settings.namespaces,
        liveness_endpoint=options.liveness or settings.liveness_endpoint,
        metrics_port=settings.metrics_port if options.metrics_port is None else options.metrics_port,
        leader_elect=options.leader_elect or settings.leader_elect,
        webhook_cert=options.webhook_cert or settings.webhook_cert,
        webhook_key=options.webhook_key or settings.webhook_key,
        webhook_port=settings.webhook_port if options.webhook_port is None else options.webhook_port,
    )
    return run(settings, log_format=options.log_format, is_verbose=options.verbose)


def _render(settings: Settings, options: argparse.Namespace) -> int:
    found = plan_command.read_nodes(options.nodes)
    rendered: list[names.Manifest] = []
    for body in offline.read_tiers(options.file):
        tier = names.tier_ref(body)
        snapshot = plan_command.make_snapshot(tier, found)
        plan = make_unchecked_plan(
            parse(body),
            tier,
            connector_image=settings.connector_image,
            janitor_image=settings.janitor_image,
            snapshot=snapshot,
        )
        rendered += manifests.render(plan)
    sys.stdout.write(to_yaml(rendered))
    return 0


def to_yaml(rendered: Sequence[names.Manifest]) -> str:
    """Write objects as people do: whole, in kubectl's order, texts of several lines as blocks."""
    return yaml.dump_all(rendered, Dumper=_Dumper, sort_keys=False, width=10_000, explicit_start=True)


class _Dumper(yaml.SafeDumper):
    """A dumper of its own, so that nobody else's output changes."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  the library's signature
        """Write what occurs twice, twice."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _check(rest: Sequence[str]) -> int:
    # By name and not by import: the operator's image does not hold what reads block files.
    sys.argv = ["kvtier check", *rest]
    try:
        runpy.run_module(CHECKER, run_name="__main__")
    except ImportError as error:
        print(f"kvtier: cannot check block files here: {error}; pip install 'kvtier[connector]'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
