# SPDX-License-Identifier: Apache-2.0
"""Our connector under vLLM's own scheduler: what is loaded and when, and that nothing stays taken in whatever order.

Every step of a `SimulatedEngine` checks the bytes that it builds upon, so each of these tests is also one of content.
In the random one, requests come, go and are aborted, the volume fails and hangs, caches are reset, and copies lag.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import math
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from engine_fleet import LATER, PROMPT, REST, Engines, finish, restart, stored
from engine_parts import BLOCK_TOKENS, WINDOW_TOKENS, Shape, answer_of, prompt_of
from engine_rig import SimulatedEngine
from pools import pass_deadlines
from random_engine import LIMIT_SECONDS, RandomOperations, run_random
from rig import wait_until
from store_faults import FailingFs, GatedFs, flip
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.health import Breaker, BreakerLimits
from kvtier_connector.vllm_adapter import offloading_connector
from kvtier_connector.vllm_adapter.worker import KVTierWorker

WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


def is_read_of(engines: Engines, engine: SimulatedEngine, chunk: int) -> Callable[[str, str], bool]:
    name = engines.file_of(engine, PROMPT, chunk).name
    return lambda call, path: call == "preadv" and name in path


@pytest.mark.parametrize("late", [12, 19])
def test_chunks_go_to_the_gpu_while_later_ones_are_read_and_the_request_runs_when_the_last_has_landed(
    engines: Engines, writer: SimulatedEngine, late: int
) -> None:
    fs = GatedFs(is_read_of(engines, writer, late))
    reader = restart(engines, fs=fs)
    reader.add("r", PROMPT)
    reader.run(lambda: sum(blocks for _, blocks in reader.pieces) == late)
    wait_until(lambda: fs.waiting == 1, "the chunk is being read")
    for _ in range(20):
        reader.step()
    assert reader.status("r") is WAITING
    fs.open_gate()
    finish(reader)
    assert sum(blocks for _, blocks in reader.pieces) == 20
    assert reader.computed["r"] == REST


def remove(path: Path) -> FileSystem:
    path.unlink()
    return LOCAL


def refuse(path: Path) -> FileSystem:
    return FailingFs(OSError(errno.EIO, "broken"), lambda call, opened: call == "open" and opened.endswith(path.name))


def hang(path: Path) -> FileSystem:
    return GatedFs(lambda call, read: call == "preadv" and path.name in read)


class PassingFs(FileSystem):
    other: FileSystem = LOCAL

    def open(self, path: str, flags: int) -> int:
        return self.other.open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self.other.preadv(fd, buffers, offset)


def corrupt(path: Path) -> FileSystem:
    flip(path)
    return LOCAL


DAMAGES = {"corrupt": corrupt, "missing": remove, "EIO": refuse, "late": hang}


# One damage shows that the policy is set.
@pytest.mark.parametrize(("damage", "policy"), [*((each, "recompute") for each in DAMAGES), ("corrupt", "fail")])
def test_a_missing_chunk_costs_a_recompute(
    engines: Engines, writer: SimulatedEngine, monkeypatch: pytest.MonkeyPatch, damage: str, policy: str
) -> None:
    gone = engines.keys_of(writer, PROMPT)[12]
    fs = PassingFs()
    pass_deadlines(monkeypatch, lambda: isinstance(fs.other, GatedFs) and fs.other.waiting == 1)
    reader = restart(engines, Shape(load_failure_policy=policy), fs)
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


# As Cohere2 has it, a window may reach back over whole chunks: attention reads the token itself, and those before.
@pytest.mark.parametrize(
    ("windows", "count"),
    [((None, WINDOW_TOKENS), 24), ((None, WINDOW_TOKENS + 1), 24), ((WINDOW_TOKENS,), 4)],
    ids=["beside", "whole chunks", "alone"],
)
@pytest.mark.parametrize("is_longer", [False, True])
def test_windows_are_loaded_with_full_attention_and_their_end_is_found_whatever_comes_behind_it(
    engines: Engines, windows: tuple[int | None, ...], count: int, *, is_longer: bool
) -> None:
    shape = Shape(windows=windows)
    assert engines.assert_volume_holds(stored(engines, shape=shape), PROMPT) == engines.count() == count
    reader = restart(engines, shape)
    if is_longer:
        assert reader.ask("longer", [*PROMPT[:-REST], *LATER]) == len(LATER)
    else:
        assert reader.ask("r", PROMPT, answer=30) == REST
    finish(reader)


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["layers of one size", "layers of several sizes"])
def test_a_window_that_lacks_a_chunk_is_computed_from_the_beginning_of_the_prompt(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, *, is_wrapped: bool
) -> None:
    def wrap(spec: Any, vllm_config: Any, kv_config: Any) -> KVTierWorker:
        (one,) = (kv_config := copy.deepcopy(kv_config)).kv_cache_groups
        one.kv_cache_spec = UniformTypeKVCacheSpecs(BLOCK_TOKENS, dict.fromkeys(one.layer_names, one.kv_cache_spec))
        return KVTierWorker(spec, vllm_config, kv_config)

    monkeypatch.setattr(offloading_connector, "KVTierWorker", wrap if is_wrapped else KVTierWorker)
    shape = Shape(windows=(WINDOW_TOKENS,))
    stored(engines, shape=shape)
    reader = restart(engines, shape)
    flip(engines.file_of(reader, PROMPT, 18))
    assert reader.ask("r", PROMPT, answer=30) == len(PROMPT)
    finish(reader)


@pytest.mark.parametrize(("group", "chunk"), [(0, 12), (1, 18)], ids=["full", "window"])
@pytest.mark.parametrize("damage", ["corrupt", "missing", "EIO"])
def test_with_two_groups_a_chunk_of_either_that_does_not_come_costs_a_recompute_and_the_answer_is_right(
    engines: Engines, damage: str, group: int, chunk: int
) -> None:
    writer = stored(engines, shape=WINDOWED)
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


@pytest.mark.parametrize("lag", [0, 3, math.inf])
@pytest.mark.parametrize(
    "when", ["it has arrived", "nothing was handed over", "pieces are under way", "all was handed over"]
)
def test_an_abort_of_a_load_frees_everything(engines: Engines, writer: SimulatedEngine, when: str, lag: float) -> None:
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


def test_a_reset_beside_a_running_request_stores_no_block_that_has_left_its_window(engines: Engines) -> None:
    engine = engines.make(replace(WINDOWED, gpu_blocks=40))
    engine.add("answers", prompt_of(10), answer=150)
    engine.run(lambda: len(engine.scheduler.requests["answers"].output_token_ids) == 80)
    engine.ask("takes its blocks", prompt_of(6, seed=1), kvtier_store=False)
    # Otherwise nothing would be stored again.
    shutil.rmtree(engines.rigs.root / "blocks")
    engine.connector.reset_cache()
    finish(engine)
    engines.assert_volume_holds(engine, prompt_of(10))


def test_of_a_chunk_that_has_left_its_window_in_part_nothing_is_stored(engines: Engines) -> None:
    engine = engines.make(replace(WINDOWED, blocks_per_chunk=3))
    engine.ask("stores", prompt_of(12))
    engine.run()
    shutil.rmtree(engines.rigs.root / "blocks")
    engine.connector.reset_cache()
    # The GPU has its twelve blocks, and the last four of them for the layers with a window.
    assert engine.ask("again", prompt_of(12)) < BLOCK_TOKENS
    finish(engine)
    assert engines.assert_volume_holds(engine, prompt_of(12)) == 4 + 1


@pytest.mark.parametrize("chunks", [2, 6])
def test_a_session_stores_what_it_computed_of_each_part(engines: Engines, chunks: int) -> None:
    parts = prompt_of(2, seed=7), prompt_of(chunks, seed=6)
    engine = engines.make()
    for part in parts:
        engine.answers.clear()
        engine.add("session", part, resumable=True)
        engine.run(lambda: "session" in engine.answers)
    engine.abort("session")
    engine.run()
    assert engines.assert_volume_holds(engine, [*parts[0], *parts[1]]) == chunks + 2


def test_a_load_that_gave_nothing_keeps_no_room_from_the_next_one(engines: Engines) -> None:
    shape = Shape(windows=(None, WINDOW_TOKENS), gpu_blocks=120, cpu_chunks=64)
    prompt = prompt_of(14)
    first = engines.make(shape)
    first.ask("an earlier turn", prompt[: 8 * BLOCK_TOKENS + 1])
    first.ask("stores", prompt)
    first.run()
    first.close()
    second = restart(engines, replace(shape, gpu_blocks=36))
    flip(engines.file_of(second, prompt, 11))
    second.add("finds less", prompt)
    second.run(lambda: "finds less" in second.answers, most_steps=300)
    assert 0 < second.computed["finds less"] < len(prompt)


def test_fifty_requests_that_share_a_prefix_load_it_once(engines: Engines) -> None:
    shape = Shape(gpu_blocks=1000, cpu_chunks=400, blocks_per_chunk=4, most_running=64)
    shared = prompt_of(640, more=0)
    stored(engines, shared, shape)
    reader = restart(engines, shape)
    for number in range(50):
        reader.add(f"r{number}", [*shared, *prompt_of(2, seed=number)], answer=4)
    finish(reader)
    assert len(reader.answers) == 50
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 160
    assert sum(blocks for _, blocks in reader.pieces) == 640


def count_lookups(engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setattr(engine.manager, "match_prefix", calls := Mock(wraps=engine.manager.match_prefix))
    return calls


def test_a_prompt_that_the_gpu_has_costs_no_look_up(writer: SimulatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_lookups(writer, monkeypatch)
    assert writer.ask("again", PROMPT) == REST
    calls.assert_not_called()


def test_who_waits_costs_no_look_up(engines: Engines, writer: SimulatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = slow_to_look_up()
    reader = engines.make(fs=fs)
    calls = count_lookups(reader, monkeypatch)
    reader.add("probed", PROMPT)
    wait_until(lambda: reader.step() is not None and fs.waiting > 0, "the lookup hangs")
    before = calls.call_count
    for _ in range(50):
        reader.step()
    assert calls.call_count <= before + 1
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
    assert calls.call_count <= 1
    fs.open_gate()
    finish(reader)
    assert reader.computed == {"first": REST, "second": REST}
    assert len({name for name, _ in reader.pieces}) == 1


def test_reading_begins_when_a_request_arrives(engines: Engines, writer: SimulatedEngine) -> None:
    reader = restart(engines, Shape(most_running=1))
    reader.add("busy", LATER, answer=400)
    reader.step()
    reader.add("next", PROMPT)
    wait_until(lambda: reader.take_landed() >= 0 and not reader.tier.lookups.is_open, "the lookups are answered")
    reader.step()
    wait_until(lambda: reader.take_landed() == 20, "all of it is read")
    # vLLM 0.33 lets a request fetch what it needs while all that may run do.
    assert reader.status("next") in {RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS}
    assert "busy" not in reader.answers
    finish(reader)
    assert reader.computed["next"] == REST
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 20


def test_after_a_reset_no_row_is_written_that_may_still_be_read(engines: Engines, writer: SimulatedEngine) -> None:
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
    assert not reader.manager.fetches.under_way
    assert reader.metric("vllm:kvtier_disk_read_blocks") == read
    # vLLM has the worker end these pieces with the next step.
    reader.copies.lag = 0
    finish(reader)
    assert reader.computed["next"] == len(LATER) - 8 * BLOCK_TOKENS
    assert reader.computed["r"] == 8 * BLOCK_TOKENS + REST


def test_answers_are_stored_too_where_that_is_asked_for(engines: Engines) -> None:
    shape = Shape(prompt_only=False)
    writer = engines.make(shape)
    prompt = prompt_of(4)
    writer.ask("w", prompt, answer=100)
    finish(writer)
    turn = [*prompt, *writer.answers["w"], *prompt_of(1, seed=3)]
    reader = restart(engines, shape)
    assert reader.ask("r", turn) == len(turn) - (len(prompt) + 99) // BLOCK_TOKENS * BLOCK_TOKENS
    finish(reader)


@pytest.fixture
def quick_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is tried again after a while be tried again at once."""
    limits = BreakerLimits(first_backoff_seconds=0.05, longest_backoff_seconds=0.1)
    monkeypatch.setattr(
        "kvtier_connector.vllm_adapter.secondary_tier.Breaker", functools.partial(Breaker, limits=limits)
    )
    monkeypatch.setattr("kvtier_connector.cascade.transfers.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("kvtier_connector.cascade.transfers.LONGEST_RETRY_SECONDS", 0.05)


@pytest.mark.usefixtures("quick_recovery")
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EIO, "io"),
        (errno.EROFS, "read_only"),
        (errno.EACCES, "denied"),
    ],
)
def test_what_could_not_be_stored_reaches_the_volume_later(engines: Engines, error: int, cause: str) -> None:
    fs = FailingFs(OSError(error, "no"), lambda call, _: call == "pwritev")
    fs.is_failing = False
    engine = engines.make(fs=fs)
    fs.is_failing = True
    engine.ask("r", PROMPT)
    engine.run()
    assert engines.count() == 0
    assert engine.metric("vllm:kvtier_disk_shed_stores", cause) >= 1
    assert engine.metric("vllm:kvtier_disk_store_breaker") > 0
    fs.is_failing = False
    engine.run(lambda: engines.count() == 20)
    engine.run()
    assert engines.assert_volume_holds(engine, PROMPT) == 20


