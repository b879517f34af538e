# SPDX-License-Identifier: Apache-2.0
"""The disk tier of an engine on a mount that fails or hangs for real: requests are decided, and no byte is wrong.

`Rig.serve` compares every byte, and raises if a request is not decided. What it calls of the tier touches memory only:
if that were not so, the test's own thread would hang in the mount.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_mounts import FaultyVolume

with warnings.catch_warnings():
    # Importing torch and vLLM warns of their own deprecations; ours still fail the tests.
    warnings.simplefilter("ignore")
    from rig import DIGEST, Rig, Rigs, key, keys, wait_until

from checks import check

from kvtier_connector.store.health import Breaker, BreakerLimits

DEADLINE_SECONDS = 0.5
"""Where something hangs; elsewhere a busy machine must not look like a volume that does."""


@pytest.fixture(autouse=True)
def quick_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is tried again after a while be tried again at once."""
    limits = BreakerLimits(first_backoff_seconds=0.05, longest_backoff_seconds=0.1)
    monkeypatch.setattr(
        "kvtier_connector.vllm_adapter.secondary_tier.Breaker", functools.partial(Breaker, limits=limits)
    )
    monkeypatch.setattr("kvtier_connector.cascade.memory.ASIDE_SECONDS", 0.1)


@pytest.fixture
def engines(faulty_volume: FaultyVolume, tmp_path: Path) -> Iterator[Rigs]:
    made = Rigs(tmp_path)
    made.root = faulty_volume.path / DIGEST
    yield made
    faulty_volume.clear()
    made.close()


def make(engines: Rigs, *, known: int = 0, deadline: float = 20.0) -> Rig:
    rig = engines.make(load_deadline_seconds=deadline, refresh_seconds=0.1)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")
    return rig


def wait_for_hits(rig: Rig, first: int, count: int) -> None:
    names = itertools.count()
    wait_until(
        lambda: rig.serve(keys(count, first), f"again {next(names)}").hit_blocks == count, "blocks are served again"
    )


@pytest.mark.parametrize("call", ["open", "read"])
def test_reads_that_fail_cost_a_recompute_until_the_volume_is_well(
    engines: Rigs, faulty_volume: FaultyVolume, call: str
) -> None:
    engines.write(keys(24))
    rig = make(engines, known=24)
    for number, error in enumerate((errno.EIO, errno.ESTALE, errno.EACCES)):
        first = 8 * number
        with faulty_volume.failing(error, call):
            assert rig.serve(keys(8, first), f"broken {number}").hit_blocks == 0
        wait_for_hits(rig, first, 8)
    assert rig.metric("vllm:kvtier_disk_misses", "io") >= 3


@pytest.mark.parametrize("call", ["create", "write", "rename"])
def test_writes_that_fail_are_shed_while_loads_go_on(engines: Rigs, faulty_volume: FaultyVolume, call: str) -> None:
    engines.write(keys(40, first=1000))
    rig = make(engines, known=40)
    errors = {
        errno.EIO: "io",
        errno.ENOSPC: "no_space",
        errno.EDQUOT: "no_space",
        errno.EROFS: "read_only",
        errno.EACCES: "denied",
    }
    numbers = itertools.count()
    for turn, (error, cause) in enumerate(errors.items()):
        shed = rig.metric("vllm:kvtier_disk_shed_stores", cause)
        with faulty_volume.failing(error, call):
            rig.offload([key(next(numbers))], f"broken {cause} {turn}")
            assert rig.metric("vllm:kvtier_disk_shed_stores", cause) == shed + 1
            assert rig.serve(keys(8, first=1000 + 8 * turn), f"reads {turn}").hit_blocks == 8

        def is_storing() -> bool:
            written = rig.metric("vllm:kvtier_disk_written_blocks")
            rig.offload([key(number := next(numbers))], f"again {number}")
            return rig.metric("vllm:kvtier_disk_written_blocks") == written + 1

        wait_until(is_storing, "blocks are stored again")


def test_a_read_that_hangs_ends_at_its_deadline_and_the_next_requests_do_not_wait(
    engines: Rigs, faulty_volume: FaultyVolume
) -> None:
    engines.write(keys(8))
    rig = make(engines, known=8, deadline=DEADLINE_SECONDS)
    with faulty_volume.hanging("read"):
        assert rig.serve(keys(4), "late").hit_blocks == 0
        assert rig.metric("vllm:kvtier_disk_misses", "deadline") >= 1
        assert rig.metric("vllm:kvtier_disk_load_breaker") > 0
        rig.offload([key(100)], "a store meanwhile")
    wait_for_hits(rig, 0, 8)


@pytest.mark.parametrize("call", ["create", "write", "close"])
def test_a_write_that_hangs_gives_its_memory_back_at_its_deadline(
    engines: Rigs, faulty_volume: FaultyVolume, call: str
) -> None:
    rig = make(engines, deadline=DEADLINE_SECONDS)
    with faulty_volume.hanging(call):
        rig.offload(keys(2), "late")
        assert rig.metric("vllm:kvtier_disk_shed_stores", "deadline") >= 1
        assert rig.metric("vllm:kvtier_disk_queued_store_bytes") == 0
    wait_until(lambda: rig.metric("vllm:kvtier_disk_stuck_threads") == 0, "the threads are free")
    names = itertools.count(10)

    def is_storing() -> bool:
        rig.offload([key(number := next(names))], f"again {number}")
        return rig.metric("vllm:kvtier_disk_written_blocks") > 0

    wait_until(is_storing, "blocks are stored again")


