# SPDX-License-Identifier: Apache-2.0
"""A volume at rest is asked with one call whether there is news, and no news is missed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from shared_engine import Counting, engine
from store_contract import BLOCK_BYTES, PAYLOAD_BYTES, key, payload
from store_faults import FailingFs
from waiting import until_the_next_tick

from kvtier_connector.store.bell import MOST_SILENT_ROUNDS, Bell
from kvtier_connector.store.blockstore import Stored
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.index import Presence
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import JOURNAL
from kvtier_connector.store.statx import State

HOUR_NS = 3600 * 10**9


def quiet(root: Path, fs: FileSystem = LOCAL, *, is_cached: bool = False) -> Bell:
    """Return a bell that has rung out."""
    bell = Bell(root, fs=fs, is_cached=is_cached)
    while bell.is_ringing():
        pass
    until_the_next_tick(root / JOURNAL)
    return bell


@pytest.mark.parametrize("is_cached", [True, False])
def test_it_rings_when_something_was_written_to_a_journal(root: Path, *, is_cached: bool) -> None:
    writer = JournalWriter(root)
    writer.flush()
    bell = quiet(root, is_cached=is_cached)
    assert not bell.is_ringing()
    writer.append(Op.STORED, key(1), PAYLOAD_BYTES)
    assert not bell.is_ringing()
    writer.flush()
    assert bell.is_ringing()


def test_it_rings_when_a_process_begins_its_journal_and_when_the_tree_goes_and_comes(root: Path) -> None:
    bell = quiet(root)
    JournalWriter(root).flush()
    assert bell.is_ringing()
    bell = quiet(root)
    shutil.rmtree(root / JOURNAL)
    assert bell.is_ringing()
    bell = quiet(root)
    JournalWriter(root).flush()
    assert bell.is_ringing()


def test_news_within_the_same_tick_of_the_volumes_clock_is_heard_all_the_same(root: Path) -> None:
    JournalWriter(root).flush()
    bell = quiet(root)
    status = (root / JOURNAL).stat()
    tick = status.st_mtime_ns + HOUR_NS
    os.utime(root / JOURNAL, ns=(tick, tick))
    assert bell.is_ringing()
    # Another process rings now, and the volume gives it the same time.
    os.utime(root / JOURNAL, ns=(tick, tick))
    assert bell.is_ringing()
    assert bell.is_ringing()
    assert not bell.is_ringing()


def test_a_bell_that_was_silent_for_long_is_doubted_once(root: Path) -> None:
    bell = quiet(root)
    rounds = [bell.is_ringing() for _ in range(3 * MOST_SILENT_ROUNDS)]
    assert rounds.count(True) == 2
    # The quiet one had been silent for a round.
    assert rounds.index(True) == MOST_SILENT_ROUNDS - 1


class Mute(FileSystem):
    """Takes it when the bell is rung, and shows nobody."""

    def stat(self, path: str) -> os.stat_result:
        found = super().stat(path)
        if path.endswith(f"/{JOURNAL}"):
            return os.stat_result((*found[:7], 1, 1, 1), {"st_mtime_ns": 1})
        return found


def test_what_others_tell_where_nobody_hears_the_bell_is_heard_all_the_same(root: Path) -> None:
    teller = engine(root)
    hearing = engine(root, Mute())
    while hearing.may_have_news():
        hearing.synchronize()
    teller.put(key(1), payload(1))
    teller.synchronize()
    for _ in range(MOST_SILENT_ROUNDS):
        hearing.synchronize(may_have_news=hearing.may_have_news())
    assert hearing.state(key(1)) is Presence.PRESENT


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOTCONN])
def test_a_volume_that_does_not_answer_may_have_news(root: Path, number: int) -> None:
    failing: list[bool] = []
    fs = FailingFs(OSError(number, "broken"), when=lambda call, path: bool(failing) and call == "stat")
    bell = quiet(root, fs)
    failing.append(True)
    assert bell.is_ringing()
    failing.clear()
    assert bell.is_ringing()


@pytest.mark.parametrize(
    ("refused", "calls"),
    [(None, ["server"]), *((each, ["server", "open", "fstat", "close"]) for each in (errno.ENOSYS, errno.EINVAL))],
)
def test_a_node_that_answers_from_a_cache_is_asked_past_it_with_one_call_where_there_is_one(
    root: Path, refused: int | None, calls: list[str]
) -> None:
    class Cached(Counting):
        def stat_at_server(self, path: str) -> State:
            self.before("server", path)
            if refused is not None:
                raise OSError(refused, "no such call")
            return LOCAL.stat_at_server(path)

    JournalWriter(root).flush()
    fs = Cached()
    bell = quiet(root, fs, is_cached=True)
    fs.calls.clear()
    assert not bell.is_ringing()
    assert fs.calls == calls
    os.utime(root / JOURNAL)
    assert bell.is_ringing()


def test_a_server_says_of_a_directory_what_the_system_does_and_of_a_link_that_it_is_one(root: Path) -> None:
    JournalWriter(root).flush()
    link = root.with_name("link")
    link.symlink_to(root / JOURNAL)
    for path in (root / JOURNAL, link):
        status = path.lstat()
        assert LOCAL.stat_at_server(str(path)) == (status.st_dev, status.st_ino, status.st_mtime_ns)
    with pytest.raises(FileNotFoundError):
        LOCAL.stat_at_server(str(root / "none"))


def test_an_engine_at_rest_costs_one_call_however_many_others_there_are(root: Path) -> None:
    others = [engine(root) for _ in range(10)]
    for other in others:
        other.synchronize()
    fs = Counting()
    waiting = engine(root, fs)
    while waiting.may_have_news():
        waiting.synchronize()
    fs.calls.clear()
    for _ in range(10):
        assert waiting.synchronize(may_have_news=waiting.may_have_news()).problem == ""
    assert fs.calls == ["stat"] * 10
    until_the_next_tick(root / JOURNAL)
    assert others[3].put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert others[3].has_news.is_set()
    others[3].synchronize(may_have_news=False)
    assert not others[3].has_news.is_set()
    assert waiting.may_have_news()
    waiting.synchronize()
    assert waiting.state(key(1)) is Presence.PRESENT


def test_a_journal_that_was_stale_on_the_server_is_read_although_the_bell_is_silent(root: Path) -> None:
    teller, stale = engine(root), list[bool]()
    fs = FailingFs(
        OSError(errno.ESTALE, "stale"), when=lambda call, path: bool(stale) and call == "open" and JOURNAL in str(path)
    )
    hearing = engine(root, fs)
    teller.put(key(1), payload(1))
    teller.synchronize()
    stale.append(True)
    for _ in range(5):
        assert hearing.may_have_news()
        hearing.synchronize(may_write=False)
    stale.clear()
    assert hearing.may_have_news()
    hearing.synchronize()
    assert hearing.state(key(1)) is Presence.PRESENT