@pytest.mark.usefixtures("quick_recovery")
def test_what_was_computed_before_a_permit_reaches_the_volume_later(engines: Engines, writer: SimulatedEngine) -> None:
    rigs = engines.rigs
    engine = engines.make(live_file=str(rigs.live_file(needs_permit=True)), refresh_seconds=0.05)
    engine.add("r", LATER)
    engine.run(lambda: "r" in engine.answers)
    engine.run(lambda: engine.metric("vllm:kvtier_disk_shed_stores", "no_permit") == 8)
    rigs.permit(1 << 30)
    engine.run(lambda: engines.count() == 28)
    assert engines.assert_volume_holds(engine, LATER) == 8


def test_after_a_reset_no_row_is_filled_that_may_still_be_stored(engines: Engines, writer: SimulatedEngine) -> None:
    writer.ask("later", LATER)
    writer.run()
    reader = restart(engines, Shape(cpu_chunks=14))
    reader.copies.lag = math.inf
    reader.ask("r", prompt_of(10, seed=5))
    for _ in range(3):
        reader.step()
    assert reader.copies.waiting == 1
    reader.connector.reset_cache()
    reader.add("next", LATER)
    for _ in range(20):
        reader.manager.poll()
    assert not reader.manager.fetches.under_way
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 0
    # vLLM has the worker end this store with the next step.
    reader.copies.lag = 0
    # Whether it is loaded then or computed meanwhile, each step checks the bytes.
    finish(reader)


