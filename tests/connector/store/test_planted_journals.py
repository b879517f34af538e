# SPDX-License-Identifier: Apache-2.0
"""Journals in whose place somebody put something else: what is no file, or says nothing for ever."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from planted import KINDS, plant
from store_contract import key

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import RECORD_BYTES, JournalWriter, Op
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import JournalName, journal_path

WRITER = "0123456789abcdef" * 2


def note(writer: JournalWriter, *numbers: int) -> None:
    for number in numbers:
        writer.append(Op.STORED, key(number), 4096)


def numbers_of(reader: JournalReader) -> list[int]:
    known = {key(number): number for number in range(3)}
    return [known[record.key] for batch in reader.read() for record in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_place_of_a_journal_silences_nobody(tmp_path: Path, kind: str) -> None:
    reader, writer = JournalReader(tmp_path), JournalWriter(tmp_path)
    reader.start()
    writer.flush()
    own = tmp_path / journal_path(JournalName(writer.writer, 0))
    own.unlink()
    plant(kind, own)
    plant(kind, tmp_path / journal_path(JournalName(WRITER, 0)))

    note(writer, 1, 2)
    assert writer.flush() == 2
    assert numbers_of(reader) == [1, 2]


def test_a_pipe_that_somebody_reads_silences_nobody_either(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.flush()
    own = tmp_path / journal_path(JournalName(writer.writer, 0))
    own.unlink()
    os.mkfifo(own)
    reading = os.open(own, os.O_RDONLY | os.O_NONBLOCK)
    note(writer, 1)
    assert writer.flush() == 1
    os.close(reading)
    assert numbers_of(JournalReader(tmp_path, but=WRITER)) == []
    assert (tmp_path / journal_path(JournalName(writer.writer, 1))).stat().st_size == 2 * RECORD_BYTES


def test_of_a_journal_of_any_length_that_says_nothing_little_is_read(tmp_path: Path) -> None:
    class Counting(FileSystem):
        count = 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done = super().preadv(fd, buffers, offset)
            self.count += done
            return done

    fs = Counting()
    reader = JournalReader(tmp_path, fs=fs)
    reader.start()
    writer = JournalWriter(tmp_path)
    writer.flush()
    for path in (writer.writer, WRITER):
        with (tmp_path / journal_path(JournalName(path, 0))).open("ab") as file:
            # CephFS takes no file of a TiB unless told to.
            file.truncate(1 << 39)
    for _ in range(10):
        assert numbers_of(reader) == []
    assert fs.count < 16 << 20
