# SPDX-License-Identifier: Apache-2.0
"""Where a generation is carried from and to: a directory that is mounted here, or a tier, through its janitor's pod.

Whatever it passes through on the way, blocks are verified where they arrive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final

import click

from kvtier_cli import targets
from kvtier_connector.janitor import transfer
from kvtier_connector.janitor.chores import Outcome
from kvtier_connector.janitor.piping import frames
from kvtier_connector.store.progress import Tell
from kvtier_operator import names

_MODULE: Final = "kvtier_connector.janitor.piping"
_PIECE_BYTES: Final = 1 << 20


class _NotTakenError(Exception):
    """Whoever the stream is for does not take it: no fault of the connection."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class End:
    """One end of the way."""

    target: str
    where: targets.Where
    is_directory: bool
    verb: str
    """``export`` or ``import``."""

    @cached_property
    def pod(self) -> names.Manifest:
        """Return the janitor of the tier.

        Raises:
            ClusterError: there is no such tier, or it has none.
        """
        return targets.janitor_pod(self.target, self.where, self.verb)

    def find(self) -> None:
        """See that it can be reached, before anything is begun; the thread that reads the command line only."""
        if not self.is_directory:
            _ = self.pod

    def export(self, to: IO[bytes], tell: Tell, *, generation: str | None, most_bytes: int | None) -> Outcome:
        """Write a generation to a stream.

        Raises:
            ConnectorError: it cannot be done.
            ClusterError: the tier cannot be reached.
            OSError: the stream does not take it.
        """
        if self.is_directory:
            return transfer.export(Path(self.target), tell, to=to, generation=generation, most_bytes=most_bytes)
        words = [] if generation is None else [f"--generation={generation}"]
        words += [] if most_bytes is None else [f"--hottest={most_bytes}"]

        def take(content: bytes) -> None:
            try:
                to.write(content)
            except OSError as error:
                raise _NotTakenError(error) from error

        try:
            outcome = self._pipe(("export", *words), tell, take=take)
            to.flush()
        except _NotTakenError as refusal:
            raise refusal.error from refusal
        return outcome

    def import_(self, source: IO[bytes], tell: Tell, *, keys_dir: str, yes: bool) -> Outcome:
        """Read a stream, and verify each block as it arrives.

        Raises:
            UsageError: keys are given for a tier: they stay where they are.
            ConnectorError: it cannot be done.
            ClusterError: the tier cannot be reached.
        """
        if self.is_directory:
            return transfer.import_(Path(self.target), tell, source=source, keys_dir=keys_dir, yes=yes)
        if keys_dir:
            raise click.UsageError(
                "--keys-dir is for a directory: keys stay where they are, and the janitor of a tier has none"
            )
        words = ["--yes"] if yes else []
        return self._pipe(("import", "--framed", *words), tell, give=frames(source))

    def _pipe(self, words: Sequence[str], tell: Tell, **streams: Any) -> Outcome:
        answers = targets.Answers(tell)
        command = ["python3", "-m", _MODULE, *words, f"--config={targets.CONFIG}"]
        code = self.where.person.pipe(self.pod, names.JANITOR_CONTAINER, command, on_line=answers.hear, **streams)
        return answers.outcome(f"the janitor of {self.target} ({self.pod['metadata']['name']})", code)


def carry(  # noqa: PLR0913 - keywords
    source: End, target: End, tell: Tell, *, generation: str | None, keys_dir: str, yes: bool
) -> Outcome:
    """Carry a generation from one end to the other; return what came of it there.

    Raises:
        UsageError: keys are given for a tier.
        ConnectorError: it cannot be done.
        ClusterError: a tier cannot be reached.
    """
    source.find()
    target.find()
    reading, writing = os.pipe()
    problems: list[BaseException] = []

    def write() -> None:
        try:
            with os.fdopen(writing, "wb") as stream:
                source.export(stream, tell, generation=generation, most_bytes=None)
        except BrokenPipeError:
            pass  # the other end has said why it takes no more
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits for it
            problems.append(error)

    exporting = threading.Thread(target=write, name="kvtier-export", daemon=True)
    exporting.start()
    try:
        with os.fdopen(reading, "rb") as stream:
            outcome = target.import_(stream, lambda _share, _blocks, _bytes: None, keys_dir=keys_dir, yes=yes)
            while stream.read(_PIECE_BYTES):
                """Take what is behind the end: it is padding."""
    except Exception as error:
        exporting.join()
        # What was not sent cannot have arrived: the one that sends knows why.
        raise (problems[0] if problems else error) from error
    exporting.join()
    if problems:
        raise problems[0]
    return outcome
