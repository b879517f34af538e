# SPDX-License-Identifier: Apache-2.0
"""What a person has done on a volume, from wherever they are: one request in, progress and one answer out.

``python3 -m kvtier_connector.janitor.chores REQUEST`` is how the command ``kvtier`` reaches into a pod that has the
volume. A request is one JSON object: ``verb``, ``directory`` or ``config`` (the janitor's document, which names it),
and ``options``. Each line of the answer is one too: ``{"progress": [share, blocks, bytes]}`` now and then, and in the
end ``{"status": 0 or 1, "document": …}``, or ``{"status": 1, "error": …}`` where it could not be done.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from kvtier_connector.contract_janitor import BLOCKS_LAYOUT, decode
from kvtier_connector.errors import ConfigInvalid, ConnectorError
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.progress import Tell

_TELL_SECONDS: Final = 0.2
_BY_HAND: Final = "kvtier_connector.janitor.by_hand"
_CLONE: Final = "kvtier_connector.janitor.cloning"
_SWEEP: Final = "kvtier_connector.janitor.sweep_once"

VERBS: Final[Mapping[str, str]] = {
    "check": _BY_HAND,
    "inspect": _BY_HAND,
    "purge": _BY_HAND,
    "pin": _BY_HAND,
    "pins": _BY_HAND,
    "unpin": _BY_HAND,
    "gc": _SWEEP,
    "clone": _CLONE,
}
"""Which module has the function of each name: a check needs none of what a sweep does."""


class Outcome(NamedTuple):
    """What came of a chore."""

    status: int
    """0: all is well; 1: something was found, or not all of it could be done."""
    document: dict[str, Any]


def do(verb: str, directory: Path, options: Mapping[str, Any], tell: Tell) -> Outcome:
    """Do one chore.

    Raises:
        ConnectorError: it cannot be done, or this release knows no such verb or option.
        OSError: the volume refuses.
    """
    if verb not in VERBS:
        raise ConfigInvalid(f"{verb}: not known to this release of kvtier; use the command of the same release")
    chore: Callable[..., Outcome] = getattr(importlib.import_module(VERBS[verb]), verb)
    unknown = set(options) - set(inspect.signature(chore).parameters)
    if unknown:
        raise ConfigInvalid(
            f"{verb}: {', '.join(sorted(unknown))} not known to this release; use the command of the same release"
        )
    return chore(directory, tell, **options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the one argument asks for."""
    words = sys.argv[1:] if arguments is None else arguments
    said = Lines()
    try:
        request = json.loads(words[0])
        outcome = do(request["verb"], _directory(request), request.get("options", {}), said.tell)
    except (ConnectorError, OSError) as error:
        said.write({"status": 1, "error": str(error)})
        return 1
    except (LookupError, ValueError, TypeError) as error:
        said.write({"status": 2, "error": f"not a request: {error!r}"})
        return 2
    said.write({"status": outcome.status, "document": outcome.document})
    return outcome.status


def _directory(request: Mapping[str, Any]) -> Path:
    if "directory" in request:
        return Path(request["directory"])
    return tier_directory(Path(request["config"]))


def tier_directory(config_file: Path) -> Path:
    """Return the directory of the tier that a janitor's document is of.

    Raises:
        ConfigInvalid: the document cannot be used, or nothing there was written by kvtier's own connector.
        OSError: it cannot be read.
    """
    config = decode(config_file.read_text(encoding="utf-8"))
    directory = Path(config.tier_dir)
    # A connector that the tier had before may have left generations of kvtier's, which chores are for.
    if config.layout != BLOCKS_LAYOUT and not find_generations(directory):
        raise ConfigInvalid(
            f"tier {config.tier}: there are no blocks of kvtier's own connector on the volume, and of vLLM's files "
            "this command knows nothing; kvtier status shows what they take, and the janitor keeps them within "
            "spec.disk.budget"
        )
    return directory


class Lines:
    """Writes JSON objects, one a line, and of progress no more than a few a second."""

    def __init__(self, to: TextIO | None = None) -> None:
        """Write nothing yet; to standard output, unless told where."""
        self._to = to or sys.stdout
        self._next = 0.0

    def tell(self, share: float, blocks: int, size: int) -> None:
        """Write how far it is, if it is time to."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _TELL_SECONDS
            self.write({"progress": [share, blocks, size]})

    def write(self, document: Mapping[str, Any]) -> None:
        """Write a line, at once."""
        self._to.write(json.dumps(document) + "\n")
        self._to.flush()


if __name__ == "__main__":
    sys.exit(main())
