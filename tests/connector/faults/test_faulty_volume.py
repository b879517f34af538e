# SPDX-License-Identifier: Apache-2.0
"""The store on a mount that hangs or fails for real."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checks import check
from faulty_mounts import WAIT_SECONDS, Background, FaultyVolume, wait_for
from plain_engine import PlainEngine
from store_contract import BLOCK_BYTES, key, pages, payload, read

from kvtier_connector.store import blockstore
from kvtier_connector.store.blockstore import Hit, Miss, Stored, StoreFault
from kvtier_connector.store.header import Fault
from kvtier_connector.store.health import Breaker, BreakerLimits, CircuitState, Direction
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import block_path

CONNECTOR = Path(blockstore.__file__ or "").parents[2]
STORE_TESTS = Path(__file__).parents[1] / "store"


def tier(volume: FaultyVolume) -> PlainEngine:
    """Return an engine's store on the volume, with blocks 0 to 4 there."""
    root = volume.path / "d1gest"
    claim(root, {}, "d1gest")
    store = PlainEngine(root)
    for number in range(5):
        assert store.put(key(number), payload(number)) == Stored(BLOCK_BYTES)
    assert store.tell() == ""
    return store


def partials(volume: FaultyVolume) -> list[Path]:
    return list(volume.path.rglob("*-partial"))


def assert_sound(volume: FaultyVolume) -> None:
    assert check(volume.path / "d1gest", partial_age_seconds=0) == []


def test_a_healthy_mount_of_this_kind_works(faulty_volume: FaultyVolume) -> None:
    store = tier(faulty_volume)
    assert read(store, key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))
    assert_sound(faulty_volume)


@pytest.mark.parametrize("call", ["lookup", "open", "read"])
def test_a_load_that_hangs_holds_up_nobody_else_and_ends_when_the_volume_answers(
    faulty_volume: FaultyVolume, call: str
) -> None:
    store = tier(faulty_volume)
    into = pages()
    with faulty_volume.hanging(call):
        load = Background(lambda: store.get(key(1), into))
        if call == "read":
            # Another thread's write does not wait for the read that hangs.
            assert Background(lambda: store.blocks.put(key(8), payload(8))).result() == Stored(BLOCK_BYTES)
        assert load.is_running
    assert load.result() == Hit(BLOCK_BYTES)
    assert into == payload(1)
    assert_sound(faulty_volume)


@pytest.mark.parametrize("call", ["create", "write", "close", "rename"])
def test_a_store_that_hangs_leaves_loads_alone_and_ends_when_the_volume_answers(
    faulty_volume: FaultyVolume, call: str
) -> None:
    store = tier(faulty_volume)
    # A read closes its file as well, so that it would hang there too.
    reads_go_on = call != "close"
    with faulty_volume.hanging(call):
        writing = Background(lambda: store.put(key(7), payload(7)))
        if reads_go_on:
            assert Background(lambda: store.get(key(1), pages())).result() == Hit(BLOCK_BYTES)
        assert writing.is_running
    assert writing.result() == Stored(BLOCK_BYTES)
    assert store.get(key(7), pages()) == Hit(BLOCK_BYTES)
    assert_sound(faulty_volume)


def test_a_time_out_opens_the_breaker_and_an_attempt_closes_it_when_the_volume_is_back(
    faulty_volume: FaultyVolume,
) -> None:
    store = tier(faulty_volume)
    seconds = [0.0]
    breaker = Breaker(limits=BreakerLimits(first_backoff_seconds=1, attempt_seconds=5), now=lambda: seconds[0])
    with faulty_volume.hanging("read"):
        late = Background(lambda: store.get(key(1), pages()))
        assert late.is_running
        breaker.record_timeout(Direction.LOAD)
        assert not breaker.admit(Direction.LOAD)
        assert breaker.admit(Direction.STORE)
        seconds[0] = 1
        assert breaker.admit(Direction.LOAD)
        attempt = Background(lambda: store.get(key(2), pages()))
        assert attempt.is_running
        seconds[0] = 6
        assert breaker.view(Direction.LOAD).state is CircuitState.OPEN
    assert late.result() == Hit(BLOCK_BYTES)
    assert attempt.result() == Hit(BLOCK_BYTES)
    seconds[0] = 8
    assert breaker.admit(Direction.LOAD)
    breaker.record_load(store.get(key(3), pages()))
    assert breaker.view(Direction.LOAD).state is CircuitState.CLOSED


EXITS = """
import atexit, sys, threading
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from plain_engine import PlainEngine
from store_contract import key, pages, payload
store = PlainEngine(Path(sys.argv[1]))
call = lambda: store.get(key(1), pages())
for thread in (threading.Thread(target=call, daemon=True) for _ in range(3)):
    thread.start()
atexit.register(print, "ended", flush=True)
print("hanging", flush=True)
"""


