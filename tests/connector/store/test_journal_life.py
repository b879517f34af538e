# SPDX-License-Identifier: Apache-2.0
"""Journals as signs of life: by when they were last written to, others tell whether anybody uses a generation."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from clocks import Clock
from store_contract import NOW_NS, key
from store_faults import FailingFs

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import RECORD_BYTES, JournalWriter, Op, decode_record


def only_file(root: Path) -> Path:
    (path,) = (root / "journal").glob("*.kvj")
    return path


SECOND_NS = 10**9
"""Some volumes tell no shorter times."""


def make_living(root: Path, fs: FileSystem | None = None) -> tuple[JournalWriter, Clock]:
    now = Clock(1000.0)
    return JournalWriter(root, fs=fs or FileSystem(), clock=lambda: NOW_NS, now=now), now


def written_ns(root: Path) -> int:
    return only_file(root).stat().st_mtime_ns


def test_a_process_that_has_nothing_to_say_renews_the_time_of_its_journal_now_and_then(tmp_path: Path) -> None:
    writer, now = make_living(tmp_path)
    writer.append(Op.STORED, key(1), 4096)
    writer.flush()
    content = only_file(tmp_path).read_bytes()
    os.utime(only_file(tmp_path), ns=(SECOND_NS, SECOND_NS))
    now.seconds += 300
    writer.flush()
    assert written_ns(tmp_path) == SECOND_NS
    now.seconds += 400
    writer.flush()
    assert written_ns(tmp_path) > SECOND_NS
    assert only_file(tmp_path).read_bytes() == content


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_process_that_may_store_nothing_shows_that_it_is_there(tmp_path: Path, *, is_removed: bool) -> None:
    writer, now = make_living(tmp_path)
    writer.append(Op.STORED, key(1), 4096)
    writer.show_life()
    assert only_file(tmp_path).stat().st_size == RECORD_BYTES
    os.utime(only_file(tmp_path), ns=(SECOND_NS, SECOND_NS))
    if is_removed:
        only_file(tmp_path).unlink()
    now.seconds += 700
    writer.show_life()
    assert written_ns(tmp_path) > SECOND_NS
    assert writer.flush() == 1
    record = decode_record(only_file(tmp_path).read_bytes()[RECORD_BYTES:])
    assert record is not None
    assert record.key == key(1)


def test_a_volume_that_takes_no_sign_of_life_is_asked_now_and_then(tmp_path: Path) -> None:
    calls: list[str] = []
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    fs = FailingFs(refused, when=lambda call, _: not calls.append(call))
    writer, now = make_living(tmp_path, fs)
    for _ in range(10):
        writer.show_life()
        now.seconds += 100
    assert calls.count("open") == 2
