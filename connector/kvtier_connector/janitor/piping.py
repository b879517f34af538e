# SPDX-License-Identifier: Apache-2.0
"""The chores ``export`` and ``import`` inside a pod that has the volume: the stream is standard output, or input.

``python3 -m kvtier_connector.janitor.piping`` is how the command ``kvtier`` carries a generation out of a tier and into
one. What it has to say goes to standard error, in the lines of the other chores. A connection to a pod carries input,
but not always the end of it: so ``--framed`` input says itself how long it is.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final, cast

from kvtier_connector.errors import ConnectorError
from kvtier_connector.janitor import transfer
from kvtier_connector.janitor.chores import Lines, tier_directory

_LENGTH_DIGITS: Final = 8
_PIECE_BYTES: Final = 1 << 20


def frames(source: IO[bytes]) -> Iterator[bytes]:
    """Yield what is read, in pieces that say how long they are; an empty one is the last."""
    while piece := source.read(_PIECE_BYTES):
        yield b"%08x" % len(piece) + piece
    yield b"%08x" % 0


class Framed(io.RawIOBase):
    """What `frames` made, put together again. It ends with the last frame, or where the input is cut off."""

    def __init__(self, source: IO[bytes]) -> None:
        """Read nothing yet."""
        super().__init__()
        self._source = source
        self._left = 0
        self._is_over = False

    def read(self, size: int = -1) -> bytes:
        """Return some of what is next, and nothing at the end."""
        if self._left == 0 and not self._is_over:
            header = self._source.read(_LENGTH_DIGITS)
            self._left = int(header, 16) if len(header) == _LENGTH_DIGITS else 0
            self._is_over = self._left == 0
        if self._is_over:
            return b""
        piece = self._source.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(piece)
        self._is_over = not piece
        return piece


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments ask for, for the tier of the janitor's document."""
    parser = argparse.ArgumentParser(prog="python3 -m kvtier_connector.janitor.piping")
    parser.add_argument("verb", choices=("export", "import"))
    parser.add_argument("--config", type=Path, required=True, help="the janitor's document, which names the tier")
    parser.add_argument("--generation")
    parser.add_argument("--hottest", type=int, help="bytes, for export")
    parser.add_argument("--framed", action="store_true", help="the input says how long it is, for import")
    parser.add_argument("--yes", action="store_true", help="write what is imported")
    options = parser.parse_args(arguments)
    said = Lines(sys.stderr)
    try:
        tier = tier_directory(options.config)
        if options.verb == "export":
            to, most = sys.stdout.buffer, options.hottest
            outcome = transfer.export(tier, said.tell, to=to, generation=options.generation, most_bytes=most)
            to.flush()
        else:
            source = cast("IO[bytes]", Framed(sys.stdin.buffer)) if options.framed else sys.stdin.buffer
            outcome = transfer.import_(tier, said.tell, source=source, yes=options.yes)
    except (ConnectorError, OSError, ValueError) as error:
        said.write({"status": 1, "error": str(error)})
        return 1
    said.write({"status": outcome.status, "document": outcome.document})
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