def test_the_end_of_a_process_does_not_wait_for_its_threads_that_hang(faulty_volume: FaultyVolume) -> None:
    """The kernel keeps a thread inside FUSE until the server answers, so what is left of the process waits for that."""
    tier(faulty_volume)
    paths = [str(CONNECTOR), str(STORE_TESTS), str(STORE_TESTS.parents[1] / "kit")]
    command = [sys.executable, "-c", EXITS, str(faulty_volume.path / "d1gest"), *paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        with faulty_volume.hanging("read"):
            lines = Background(lambda: [process.stdout.readline() for _ in range(2)] if process.stdout else [])
            assert lines.result() == ["hanging\n", "ended\n"]
        assert process.wait(WAIT_SECONDS) == 0


@pytest.mark.parametrize("call", ["lookup", "open", "read"])
def test_reads_that_fail_are_faults_that_open_the_breaker_for_loads_only(
    faulty_volume: FaultyVolume, call: str
) -> None:
    store, breaker = tier(faulty_volume), Breaker()
    with faulty_volume.failing(errno.EIO, call):
        for number in range(3):
            outcome = store.get(key(number), pages())
            assert outcome is Fault.IO
            breaker.record_load(outcome)
    assert breaker.view(Direction.LOAD).state is CircuitState.OPEN
    assert breaker.view(Direction.STORE).state is CircuitState.CLOSED
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert_sound(faulty_volume)


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_file_that_was_replaced_on_the_server_is_read_again_and_no_sign_that_the_volume_fails(
    faulty_volume: FaultyVolume, call: str
) -> None:
    store, breaker = tier(faulty_volume), Breaker()
    into = pages()
    for number in range(5):
        faulty_volume.fail_once(errno.ESTALE, call)
        outcome = store.get(key(number), into)
        assert outcome == Hit(BLOCK_BYTES)
        assert into == payload(number)
        breaker.record_load(outcome)
    assert breaker.view(Direction.LOAD).state is CircuitState.CLOSED


@pytest.mark.parametrize("call", ["write", "close", "rename", "create"])
def test_a_write_into_what_was_replaced_on_the_server_is_made_again(faulty_volume: FaultyVolume, call: str) -> None:
    store = tier(faulty_volume)
    faulty_volume.fail_once(errno.ESTALE, call)
    assert store.put(key(9), payload(9)) == Stored(BLOCK_BYTES)
    faulty_volume.fail_once(errno.ESTALE, "write" if call == "rename" else call)
    assert store.tell() == ""
    assert store.get(key(9), pages()) == Hit(BLOCK_BYTES)
    assert partials(faulty_volume) == []
    assert_sound(faulty_volume)


@pytest.mark.parametrize("call", ["create", "write", "close", "rename"])
@pytest.mark.parametrize(
    ("number", "fault", "opens_at_once"),
    [
        (errno.EIO, StoreFault.IO, False),
        (errno.ENOSPC, StoreFault.NO_SPACE, True),
        (errno.EDQUOT, StoreFault.NO_SPACE, True),
        (errno.EROFS, StoreFault.READ_ONLY, True),
        (errno.EACCES, StoreFault.DENIED, True),
        (errno.ESTALE, StoreFault.IO, False),
    ],
)
def test_writes_that_fail_are_faults_that_leave_nothing_and_keep_loads(
    faulty_volume: FaultyVolume, call: str, number: int, fault: StoreFault, *, opens_at_once: bool
) -> None:
    store, breaker = tier(faulty_volume), Breaker()
    with faulty_volume.failing(number, call):
        outcome = store.put(key(9), payload(9))
        assert outcome is fault
        breaker.record_store(outcome)
        assert (breaker.view(Direction.STORE).state is CircuitState.OPEN) == opens_at_once
        assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
        assert store.get(key(9), pages()) == Miss()
    assert partials(faulty_volume) == []
    assert store.put(key(9), payload(9)) == Stored(BLOCK_BYTES)
    assert_sound(faulty_volume)


@pytest.mark.parametrize("call", ["create", "open", "write", "close"])
def test_a_journal_that_cannot_be_written_waits_and_is_told_later(faulty_volume: FaultyVolume, call: str) -> None:
    store = tier(faulty_volume)
    assert store.put(key(9), payload(9)) == Stored(BLOCK_BYTES)
    if call == "create":
        for path in (faulty_volume.path / "d1gest" / "journal").iterdir():
            path.unlink()
    with faulty_volume.failing(errno.EDQUOT, call):
        assert store.tell() != ""
    assert store.journal.flush() == 1


def test_a_directory_that_is_deleted_while_threads_work_costs_misses_only(faulty_volume: FaultyVolume) -> None:
    store = tier(faulty_volume)
    stop, faults = threading.Event(), []

    def work(first: int) -> None:
        into, number = pages(), first
        while not stop.is_set():
            number = (number + 1) % 20
            put, got = store.put(key(number), payload(number)), store.get(key(number), into)
            faults.extend(each for each in (put, got) if isinstance(each, Fault | StoreFault))
            assert not isinstance(got, Hit) or into == payload(number)

    threads = [Background(lambda first=first: work(first)) for first in range(3)]
    try:
        for _ in range(3):
            wait_for((faulty_volume.path / "d1gest" / "blocks").exists, "blocks")
            subprocess.run(["rm", "-rf", str(faulty_volume.path / "d1gest")], check=False, capture_output=True)
    finally:
        stop.set()
    for thread in threads:
        thread.result()
    assert [fault for fault in faults if fault not in {Fault.IO, StoreFault.IO}] == []
    claim(faulty_volume.path / "d1gest", {}, "d1gest")
    for path in partials(faulty_volume):
        path.unlink()
    assert_sound(faulty_volume)


def test_a_mount_whose_server_is_gone_is_a_fault_and_never_an_exception(faulty_volume: FaultyVolume) -> None:
    store = tier(faulty_volume)
    subprocess.run(["umount", "--lazy", str(faulty_volume.path)], check=True)
    # The names below the mount point are gone now, as after a network file system was unmounted.
    assert store.get(key(1), pages()) == Miss()
    assert store.blocks.look_up(key(2)) is False
    assert not (faulty_volume.path / block_path(key(1))).exists()
