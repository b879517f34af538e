# SPDX-License-Identifier: Apache-2.0
"""Engines of another release of vLLM use the blocks of a generation once what they compute agrees with them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread, main_thread
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checks import check
from engine_fleet import Engines
from engine_parts import Shape, prompt_of
from engine_rig import SimulatedEngine
from rig import wait_until
from store_faults import GatedFs, flip

from kvtier_connector.cascade import releases
from kvtier_connector.cascade.comparison import LIMITS, compare
from kvtier_connector.cascade.releases import PROMPTS, ReleasedAttachment, Verdict, own_epoch
from kvtier_connector.contract.engine import encode_live
from kvtier_connector.io_workers.lookups import LookupWorker
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.store.blockstore import BlockStore, Hit, Stored
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.layout import TIER_FILE, parse_block_path

OURS = [prompt_of(6, seed=number) for number in range(1, 3 * PROMPTS)]
"""More than must agree: a prompt is left out where too many blocks wait to be compared."""
OLD, NEW = "vLLM 0.32.0", "vLLM 0.33.0"
GROUPS = Shape(windows=(None, 64))
Start = Callable[..., SimulatedEngine]
Values = np.ndarray[Any, Any]


@pytest.fixture
def start(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Start:
    def start_engine(release: str, shape: Shape | None = None, **settings: Any) -> SimulatedEngine:
        monkeypatch.setattr(releases, "release_name", lambda _image: release)
        made = engines.make(shape, **{"across_releases": "Verified", **settings})
        wait_until(made.tier.attachment._decided.is_set, "the engine has looked at the volume")
        return made

    return start_engine


@pytest.fixture
def total(start: Start) -> int:
    """Have the old release store the prompts; return how many tokens it computed."""
    engine = start(OLD)
    assert verdict_of(engine) is Verdict.ACCEPTED
    return ask(engine, OURS)


def verdict_of(engine: SimulatedEngine) -> Verdict:
    attachment = engine.tier.attachment
    assert isinstance(attachment, ReleasedAttachment)
    assert attachment.gate is not None
    return attachment.gate.verdict


def ask(engine: SimulatedEngine, prompts: list[list[int]]) -> int:
    """Ask for prompts one after the other; return how many of their tokens were computed."""
    computed = 0
    for prompt in prompts:
        computed += engine.ask(f"ask-{len(engine.answers)}", prompt)
        engine.run()
    return computed


def decide(engine: SimulatedEngine) -> Verdict:
    """Wait for the verdict, and for the directory that follows from it."""
    wait_until(lambda: verdict_of(engine) is not Verdict.COMPARING, "the engine has compared")
    if verdict_of(engine) is Verdict.REFUSED:

        def is_moved() -> bool:
            ask(engine, [prompt_of(1, seed=50)])
            return engine.metric("vllm:kvtier_disk_active") == 1

        wait_until(is_moved, "the engine uses the generation of its release")
    return verdict_of(engine)


def own(root: Path) -> list[Path]:
    return sorted(root.parent.glob(f"{root.name}.r*"))


def note_of(root: Path) -> dict[str, Any]:
    (path,) = (root / "releases").glob("r*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def spoil(root: Path, change: Callable[[bytearray], None]) -> None:
    """Write other blocks in the place of all, as another release would have stored them."""
    store = BlockStore(root)
    for path in list(root.rglob("*.kvb")):
        key = parse_block_path(str(path.relative_to(root)))
        assert key is not None
        content = bytearray(path.stat().st_size - HEADER_BYTES)
        assert isinstance(store.get(key, memoryview(content)), Hit)
        change(content)
        path.unlink()
        assert isinstance(store.put(key, memoryview(content)), Stored)


def test_blocks_of_another_release_are_read_once_others_agree(start: Start, engines: Engines, total: int) -> None:
    files, root = engines.count(), engines.rigs.root
    second = start(NEW)
    assert second.metric("vllm:kvtier_disk_release") == Verdict.COMPARING
    assert ask(second, OURS[:PROMPTS]) == total * PROMPTS // len(OURS)
    ask(second, OURS[PROMPTS:])
    assert decide(second) is Verdict.ACCEPTED
    assert engines.count() == files
    assert f"blocks of {PROMPTS} prompts agree, to 0.00%" in note_of(root)["why"]
    later = start(NEW)
    assert verdict_of(later) is Verdict.ACCEPTED
    assert ask(later, OURS) < total / 2
    assert ask(second, [prompt_of(6, seed=99)])
    assert engines.count() > files
    assert verdict_of(start(OLD)) is Verdict.ACCEPTED
    assert check(root) == []
    assert not own(root)


def test_blocks_that_differ_give_the_release_its_own_generation(
    start: Start, engines: Engines, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, closers = engines.rigs.root, set()
    for kind in (WorkerPool, LookupWorker):

        def close(self: Any, *arguments: float, really: Callable[..., bool | None] = kind.close) -> bool | None:
            closers.add(current_thread())
            return really(self, *arguments)

        monkeypatch.setattr(kind, "close", close)
    spoil(root, lambda content: content.reverse())
    second = start(NEW)
    assert ask(second, OURS) == total
    assert decide(second) is Verdict.REFUSED
    assert "differs in" in note_of(root)["why"]
    # They may hang in the volume: no request waits for that.
    wait_until(lambda: len(closers) == 2, "both are being closed")
    assert main_thread() not in closers
    ask(second, [prompt_of(6, seed=99)])
    later = start(NEW)
    assert decide(later) is Verdict.REFUSED
    assert later.metric("vllm:kvtier_disk_release") == Verdict.REFUSED
    assert ask(later, [prompt_of(6, seed=99)]) < total / len(OURS)
    (directory,) = own(root)
    assert check(directory) == []
    assert check(root) == []
    assert verdict_of(start(OLD)) is Verdict.ACCEPTED


@pytest.mark.parametrize(
    ("prompts", "before", "after", "why"),
    [
        ([], {}, {}, "has stored no blocks"),
        (OURS, {}, {"weights": 1}, "another engine.weights"),
        (OURS, {}, {"shape": GROUPS}, "another engine."),
        (OURS, {"shape": GROUPS}, {"shape": GROUPS}, "are not compared"),
    ],
)
def test_a_release_that_cannot_compare_begins_its_own_generation_at_once(  # noqa: PLR0913, PLR0917 - what is combined
    start: Start, engines: Engines, prompts: list[list[int]], before: dict[str, Any], after: dict[str, Any], why: str
) -> None:
    ask(start(OLD, **before), prompts)
    assert decide(start(NEW, **after)) is Verdict.REFUSED
    assert why in note_of(engines.rigs.root)["why"]


def test_engines_of_one_release_that_differ_are_refused_as_ever(start: Start, engines: Engines, total: int) -> None:
    other = engines.make(weights=1, across_releases="Verified")
    wait_until(lambda: bool(other.metric("vllm:kvtier_disk_refused", "engine.weights")), "it is refused")
    assert not own(engines.rigs.root)
    assert ask(other, OURS) == total


def test_too_few_prompts_end_it(start: Start, engines: Engines, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "MOST_PROMPTS", 4)
    second = start(NEW)
    ask(second, [OURS[0], *(prompt_of(6, seed=number) for number in range(60, 63))])
    assert decide(second) is Verdict.REFUSED
    assert "of 4 prompts only 1 had blocks" in note_of(engines.rigs.root)["why"]


def test_a_damaged_block_proves_nothing(start: Start, engines: Engines, total: int) -> None:
    root = engines.rigs.root
    for path in root.rglob("*.kvb"):
        flip(path)
    second = start(NEW)
    assert ask(second, OURS) == total
    wait_until(lambda: len(list((root / "quarantine").glob("*"))) >= PROMPTS, "damaged blocks were read")
    assert verdict_of(second) is Verdict.COMPARING


def test_a_volume_that_hangs_while_blocks_are_compared_holds_up_no_request(start: Start, total: int) -> None:
    fs = GatedFs(lambda call, path: call == "open" and (path or "").endswith(".kvb"))
    second = start(NEW, fs=fs)
    assert ask(second, OURS) == total
    assert verdict_of(second) is Verdict.COMPARING
    fs.open_gate()
    assert ask(second, [prompt_of(2, seed=70)])


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"release": "vLLM 0.33.0", "verdict": "accepted"}'])
def test_a_note_that_is_none_is_replaced(start: Start, engines: Engines, total: int, text: str) -> None:
    second = start(NEW)
    ask(second, OURS)
    decide(second)
    (path,) = (engines.rigs.root / "releases").glob("r*.json")
    path.write_text(text)
    third = start(NEW)
    assert verdict_of(third) is Verdict.COMPARING
    ask(third, OURS)
    assert decide(third) is Verdict.ACCEPTED
    assert note_of(engines.rigs.root)["verdict"] == "accepted"


def test_notes_are_believed_with_a_key_of_the_blocks_only(start: Start, engines: Engines, keys_dir: Path) -> None:
    live = engines.rigs.live_file(active_key="k1")
    settings = {"keys_dir": str(keys_dir), "live_file": str(live)}
    ask(start(OLD, **settings), OURS)
    second = start(NEW, **settings)
    ask(second, OURS)
    assert decide(second) is Verdict.ACCEPTED
    assert verdict_of(start(NEW, **settings)) is Verdict.ACCEPTED
    (path,) = (engines.rigs.root / "releases").glob("r*.json")
    for forged in ({"seal": "00"}, {"seal": "\u00e9"}, {"key": "k2"}, {"why": "trust me"}):
        path.write_text(json.dumps({**note_of(engines.rigs.root), **forged}))
        assert verdict_of(start(NEW, **settings)) is Verdict.COMPARING


def test_engines_that_compare_at_once_agree(start: Start, total: int) -> None:
    both = [start(NEW), start(NEW)]
    ask(both[0], OURS)
    assert decide(both[0]) is Verdict.ACCEPTED
    assert ask(both[1], OURS[:1])
    assert decide(both[1]) is Verdict.ACCEPTED


@pytest.mark.parametrize("release", [OLD, NEW])
def test_an_engine_that_was_accepted_goes_on_where_notes_are_lost_or_are_no_longer_believed(
    start: Start, engines: Engines, keys_dir: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    live = engines.rigs.live_file(active_key="k1")
    settings = {"keys_dir": str(keys_dir), "live_file": str(live), "refresh_seconds": 0.05}
    ask(start(OLD, **settings), OURS)
    engine = start(release, **settings)
    ask(engine, OURS)
    assert decide(engine) is Verdict.ACCEPTED
    live.write_text(encode_live("ReadWrite", active_key="k2"))
    (keys_dir / "k1").unlink()
    attachment, root = engine.tier.attachment, engines.rigs.root
    keyring = attachment.keyring
    assert keyring is not None
    monkeypatch.setattr(keyring, "_seconds", 0.0)
    wait_until(lambda: keyring.active() is not None and keyring.find("k1") is None, "the key is replaced")
    (root / "releases" / f"{own_epoch(release)}.json").unlink(missing_ok=True)
    # As after a remount: the description looks new.
    os.utime(root / TIER_FILE)
    since = monotonic()

    def has_looked() -> bool:
        ask(engine, [prompt_of(1, seed=50)])
        return attachment.looked_at > since or not attachment.is_readable

    wait_until(has_looked, "the engine has looked at the directory")
    assert (attachment.refused_field, attachment.is_readable) == ("", True)
    # For the others of its release.
    assert verdict_of(start(release, **settings)) is Verdict.ACCEPTED


def test_a_generation_that_another_release_made_anew_is_left(start: Start, engines: Engines, total: int) -> None:
    root, is_held = engines.rigs.root, Event()
    fs = GatedFs(lambda call, path: is_held.is_set() and call == "stat" and path.endswith(TIER_FILE))
    first = start(OLD, fs=fs, io_processes=1)
    ask(first, [prompt_of(2, seed=68)])
    is_held.set()
    # At once: the engine writes there.
    shutil.rmtree(root.rename(root.with_name("removed")), ignore_errors=True)
    assert verdict_of(start(NEW)) is Verdict.ACCEPTED
    # No block of the first engine gets a name before it has looked at the directory.
    for seed in (69, 70):
        ask(first, [prompt_of(2, seed=seed)])
        wait_until(lambda: not first.run(), "its stores have ended")
    assert engines.count() == 0
    fs.open_gate()

    def is_refused() -> bool:
        ask(first, [prompt_of(2, seed=71)])
        return bool(first.metric("vllm:kvtier_disk_refused", "founder"))

    wait_until(is_refused, "the first engine has noticed")


class WithoutLinks(FileSystem):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, f"{source} and {target}: no links")


def test_one_of_the_releases_that_begin_at_once_founds_it_also_without_links(
    start: Start, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found_too(seconds: float) -> None:
        """Found it as the old release while the new one waits for others, a moment after it did."""
        if seconds > 0.2:
            (engines.rigs.root / "releases" / "founder.json").write_text(json.dumps({"release": OLD}))

    monkeypatch.setattr(releases, "time", SimpleNamespace(sleep=found_too))
    assert decide(start(NEW, fs=WithoutLinks())) is Verdict.REFUSED
    assert "has stored no blocks" in note_of(engines.rigs.root)["why"]


VALUES = np.random.default_rng(1).normal(size=1 << 18).astype(np.float32)
NOISE = np.random.default_rng(2).normal(size=1 << 18).astype(np.float32)


def with_rotated_part(values: Values) -> Values:
    """Change the rotated 64 of the 576 numbers of each token, as MLA has them, in one of eight layers."""
    changed = values.copy()
    changed[: len(values) // 8 // 576 * 576].reshape(-1, 576)[:, -64:] *= -1
    return changed


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (VALUES, True),
        (VALUES * (1 + 0.01 * NOISE), True),
        (np.where(np.arange(len(VALUES)) % (20 * 1024) < 1024, NOISE, VALUES), True),
        (VALUES * 1.1, False),
        (np.concatenate([VALUES[: 7 << 15], NOISE[7 << 15 :]]), False),
        (np.where(np.arange(len(VALUES)) // 8192 % 2 == 1, NOISE, VALUES), False),
        (with_rotated_part(VALUES), False),
        (np.where(np.arange(len(VALUES)) == 5, np.nan, VALUES), True),
        (np.full_like(VALUES, np.nan), False),
        (np.zeros_like(VALUES), False),
    ],
    ids=["equal", "rounded", "few-tokens", "scaled", "a-layer", "keys-alone", "rotary-part", "a-nan", "nans", "zeros"],
)
@pytest.mark.parametrize("element", ["float32", "bfloat16", "float16"])
def test_blocks_are_alike_where_only_rounding_differs(element: str, other: Values, is_alike: bool) -> None:
    def encode(values: Values) -> memoryview:
        numbers = torch.from_numpy(values.astype(np.float32)).to(getattr(torch, element))
        return memoryview(numbers.view(torch.uint8).numpy().tobytes())

    assert (compare(encode(VALUES), encode(other), element).parts == 0) is is_alike


@pytest.mark.parametrize("element", sorted(LIMITS))
def test_comparing_takes_little_memory_however_long_blocks_are(element: str) -> None:
    ours = np.random.default_rng(3).integers(0, 60, 32 << 20, np.uint8)
    theirs = ours.copy()
    theirs[::1000] ^= 1
    tracemalloc.start()
    try:
        found = compare(memoryview(ours), memoryview(theirs), element)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.error > 0
    assert most < ours.nbytes / 2


@pytest.mark.parametrize(("element", "kind"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_quantized_blocks_are_alike_where_only_rounding_differs(element: str, kind: torch.dtype) -> None:
    def encode(values: Values) -> memoryview:
        return memoryview(torch.from_numpy(values).to(kind).view(torch.uint8).numpy().tobytes())

    assert compare(encode(VALUES), encode(VALUES * (1 + 0.01 * NOISE)), element).parts == 0
    assert compare(encode(VALUES), encode(VALUES * np.float32(1.5)), element).parts
    assert compare(encode(VALUES), encode(VALUES * (1 + 0.01 * NOISE)), "nvfp4").parts
