# SPDX-License-Identifier: Apache-2.0
"""The verbs on a directory: what goes is what was asked for, also while engines store."""

from __future__ import annotations

import itertools
import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from command import Command
from store_faults import HookedFs
from tier_dir import BLOCK_BYTES, DAMAGED, Engine, Rig, key, payload

import kvtier_connector
from kvtier_cli import app
from kvtier_connector.janitor.commands import purge_blocks
from kvtier_connector.store.blockstore import BlockStore, Stored, StoreFault, StoreOutcome
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import Purge, PurgeLog, record_purge
from kvtier_connector.store.layout import (
    BESIDE_GENERATIONS,
    NO_LINEAGE,
    PURGES_FILE,
    BlockKey,
    Lineage,
    adapter_name_label,
    block_path,
)
from kvtier_connector.store.permit import PERMIT_FILE

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

CONNECTOR = Path(kvtier_connector.__file__).parents[1]
OUTDATED = Path(__file__).parents[1] / "data/block_v2_gmac.kvb"
OPERATOR = Path(app.__file__).parents[1]


@pytest.fixture
def filled(rig: Rig) -> Engine:
    engine = rig.engine()
    engine.put_chain(*range(6))
    return engine


@pytest.mark.parametrize(("yes", "left"), [((), list(range(6))), (("--yes",), [])])
def test_a_purge_needs_yes(filled: Engine, rig: Rig, kvtier: Command, yes: tuple[str, ...], left: list[int]) -> None:
    answer = kvtier.json("purge", rig.dir, "--all", *yes)
    assert (answer["dryRun"], answer["blocks"], answer["bytes"]) == (not yes, 6, 6 * BLOCK_BYTES)
    assert filled.there(range(6)) == left


def test_what_an_adapter_computed_goes_alone(filled: Engine, rig: Rig, kvtier: Command) -> None:
    for number, (name, contents) in enumerate([("sql", "a"), ("sql", "b"), ("chat", "a")], start=10):
        filled.put(number, lineage=Lineage(adapter=adapter_name_label(name) + 16 * contents))
        filled.put(number, tenant="alice", lineage=Lineage(adapter=adapter_name_label(name) + 16 * contents))
    assert kvtier.json("purge", rig.dir, "--lora", "sql")["blocks"] == 4
    answer = kvtier.json("purge", rig.dir, "--lora", "sql", "--tenant", "alice", "--yes")
    assert answer["blocks"] == 2
    answer = kvtier.json("purge", rig.dir, "--lora", "sql", "--yes")
    assert answer["blocks"] == 2
    assert filled.there(range(20)) == [*range(6), 12]
    assert filled.there(range(20), tenant="alice") == [12]
    assert kvtier.json("purge", rig.dir, "--lora", "sql", "--yes")["blocks"] == 0
    (filled.root / block_path(key(12))).write_bytes(OUTDATED.read_bytes())
    (generation,) = kvtier.json("purge", rig.dir, "--lora", "chat", "--yes", code=1)["generations"]
    assert "blocks of another release do not tell their adapter; purge this generation" in generation["problem"]
    assert generation["failed"] == 1


def test_a_tenant_goes_with_damage_or_a_generation(filled: Engine, rig: Rig, kvtier: Command) -> None:
    filled.put(1, 2, tenant="alice")
    damaged = filled.root / "tenants/alice" / DAMAGED
    damaged.parent.mkdir()
    damaged.write_bytes(b"secret")
    damaged.with_name("notes.txt").write_text("of a person")
    answer = kvtier.json("purge", rig.dir, "--tenant", "alice", "--yes")
    assert (answer["blocks"], answer["generations"][0]["quarantined"]) == (2, 1)
    other = rig.engine("bb")
    other.put(1)
    kvtier.json("purge", rig.dir, "--generation", "bb", "--yes")
    assert other.there(range(6)) == []
    assert filled.there(range(6)) == list(range(6))
    assert [path.name for path in damaged.parent.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "arguments", [[], ["--all", "--tenant", "alice"], ["--all", "--lora", "sql"], ["--older-than", "7d"]]
)
def test_an_unclear_purge_is_misuse(filled: Engine, rig: Rig, kvtier: Command, arguments: list[str]) -> None:
    kvtier("purge", rig.dir, *arguments, code=2)
    assert len(filled.there(range(6))) == 6


