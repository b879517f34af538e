# SPDX-License-Identifier: Apache-2.0
"""The disk tier with movers: what it promises with threads, it promises with processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import ROW_BYTES, Rig, Rigs, key, keys, wait_until

from kvtier_connector import contract
from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.store.format import HEADER_BYTES, Header, decode_header


def movers() -> list[int]:
    """Return the movers of this process."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_child = int((directory / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            if is_child and b"kvtier_connector.movers.process" in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
    return found


@pytest.fixture
def rig(rigs: Rigs) -> Iterator[Rig]:
    made = rigs.make(io_processes=2)
    assert len(movers()) == 2
    yield made
    made.close()
    assert not movers()


def test_what_one_engine_stored_another_one_serves(rigs: Rigs, rig: Rig) -> None:
    rig.offload(keys(20))
    reader = rigs.make(io_processes=3)

    assert reader.serve(keys(20)).hit_blocks == 20
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 20
    assert reader.metric("vllm:kvtier_disk_read_bytes") == 20 * (ROW_BYTES + HEADER_BYTES)
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 20
    reader.close()


def test_a_damaged_block_is_a_miss_counted_by_cause_and_is_written_anew(rigs: Rigs) -> None:
    rigs.write(keys(3))
    path = rigs.block_file(key(1))
    path.write_bytes(path.read_bytes()[:-1])
    rig = rigs.make(io_processes=2)

    assert rig.serve(keys(3), "first").hit_blocks == 1
    assert rig.metric("vllm:kvtier_disk_misses", "truncated") == 1
    rig.offload([key(1)])
    assert rigs.make().serve([key(1)]).hit_blocks == 1


def test_the_limit_of_the_tier_holds_for_what_movers_write(rigs: Rigs) -> None:
    rig = rigs.make(io_processes=2, max_bytes=5 * (ROW_BYTES + HEADER_BYTES))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_used_bytes") == 0 and rig.tier.has_pending_work() is False, "open")
    rig.offload(keys(9))

    assert rig.metric("vllm:kvtier_disk_written_blocks") == 5
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_budget") == 4
    assert rig.metric("vllm:kvtier_disk_used_bytes") == 5 * (ROW_BYTES + HEADER_BYTES)


def test_movers_that_stop_cost_a_deadline_and_are_replaced(rigs: Rigs) -> None:
    rigs.write(keys(6))
    rig = rigs.make(io_processes=2, load_deadline_seconds=0.5, rescan_seconds=0.2)
    stopped = movers()
    for process in stopped:
        os.kill(process, signal.SIGSTOP)

    assert rig.serve(keys(6), "stopped").hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "deadline") == 6
    for process in stopped:
        # Stopped while they waited for work, they hold no task that would make them look stuck.
        os.kill(process, signal.SIGKILL)
    attempts = itertools.count()
    wait_until(lambda: rig.serve(keys(6), f"again {next(attempts)}").hit_blocks == 6, "loads work again")
    assert not set(movers()) & set(stopped)


def test_resetting_the_cache_waits_for_the_movers(rigs: Rigs) -> None:
    rigs.write(keys(6))
    rig = rigs.make(io_processes=2)
    context = rig.request("r")

    def is_loading() -> bool:
        assert rig.find_prefix(keys(6), context) is None
        rig.end_step()
        return rig.tier.has_pending_work()

    wait_until(is_loading, "the blocks are being loaded")
    rig.manager.reset_cache()
    assert not rig.tier.has_pending_work()
    rig.finish(context)


def test_no_number_of_processes_below_zero_is_accepted(rigs: Rigs) -> None:
    with pytest.raises(ConfigInvalid, match="io_processes=-1 must be between 0"):
        rigs.config_file(io_processes=-1)


def test_movers_encrypt_with_the_active_key_and_read_nothing_without_it(rigs: Rigs, tmp_path: Path) -> None:
    keys_dir = tmp_path / "keys"
    keys_dir.mkdir()
    (keys_dir / "k1").write_bytes(bytes(range(32)))
    live = tmp_path / "live.json"
    live.write_text(contract.encode_live("ReadWrite", active_key="k1"))
    settings = {"io_processes": 2, "keys_dir": str(keys_dir), "live_file": str(live)}
    rigs.make(**settings).offload(keys(5))

    assert rigs.make(**settings).serve(keys(5)).hit_blocks == 5
    header = decode_header(rigs.block_file(key(1)).read_bytes())
    assert isinstance(header, Header)
    assert header.seal.key_id == "k1"
    assert rigs.make(io_processes=2).serve(keys(5), "keyless").hit_blocks == 0
