# SPDX-License-Identifier: Apache-2.0
"""Our connector under vLLM's own scheduler: what is loaded, when it reaches the GPU, and what becomes of failures.

Every step of a `SimulatedEngine` checks the bytes that it builds upon, so each of these tests is also one of content.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from engine_fleet import Engines
from engine_parts import BLOCK_TOKENS, WINDOW_TOKENS, Shape, prompt_of
from engine_rig import SimulatedEngine
from prompts import LATER, PROMPT, REST, finish, restart
from rig import wait_until
from store_faults import FailingFs, GatedFs
from vllm.v1.request import RequestStatus

from kvtier_connector.store.fs import LOCAL, FileSystem

WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


def is_read_of(engines: Engines, engine: SimulatedEngine, chunk: int) -> Callable[[str, str], bool]:
    name = engines.file_of(engine, PROMPT, chunk).name
    return lambda call, path: call == "preadv" and name in path


def test_what_one_engine_computed_another_one_loads(engines: Engines, writer: SimulatedEngine) -> None:
    reader = restart(engines)
    assert reader.ask("reader", PROMPT, answer=40) == REST
    finish(reader)
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 20
    assert reader.metric("vllm:kvtier_disk_written_blocks") == 0


def test_a_request_runs_when_the_last_chunk_of_its_prefix_has_landed(engines: Engines, writer: SimulatedEngine) -> None:
    fs = GatedFs(is_read_of(engines, writer, 19))
    reader = restart(engines, fs=fs)
    reader.add("r", PROMPT)
    reader.run(lambda: reader.status("r") is WAITING)
    wait_until(lambda: fs.waiting == 1, "the last chunk is being read")
    for _ in range(20):
        reader.step()
    assert reader.status("r") is WAITING
    fs.open_gate()
    reader.run()
    assert reader.computed["r"] == REST
    reader.assert_nothing_is_left()


def test_chunks_go_to_the_gpu_while_later_ones_are_still_being_read(engines: Engines, writer: SimulatedEngine) -> None:
    fs = GatedFs(is_read_of(engines, writer, 12))
    reader = restart(engines, fs=fs)
    reader.add("r", PROMPT)
    reader.run(lambda: sum(blocks for _, blocks in reader.pieces) == 12)
    assert reader.status("r") is WAITING
    fs.open_gate()
    finish(reader)
    assert sum(blocks for _, blocks in reader.pieces) == 20
    assert reader.computed["r"] == REST


def flip(path: Path) -> FileSystem:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return LOCAL


def remove(path: Path) -> FileSystem:
    path.unlink()
    return LOCAL


def refuse(path: Path) -> FileSystem:
    return FailingFs(OSError(errno.EIO, "broken"), lambda call, opened: call == "open" and opened.endswith(path.name))


def hang(path: Path) -> FileSystem:
    return GatedFs(lambda call, read: call == "preadv" and path.name in read)


class PassingFs(FileSystem):
    """Leaves it to another, which may come later."""

    other: FileSystem = LOCAL

    def open(self, path: str, flags: int) -> int:
        return self.other.open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self.other.preadv(fd, buffers, offset)


DAMAGES = {"corrupt": flip, "missing": remove, "EIO": refuse, "late": hang}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_chunk_that_does_not_come_costs_a_recompute_from_there_on(
    engines: Engines, writer: SimulatedEngine, damage: str, policy: str
) -> None:
    if policy == "fail" and damage != "corrupt":
        pytest.skip("one damage shows that the policy is set")
    gone = engines.keys_of(writer, PROMPT)[12]
    fs = PassingFs()
    deadline = 0.4 if damage == "late" else 20.0
    reader = restart(engines, Shape(load_failure_policy=policy), fs, load_deadline_seconds=deadline)
    fs.other = DAMAGES[damage](engines.file_of(writer, PROMPT, 12))
    assert reader.ask("r", PROMPT, answer=40) == 8 * BLOCK_TOKENS + REST
    if isinstance(fs.other, GatedFs):
        fs.other.open_gate()
    finish(reader)
    # What was computed is in the CPU tier, and on the volume anew where it was gone.
    assert reader.manager.are_ready([gone])
    assert engines.assert_volume_holds(reader, PROMPT) == 20
    assert reader.ask("again", PROMPT) == REST


WINDOWED = Shape(windows=(None, WINDOW_TOKENS))


def test_full_attention_and_a_sliding_window_are_loaded_together(engines: Engines) -> None:
    writer = engines.make(WINDOWED)
    assert writer.ask("w", PROMPT) == len(PROMPT)
    finish(writer)
    assert engines.assert_volume_holds(writer, PROMPT) > 20
    reader = restart(engines, WINDOWED)
    assert reader.ask("r", PROMPT, answer=30) == REST
    finish(reader)


def test_a_window_that_reaches_back_over_whole_chunks_is_found_where_only_they_are_stored(engines: Engines) -> None:
    # As Cohere2 has it: attention reads the token itself, and a whole number of chunks before.
    shape = Shape(windows=(None, WINDOW_TOKENS + 1))
    writer = engines.make(shape)
    assert writer.ask("w", PROMPT) == len(PROMPT)
    finish(writer)
    assert engines.count() == 20 + 4
    reader = restart(engines, shape)
    assert reader.ask("r", PROMPT, answer=30) == REST
    finish(reader)


@pytest.mark.parametrize("windows", [(WINDOW_TOKENS,), (None, WINDOW_TOKENS)], ids=["windows-alone", "windows-beside"])
def test_the_end_of_what_is_stored_is_found_for_windows_whatever_comes_behind_it(
    engines: Engines, windows: tuple[int | None, ...]
) -> None:
    shape = Shape(windows=windows)
    writer = engines.make(shape)
    writer.ask("w", PROMPT)
    finish(writer)
    reader = restart(engines, shape)
    assert reader.ask("longer", [*PROMPT[:-REST], *LATER]) == len(LATER)
    finish(reader)


@pytest.mark.parametrize(("group", "chunk"), [(0, 12), (1, 18)], ids=["full", "window"])
@pytest.mark.parametrize("damage", ["corrupt", "missing", "EIO"])
def test_with_two_groups_a_chunk_of_either_that_does_not_come_costs_a_recompute_and_the_answer_is_right(
    engines: Engines, damage: str, group: int, chunk: int
) -> None:
    writer = engines.make(WINDOWED)
    writer.ask("w", PROMPT)
    finish(writer)
    fs = PassingFs()
    reader = restart(engines, WINDOWED, fs)
    fs.other = DAMAGES[damage](engines.file_of(writer, PROMPT, chunk, group=group))
    assert reader.ask("r", PROMPT, answer=30) > REST
    finish(reader)
    assert reader.ask("again", PROMPT) == REST
    finish(reader)
    assert engines.assert_volume_holds(reader, PROMPT) == engines.count()


def slow_to_look_up() -> GatedFs:
    """Return a volume that answers lookups of blocks when it is told to."""
    return GatedFs(lambda call, path: call == "stat" and path.endswith(".kvb"))


def test_a_request_aborted_while_it_is_looked_up_leaves_nothing(engines: Engines, writer: SimulatedEngine) -> None:
    fs = slow_to_look_up()
    reader = engines.make(fs=fs)
    reader.add("r", PROMPT)
    wait_until(lambda: reader.step() is not None and fs.waiting > 0, "the lookup hangs")
    reader.abort("r")
    fs.open_gate()
    finish(reader)
    assert reader.ask("next", PROMPT) == REST
    finish(reader)


@pytest.mark.parametrize("lag", [0, 3, math.inf])
@pytest.mark.parametrize(
    "when", ["it has arrived", "nothing was handed over", "pieces are under way", "all was handed over"]
)
def test_a_request_aborted_while_it_is_loaded_frees_everything(
    engines: Engines, writer: SimulatedEngine, when: str, lag: float
) -> None:
    held = {"nothing was handed over": 0, "pieces are under way": 12}.get(when)
    fs = GatedFs(is_read_of(engines, writer, held) if held is not None else lambda call, path: False)
    reader = restart(engines, fs=fs)
    reader.copies.lag = lag
    reader.add("r", PROMPT)
    if when != "it has arrived":
        reader.step()
        wanted = 20 if held is None else held
        if wanted == 20 and lag != math.inf:
            reader.copies.lag = math.inf
        reader.run(lambda: sum(blocks for _, blocks in reader.pieces) == wanted)
    reader.abort("r")
    for _ in range(5):
        reader.step()
    fs.open_gate()
    reader.copies.lag = 0
    finish(reader)
    # What was read stays, and is not read again.
    assert reader.ask("next", PROMPT) == REST
    finish(reader)
    assert reader.metric("vllm:kvtier_disk_read_blocks") <= 21


def test_a_preempted_request_finds_its_own_chunks_again(engines: Engines) -> None:
    prompt = prompt_of(16)
    engine = engines.make()
    engine.add("r", prompt, answer=60)
    engine.run(lambda: len(engine.scheduler.requests["r"].output_token_ids) == 20)
    assert engine.computed["r"] == len(prompt)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.computed["r"] == len(prompt) + len(prompt) - 16 * BLOCK_TOKENS
    engine.assert_nothing_is_left()


def test_fifty_requests_that_share_a_prefix_load_it_once(engines: Engines) -> None:
    shape = Shape(gpu_blocks=1000, cpu_chunks=400, blocks_per_chunk=4, most_running=64)
    shared = prompt_of(640, more=0)
    writer = engines.make(shape)
    writer.ask("w", shared)
    finish(writer)
    reader = restart(engines, shape)
    for number in range(50):
        reader.add(f"r{number}", [*shared, *prompt_of(2, seed=number)], answer=4)
    finish(reader)
    assert len(reader.answers) == 50
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 160
    assert sum(blocks for _, blocks in reader.pieces) == 640


def count_lookups(engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one with each look-up."""
    calls: list[int] = []
    real = engine.manager.match_prefix

    def match(keys: Sequence[bytes], context: object) -> object:
        calls.append(engine.steps)
        return real(keys, context)

    monkeypatch.setattr(engine.manager, "match_prefix", match)
    return calls