@pytest.mark.parametrize(("arguments", "complaint"), TABLES["misuse"])
def test_a_word_that_cannot_be_meant_is_misuse_and_the_form_is_named(
    filled: Engine, rig: Rig, kvtier: Command, arguments: list[str], complaint: str
) -> None:
    assert complaint in kvtier.fails(*(word.replace("DIR", str(rig.dir)) for word in arguments), code=2)


@pytest.mark.parametrize(("arguments", "complaint"), TABLES["refused"])
def test_what_cannot_be_done_is_refused_and_nothing_is_removed(
    filled: Engine, rig: Rig, kvtier: Command, arguments: list[str], complaint: str
) -> None:
    filled.put(1, tenant="alice")
    rig.engine("bb").put(1, tenant="bob")
    (rig.dir / "blob").write_bytes(b"\xff")
    assert complaint in kvtier.fails(*(word.replace("DIR", str(rig.dir)) for word in arguments))
    assert filled.there(range(6)) == list(range(6))


def test_a_generation_named_through_a_link_is_purged(filled: Engine, rig: Rig, tmp_path: Path, kvtier: Command) -> None:
    (tmp_path / "short").symlink_to(filled.root)
    assert kvtier.json("purge", tmp_path / "short", "--all", "--yes")["blocks"] == 6
    assert filled.there(range(6)) == []


def test_a_sweep_by_hand_keeps_the_limits_given(filled: Engine, rig: Rig, kvtier: Command) -> None:
    limits = ("--max-bytes", str(6 * BLOCK_BYTES), "--high", "80%", "--low", "50%")
    assert kvtier.json("gc", rig.dir, *limits)["evicted"] == {"budget": 3}
    assert filled.there(range(6)) == list(range(6))
    assert kvtier.json("gc", rig.dir, *limits, "--yes")["evicted"] == {"budget": 3}
    assert filled.there(range(6)) == [0, 1, 2]
    assert not (rig.dir / PERMIT_FILE).exists()
    # More than half of it, so every file is looked at first.
    limits = ("--max-bytes", str(3 * BLOCK_BYTES), "--low", "1%")
    swept = kvtier.json("gc", rig.dir, *limits, "--yes")
    assert (swept["evicted"], swept["blocks"]) == ({"budget": 3}, 0)


@pytest.mark.parametrize("verb", [["inspect"], ["check"], ["purge", "--all"], ["gc"]])
def test_a_missing_tier_is_an_error(tmp_path: Path, kvtier: Command, verb: list[str]) -> None:
    (tmp_path / "holiday.jpg").touch()
    assert "holds no tier" in kvtier.fails(verb[0], tmp_path, *verb[1:])