EXAMPLES = 24
OPERATIONS = 60
FAMILIES = 3
LONGEST = 14

SHAPES = {
    "plenty": Shape(),
    "small CPU tier": Shape(cpu_chunks=5),
    "small GPU": Shape(gpu_blocks=40, cpu_chunks=30),
    "everything small": Shape(gpu_blocks=36, cpu_chunks=4, most_running=3, most_tokens=64),
    "long chunks": Shape(blocks_per_chunk=3, cpu_chunks=10),
    "split": Shape(is_splitting=True, most_tokens=128),
    "split with a small GPU": Shape(is_splitting=True, gpu_blocks=40, cpu_chunks=30, most_tokens=64),
    "split with everything small": Shape(
        is_splitting=True, gpu_blocks=36, cpu_chunks=6, most_running=3, most_tokens=64
    ),
    "split with long chunks": Shape(is_splitting=True, blocks_per_chunk=3, cpu_chunks=10, most_tokens=128),
    "sliding window": Shape(windows=(None, WINDOW_TOKENS), gpu_blocks=120, cpu_chunks=24, is_zeroing=True),
    "sliding window with long chunks": Shape(
        windows=(None, WINDOW_TOKENS), blocks_per_chunk=3, gpu_blocks=120, cpu_chunks=12
    ),
}


