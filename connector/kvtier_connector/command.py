# SPDX-License-Identifier: Apache-2.0
"""The command ``kvtier``: finds who has the subcommand, and imports nothing else.

A machine with the volume and without the operator's libraries looks after blocks; one with the operator and without
those of the connector runs it and renders tiers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

_COMMANDS = "kvtier_connector.janitor.commands"
_OPERATOR = "kvtier_operator.__main__"

STORAGE = {
    "check": ("kvtier_connector.store.check", "verify every block file under a directory"),
    "inspect": ("kvtier_connector.store.inspect", "show what lies on a volume"),
    "purge": (_COMMANDS, "remove blocks by age, generation, tenant or prefix, or all"),
    "pin": (_COMMANDS, "keep a prefix whatever the budget says"),
    "unpin": (_COMMANDS, "let it go again"),
    "gc": (_COMMANDS, "do now, and once, what the janitor does all the time"),
}
"""Commands on a volume: who has them, and what they do."""

CLUSTER = {
    "run": "run the operator until it is told to stop",
    "render": "print the objects of a tier, without a cluster",
    "plan": "say what a tier takes and holds, or an edit costs",
    "version": "print the version",
}
"""Commands about tiers, which the operator has, and what they do."""

_EXTRAS = {_COMMANDS: "janitor", _OPERATOR: "operator"}
_USAGE = "usage: kvtier COMMAND [-h] ...\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    if name in {"-h", "--help", "help"}:
        sys.stdout.write(_help())
        return 0
    if name not in STORAGE and name not in CLUSTER:
        known = ", ".join((*CLUSTER, *STORAGE))
        sys.stderr.write(f"{_USAGE}kvtier: {name or 'a command'} is " + ("unknown" if name else "missing"))
        sys.stderr.write(f"; there are {known}\n")
        return 2
    module_name, _ = STORAGE.get(name, (_OPERATOR, ""))
    extra = _EXTRAS.get(module_name, "connector")
    module = _load(module_name, name, extra)
    if module is None:
        return 1
    status: int = module.main(words[1:] if module_name.startswith("kvtier_connector.store") else words)
    return status


def _help() -> str:
    lines = [_USAGE, "Keep the KV cache of vLLM alive on a shared volume.", "", "tiers:"]
    lines += [f"  {each:9} {text}" for each, text in CLUSTER.items()]
    lines += ["", "a volume that is mounted here:"]
    lines += [f"  {each:9} {text}" for each, (_, text) in STORAGE.items()]
    return "\n".join([*lines, "", "kvtier COMMAND --help says more.", ""])


def _load(module_name: str, name: str, extra: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Images of engines and janitors have no operator. Of our other modules none may be missing: that would be a
        # broken installation, which the traceback shows best.
        if error.name is None or (error.name.startswith("kvtier_") and error.name != "kvtier_operator"):
            raise
        sys.stderr.write(f"kvtier {name}: {error.name} is not installed; pip install 'kvtier[{extra}]'\n")
        return None


if __name__ == "__main__":
    sys.exit(main())