@pytest.mark.parametrize("verb", [["inspect"], ["check"], ["purge", "--all", "--yes"], ["gc", "--yes"]])
@pytest.mark.parametrize("files", [(), sorted(BESIDE_GENERATIONS)])
def test_a_tier_without_blocks_is_healthy(
    tmp_path: Path, kvtier: Command, verb: list[str], files: Sequence[str]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert "nothing yet" in kvtier(verb[0], tmp_path, *verb[1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == list(files)


def kvtier(*words: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    script = TABLES["BLOCKED"].format(blocked=set(blocked), paths=[str(CONNECTOR), str(OPERATOR)], words=list(words))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_no_verb_waits_for_libraries_that_it_does_not_use(filled: Engine, rig: Rig) -> None:
    blocked = ("kopf", "kubernetes", "pydantic", "yaml", "vllm", "torch", "aiohttp")
    for words in (["inspect", str(rig.dir)], ["check", str(rig.dir)], ["purge", str(rig.dir), "--all"], ["--version"]):
        done = kvtier(*words, blocked=blocked)
        assert (done.returncode, done.stderr) == (0, "")


def test_every_verb_is_listed_before_anything_is_imported() -> None:
    listed = kvtier("--help", blocked=("numpy", "blake3", "vllm", "torch", "yaml", "pydantic", "kubernetes"))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert all(f"  {name} " in listed.stdout for name in app.VERBS)


def test_without_the_package_of_a_checksum_a_check_says_what_is_missing(filled: Engine, rig: Rig) -> None:
    done = kvtier("check", str(rig.dir), blocked=("cryptography",))
    assert (done.returncode, "pip install cryptography" in done.stdout) == (1, True)


def test_several_tiers_are_not_confused(rig: Rig, tmp_path: Path, kvtier: Command) -> None:
    for name in ("one", "two"):
        Engine(tmp_path / name, "aa", rig.clock)
    assert "holds several tiers; name one of" in kvtier.fails("gc", tmp_path)


QUEUED = 2000
WRITERS = 4
SQL = Lineage(adapter=adapter_name_label("sql") + 16 * "a")
ALL = Purge()
ADAPTER = adapter_name_label("sql")


class Writers:
    """Several writers with a queue that is full when the purge comes; each is an engine's worker, with a store."""

    def __init__(self, root: Path) -> None:
        self.outcomes: Counter[StoreOutcome] = Counter()
        self._tasks: queue.SimpleQueue[tuple[BlockKey, Lineage, float]] = queue.SimpleQueue()
        self._stored, self._may_end, self._counting = threading.Semaphore(0), threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(root,)) for _ in range(WRITERS)]

    def order(self, of: BlockKey, lineage: Lineage = NO_LINEAGE) -> None:
        self._tasks.put((of, lineage, time.monotonic()))

    def start_and_wait_for(self, count: int) -> None:
        for thread in self._threads:
            thread.start()
        for _ in range(count):
            assert self._stored.acquire(timeout=60)

    def join(self) -> None:
        self._may_end.set()
        for thread in self._threads:
            thread.join(60)

    def _work(self, root: Path) -> None:
        store = BlockStore(root, direct=False)
        store.learn_purges()
        while True:
            if self._tasks.qsize() < 100:
                self._may_end.wait(60)
            try:
                of, lineage, queued = self._tasks.get_nowait()
            except queue.Empty:
                return
            outcome = store.put(of, payload(1), lineage, queued=queued)
            with self._counting:
                self.outcomes[outcome] += 1
            self._stored.release()


CASES = {
    "all": (ALL, "", NO_LINEAGE),
    "a tenant": (Purge("alice"), "alice", NO_LINEAGE),
    "an adapter": (Purge(None, ADAPTER), "", SQL),
    "an adapter of a tenant": (Purge("alice", ADAPTER), "alice", SQL),
}


@pytest.mark.parametrize("case", CASES)
def test_of_2000_queued_stores_none_is_left_after_a_purge(rig: Rig, case: str) -> None:
    criteria, tenant, lineage = CASES[case]
    engine = rig.engine()
    engine.put(QUEUED, tenant=tenant, lineage=lineage)
    writers = Writers(engine.root)
    for number in range(QUEUED):
        writers.order(key(number, tenant), lineage)
    writers.start_and_wait_for(100)
    (purged,) = purge_blocks(rig.dir, criteria, is_dry=False)
    writers.join()
    assert (purged.problem, purged.failed) == ("", 0)
    assert list(engine.root.rglob("*.kvb*")) == []
    assert set(writers.outcomes) <= {Stored(BLOCK_BYTES), StoreFault.PURGED}
    assert writers.outcomes[StoreFault.PURGED] > 0
    assert BlockStore(engine.root, direct=False).put(key(1, tenant), payload(1), lineage) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize("case", ["a tenant", "an adapter"])
def test_what_does_not_match_is_stored_all_the_same(rig: Rig, engine: Engine, case: str) -> None:
    engine.put(QUEUED, tenant="alice", lineage=SQL)
    writers = Writers(engine.root)
    for number in range(400):
        writers.order(key(number, "bob"), Lineage(adapter=adapter_name_label("chat") + 16 * "a"))
    writers.start_and_wait_for(10)
    purge_blocks(rig.dir, CASES[case][0], is_dry=False)
    writers.join()
    assert writers.outcomes == {Stored(BLOCK_BYTES): 400}
    assert len(engine.there(range(400), tenant="bob")) == 400


def test_a_purge_between_the_look_and_the_rename_takes_the_partial_file(rig: Rig, engine: Engine) -> None:
    purged: list[int] = []

    def purge(call: str, path: str) -> None:
        """Purge all when a writer has looked at the marks, and is about to rename."""
        if call == "rename" and path.endswith("-partial") and not purged:
            purged.append(purge_blocks(rig.dir, ALL, is_dry=False)[0].partials)

    store = BlockStore(engine.root, fs=HookedFs(purge), direct=False)
    assert store.put(key(1), payload(1), queued=time.monotonic()) is StoreFault.PURGED
    assert purged == [1]
    assert list(engine.root.rglob("*.kvb*")) == []


def test_partial_files_go_with_what_they_belong_to_however_young_and_are_counted(rig: Rig, engine: Engine) -> None:
    engine.put(1, tenant="alice", lineage=SQL)
    engine.put(1, tenant="bob")
    for tenant in ("alice", "bob"):
        path = engine.root / block_path(key(1, tenant))
        whole = path.read_bytes()
        for number in range(2):
            path.with_name(f".{path.name}.{number:032x}-partial").write_bytes(whole)
    outcomes = []
    for criteria, is_dry in itertools.product((Purge("alice"), Purge(None, ADAPTER), ALL), (True, False)):
        if criteria != Purge(None, ADAPTER) or is_dry:
            (purged,) = purge_blocks(rig.dir, criteria, is_dry=is_dry)
            outcomes.append((purged.blocks, purged.partials, purged.bytes // BLOCK_BYTES))
    assert outcomes == [(1, 2, 3), (1, 2, 3), (0, 0, 0), (1, 2, 3), (1, 2, 3)]


def test_a_writer_that_was_started_after_a_purge_stores_what_is_queued_from_then_on(rig: Rig, engine: Engine) -> None:
    purge_blocks(rig.dir, ALL, is_dry=False)
    store = BlockStore(engine.root, direct=False)
    before = time.monotonic()
    store.learn_purges()
    assert store.put(key(1), payload(1), queued=before) is StoreFault.PURGED
    assert store.put(key(1), payload(1), queued=time.monotonic()) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize("content", [b"no line of ours\n", b"[]\n", b'{"tenant": 7, "adapter": null}\n', b"x" * 70_000])
def test_a_mark_that_cannot_be_read_counts_as_a_purge_of_everything(tmp_path: Path, content: bytes) -> None:
    marks = PurgeLog(FileSystem(), str(tmp_path))
    marks.look()
    queued = time.monotonic()
    (tmp_path / PURGES_FILE).write_bytes(content)
    marks.look()
    assert marks.is_purged(key(1, "alice"), NO_LINEAGE, queued)


def test_a_directory_that_was_removed_counts_as_purged(rig: Rig, engine: Engine) -> None:
    record_purge(FileSystem(), str(engine.root), Purge("another"))
    store = BlockStore(engine.root, direct=False)
    store.learn_purges()
    queued = time.monotonic()
    (engine.root / PURGES_FILE).unlink()
    assert store.put(key(1), payload(1), queued=queued) is StoreFault.PURGED
    assert store.put(key(1), payload(1), queued=time.monotonic()) == Stored(BLOCK_BYTES)
    # As long as the earlier one: empty.
    queued = time.monotonic()
    shutil.rmtree(engine.root)
    assert store.put(key(1), payload(1), queued=queued) is StoreFault.PURGED
    assert store.put(key(1), payload(1), queued=time.monotonic()) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_two_purges_at_once_leave_both_marks(rig: Rig, call: str) -> None:
    root = rig.engine().root
    pending = [(json.dumps(Purge("other")._asdict()) + "\n").encode()]

    def interrupt(name: str, _: str) -> None:
        if name == call and pending:
            # Before the write it is another process of this node; after it, another node that saw the same length.
            with (root / PURGES_FILE).open("ab" if name == "pwritev" else "wb") as file:
                file.write(pending.pop())

    record_purge(HookedFs(interrupt), str(root), Purge("mine1"))
    assert [json.loads(line)["tenant"] for line in (root / PURGES_FILE).read_text().splitlines()] == ["other", "mine1"]