class MoodyFs(FileSystem):
    """A volume whose blocks can be read and written, or cannot, or hang."""

    def __init__(self) -> None:
        self.read_error: int | None = None
        self.write_error: int | None = None
        self.flowing = threading.Event()
        self.flowing.set()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.flowing.wait(60)
        if self.read_error is not None:
            raise OSError(self.read_error, "moody")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.flowing.wait(60)
        if self.write_error is not None:
            raise OSError(self.write_error, "moody")
        return super().pwritev(fd, buffers, offset)

    def heal(self) -> None:
        self.read_error = self.write_error = None
        self.flowing.set()


class Machine(RandomOperations):
    weights: ClassVar = {
        10: "arrive step",
        5: "wait_for_movers heal",
        4: "restart",
        3: "sleep",
        2: "abort reset_all",
        1: "have_copies_lag change_mood hang damage remove_all reset_connector",
    }

    def __init__(self, random: Random, tried: Counter[str]) -> None:
        super().__init__(random, tried)
        self.fs = MoodyFs()
        self.asked: dict[str, tuple[list[int], str | None, int]] = {}
        self.damaged: dict[Path, bytes] = {}
        is_async, prompt_only = random.random() < 2 / 3, random.random() < 2 / 3
        self.shape = replace(SHAPES[random.choice([*SHAPES])], is_async=is_async, prompt_only=prompt_only)
        self.min_reuse, self.most_wait = random.choice([1, 1, 2]), random.choice([-1.0, 1.0])
        self.start()

    def start(self) -> None:
        engine = self.engines.make(
            self.shape, fs=self.fs, min_reuse=self.min_reuse, load_deadline_seconds=0.3, refresh_seconds=0.05
        )
        engine.connector.connector_scheduler.most_wait_seconds = self.most_wait
        engine.wait_until_attached()
        self.made = [engine]

    def arrive(self) -> None:
        random = self.random
        for _ in range(random.randint(1, 3)):
            self.count += 1
            prompt = prompt_of(random.randint(0, LONGEST), seed=random.randrange(FAMILIES), more=random.randint(1, 15))
            name, salt, answer = f"r{self.count}", random.choice([None, None, "salt"]), random.randint(1, 40)
            self.asked[name] = prompt, salt, answer
            self.engine.add(name, prompt, salt=salt, answer=answer)

    def wait_for_movers(self) -> None:
        for _ in range(10):
            self.engine.step()
            threading.Event().wait(0.001)

    def change_mood(self) -> None:
        self.fs.read_error = self.random.choice([None, None, errno.EIO])
        self.fs.write_error = self.random.choice([None, None, errno.ENOSPC])

    def hang(self) -> None:
        self.fs.flowing.clear()

    def heal(self) -> None:
        self.fs.heal()

    def damage(self) -> None:
        files = sorted((self.engines.rigs.root / "blocks").rglob("*.kvb"))
        if files:
            path = self.random.choice(files)
            if self.random.random() < 1 / 2:
                self.damaged[path] = path.read_bytes()[:-1] + b"?"
                path.write_bytes(self.damaged[path])
            else:
                path.unlink()

    def remove_all(self) -> None:
        root = self.engines.rigs.root
        shutil.rmtree(self.random.choice([root, root / "blocks"]), ignore_errors=True)

    def reset_connector(self) -> None:
        self.engine.connector.reset_cache()

    def reset_all(self) -> None:
        # Where steps or loads are in flight vLLM takes requests back, and refuses the rest.
        with contextlib.suppress(RuntimeError):
            self.reset_caches()

    def sleep(self) -> None:
        if is_aborting := self.random.random() < 1 / 2:
            self.asked.clear()
        self.engine.sleep(is_aborting=is_aborting)

    def restart(self) -> None:
        self.fs.heal()
        self.check_answers()
        self.note()
        self.engine.close()
        self.asked.clear()
        self.start()

    def check_answers(self) -> None:
        for name, answer in self.engine.answers.items():
            if name in self.asked.keys() - self.aborted:
                prompt, salt, length = self.asked[name]
                assert answer == answer_of(prompt, length, salt), f"{name} is answered otherwise than without a cache"

    def end(self) -> None:
        self.fs.heal()
        self.engine.run()
        assert self.asked.keys() - self.aborted <= self.engine.answers.keys(), "a request was not answered"
        self.check_answers()
        self.engine.assert_nothing_is_left()
        self.note()
        for path, content in self.damaged.items():
            if path.exists() and path.read_bytes() == content:
                # Damage is noticed when a request asks for the block.
                path.unlink()
        for family in range(FAMILIES):
            for salt in (None, "salt"):
                self.engines.assert_volume_holds(self.engine, prompt_of(LONGEST, seed=family), salt=salt)

    def close(self) -> None:
        self.fs.heal()
        super().close()


@pytest.mark.timeout(LIMIT_SECONDS)
def test_any_order_of_events_leaves_right_answers_and_nothing_taken() -> None:
    tried = run_random(Machine, examples=EXAMPLES, operations=OPERATIONS)
    assert min(tried["requests"], tried["preemptions"], tried["blocks read"], tried["joins"]) > 0