def test_a_request_that_waits_costs_no_look_up(
    engines: Engines, writer: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = slow_to_look_up()
    reader = engines.make(fs=fs)
    calls = count_lookups(reader, monkeypatch)
    reader.add("probed", PROMPT)
    wait_until(lambda: reader.step() is not None and fs.waiting > 0, "the lookup hangs")
    before = len(calls)
    for _ in range(50):
        reader.step()
    assert len(calls) <= before + 1
    fs.open_gate()
    finish(reader)
    assert reader.computed["probed"] == REST


def test_a_request_that_waits_for_the_load_of_another_costs_no_look_up_and_shares_it(
    engines: Engines, writer: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = GatedFs(is_read_of(engines, writer, 19))
    reader = restart(engines, fs=fs)
    reader.add("first", PROMPT)
    reader.add("second", PROMPT)
    # Which one loads depends on which lookup is answered first.
    reader.run(lambda: WAITING in {reader.status("first"), reader.status("second")} and fs.waiting == 1)
    for _ in range(5):
        reader.step()
    calls = count_lookups(reader, monkeypatch)
    for _ in range(50):
        reader.step()
    assert len(calls) <= 1
    fs.open_gate()
    finish(reader)
    assert reader.computed == {"first": REST, "second": REST}
    assert len({name for name, _ in reader.pieces}) == 1


def test_reading_begins_when_a_request_arrives(engines: Engines, writer: SimulatedEngine) -> None:
    reader = restart(engines, Shape(most_running=1))
    reader.add("busy", LATER, answer=400)
    reader.step()
    reader.add("next", PROMPT)
    reader.run(lambda: reader.manager.are_ready(engines.keys_of(reader, PROMPT)), most_steps=300)
    # vLLM 0.33 lets a request fetch what it needs while all that may run do.
    assert reader.status("next") in {RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS}
    assert "busy" not in reader.answers
    finish(reader)
    assert reader.computed["next"] == REST
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 20


def test_after_a_reset_no_row_is_written_while_a_piece_of_before_may_still_be_read(
    engines: Engines, writer: SimulatedEngine
) -> None:
    writer.ask("later", LATER)
    writer.run()
    fs = GatedFs(is_read_of(engines, writer, 12))
    # Few rows, so that what is loaded next takes those that the pieces are copied from.
    reader = restart(engines, Shape(cpu_chunks=14), fs)
    reader.copies.lag = math.inf
    reader.add("r", PROMPT)
    reader.run(lambda: sum(blocks for _, blocks in reader.pieces) == 12)
    fs.open_gate()
    reader.connector.reset_cache()
    read = reader.metric("vllm:kvtier_disk_read_blocks")
    reader.add("next", LATER)
    for _ in range(20):
        reader.manager.poll()
    assert len(reader.manager.fetches) == 0
    assert reader.metric("vllm:kvtier_disk_read_blocks") == read
    # vLLM has the worker end these pieces with the next step.
    reader.copies.lag = 0
    finish(reader)
    assert reader.computed["next"] == len(LATER) - 8 * BLOCK_TOKENS
    assert reader.computed["r"] == 8 * BLOCK_TOKENS + REST


def test_resets_at_any_moment_of_a_load_leave_right_bytes(engines: Engines, writer: SimulatedEngine) -> None:
    for steps in range(1, 6):
        reader = restart(engines)
        reader.copies.lag = 1
        reader.add("r", PROMPT, answer=10)
        for _ in range(steps):
            reader.step()
        reader.scheduler.reset_prefix_cache(reset_connector=True)
        reader.add("other", PROMPT, answer=10)
        finish(reader)
        reader.close()


@pytest.mark.parametrize("lag", [0, 2])
def test_answers_are_right_where_the_gpu_is_so_small_that_requests_preempt_each_other(
    engines: Engines, writer: SimulatedEngine, lag: int
) -> None:
    engine = restart(engines, Shape(gpu_blocks=30, cpu_chunks=60))
    engine.copies.lag = lag
    prompts = [prompt_of(8, seed=number % 3) for number in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, answer=90)
    finish(engine)
    assert engine.preemptions > 0
    again = {f"again {number}": prompt for number, prompt in enumerate(prompts[:3])}
    for name, prompt in again.items():
        engine.ask(name, prompt, answer=5)


def test_what_waits_for_a_row_comes_for_the_others_when_the_first_who_asked_ends(
    engines: Engines, writer: SimulatedEngine
) -> None:
    reader = restart(engines, Shape(cpu_chunks=4))
    reader.copies.lag = math.inf
    for name in ("a", "b"):
        reader.add(name, PROMPT)
    reader.run(lambda: reader.copies.waiting > 0)
    reader.abort("a")
    reader.copies.lag = 0
    finish(reader)
    assert reader.computed["b"] <= len(PROMPT)