def test_a_lookup_that_hangs_is_a_miss_and_the_volume_is_used_when_it_answers(
    engines: Rigs, faulty_volume: FaultyVolume
) -> None:
    engines.write(keys(4))
    with faulty_volume.hanging("list"):
        # Nothing is walked, so each block has to be asked for.
        rig = engines.make(load_deadline_seconds=DEADLINE_SECONDS, refresh_seconds=0.1)
        with faulty_volume.hanging("lookup"):
            assert rig.serve(keys(4), "unanswered").hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "late_probe") >= 1
    wait_for_hits(rig, 0, 4)


@pytest.mark.parametrize("call", ["lookup", "list", "create"])
def test_a_volume_that_hangs_at_the_start_holds_up_no_request(
    engines: Rigs, faulty_volume: FaultyVolume, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("kvtier_connector.vllm_adapter.secondary_tier.OPEN_WAIT_SECONDS", 0.1)
    with faulty_volume.hanging(call):
        rig = engines.make(load_deadline_seconds=DEADLINE_SECONDS)
        assert rig.serve(keys(2), "before").hit_blocks == 0
        rig.offload(keys(2), "before too")
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 1, "the volume is open")


def test_an_engine_ends_although_the_volume_hangs(
    engines: Rigs, faulty_volume: FaultyVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_connector.cascade.attach.CLOSE_WAIT_SECONDS", 0.2)
    engines.write(keys(4))
    rig = make(engines, known=4)
    context = rig.request("r")
    with faulty_volume.hanging("read", "write", "open"):
        rig.begin_load(keys(4), context)
        rig.end_step()
        closing = threading.Thread(target=rig.tier.shutdown)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


def test_a_directory_that_is_deleted_under_an_engine_costs_misses_and_is_made_again(engines: Rigs) -> None:
    engines.write(keys(4))
    rig = make(engines, known=4)
    # The engine may write its journal into a directory that rm has just found empty.
    wait_until(lambda: subprocess.run(["rm", "-rf", str(engines.root)], check=False).returncode == 0, "it is deleted")
    assert rig.serve(keys(4), "gone").hit_blocks == 0
    names = itertools.count(10)

    def is_storing() -> bool:
        rig.offload([key(number := next(names))], f"again {number}")
        return rig.metric("vllm:kvtier_disk_written_blocks") > 0

    wait_until(is_storing, "blocks are stored again")
    assert make(engines, known=1).serve([key(next(names) - 1)]).hit_blocks == 1


def test_a_server_that_forgets_its_files_and_comes_back_empty_costs_misses_and_no_restart(
    engines: Rigs, faulty_volume: FaultyVolume
) -> None:
    engines.write(keys(4))
    rig = make(engines, known=4)
    served = faulty_volume.path.parent / "source" / DIGEST
    with faulty_volume.failing(errno.ESTALE, "lookup", "open", "read", "create", "write", "list", "mkdir", "rename"):
        assert rig.serve(keys(4), "stale").hit_blocks == 0
        rig.offload([key(9)], "stale too")
        # What handles meant is gone for good.
        served.rename(served.with_name("forgotten"))
        served.mkdir()
    names = itertools.count(10)

    def is_storing() -> bool:
        rig.offload([key(number := next(names))], f"again {number}")
        return rig.metric("vllm:kvtier_disk_written_blocks") > 0

    wait_until(is_storing, "blocks are stored again")
    wait_until((served / "tier.json").exists, "the directory says again whose it is")
    assert make(engines, known=1).serve([key(next(names) - 1)]).hit_blocks == 1
    wait_until(lambda: len(list(served.glob("journal/*"))) >= 1, "the engine tells the others again")


def test_a_mount_that_goes_away_under_an_engine_costs_misses(engines: Rigs, faulty_volume: FaultyVolume) -> None:
    engines.write(keys(4))
    rig = make(engines, known=4)
    subprocess.run(["umount", "--lazy", str(faulty_volume.path)], check=True)
    assert rig.serve(keys(4)).hit_blocks == 0
    rig.offload(keys(2, first=10))


def test_two_engines_that_store_one_prefix_at_once_leave_it_whole(engines: Rigs) -> None:
    rigs = [make(engines) for _ in range(2)]
    contexts = [rig.begin_offload(keys(12), f"writer {number}") for number, rig in enumerate(rigs)]
    for rig, context in zip(rigs, contexts, strict=True):
        rig.settle()
        rig.finish(context)
    stored = [
        rig.metric("vllm:kvtier_disk_written_blocks") + rig.metric("vllm:kvtier_disk_present_blocks") for rig in rigs
    ]
    assert stored == [12, 12]
    assert make(engines, known=12).serve(keys(12)).hit_blocks == 12
    for rig in rigs:
        rig.tier.shutdown()
    assert check(engines.root, partial_age_seconds=0) == []


@pytest.mark.parametrize("years", [-40, 40])
def test_clocks_that_jump_neither_lose_a_block_nor_a_journal(engines: Rigs, years: int) -> None:
    then = time.time_ns() + years * 365 * 86_400 * 10**9
    early = make(engines)
    early.offload(keys(2, first=50), "before the jump")
    engines.write(keys(4), clock=lambda: then)
    for path in engines.root.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(then, then))
    late = make(engines, known=6)
    assert late.serve(keys(4), "after").hit_blocks == 4
    assert late.serve(keys(2, first=50), "before").hit_blocks == 2
    early.offload([key(60)], "goes on")
    wait_until(lambda: late.serve([key(60)]).hit_blocks == 1, "engines hear of each other")
