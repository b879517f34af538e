# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed at each system call of a store, and processes that store one block at once."""

from __future__ import annotations

import functools
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from checks import check
from plain_engine import PlainEngine
from store_contract import BLOCK_BYTES, key, pages, payload, whole_file, write_block
from store_faults import clear

from kvtier_connector.janitor.permit import PermitWriter
from kvtier_connector.janitor.policy import Room
from kvtier_connector.store import blockstore
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.header import Fault
from kvtier_connector.store.identity import claim
from kvtier_connector.store.permit import PERMIT_FILE, decode_permit
from kvtier_connector.store.scan import LeftoverKind

CONNECTOR = Path(blockstore.__file__ or "").parents[2]
PATHS = [str(CONNECTOR), str(Path(__file__).parents[1] / "store"), str(Path(__file__).parents[2] / "kit")]

DIES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["DIES"]


class Killer:
    """Does something in a process of its own that is killed on the way; one that knows all modules is forked for it."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", DIES, *PATHS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, action: str, root: Path, step: int, torn_bytes: int = 0) -> bool:
        """Kill the process at that system call; say whether it came to that."""
        self._parent.stdin.write(f"{action} {root} {step} {torn_bytes}\n")
        self._parent.stdin.flush()
        code = int(self._parent.stdout.readline())
        assert code in {0, -signal.SIGKILL}
        return code != 0

    def close(self) -> None:
        self._parent.communicate()


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    made = Killer()
    yield made
    made.close()


def killed_at_each_step(
    killer: Killer, directory: Path, action: str, make: Callable[[Path], object], *, torn_bytes: int = 0
) -> Iterator[Path]:
    """Yield what processes leave that are killed at one call after the other, and at last what one leaves that ends."""
    for step in itertools.count():
        root = directory / str(step) / "d1gest"
        make(root)
        was_killed = killer.run(action, root, step, torn_bytes)
        yield root
        if not was_killed:
            break
    assert step > 2


def claimed(root: Path, content: bytes = b"") -> None:
    """Make a generation, perhaps with a file under the name of the block."""
    claim(root, {}, "d1gest")
    if content:
        write_block(root, key(1), content)


def assert_sound(root: Path, *leftovers: LeftoverKind) -> None:
    clear(root, *leftovers)
    assert check(root, partial_age_seconds=0) == []


BEFORE = {"nothing": b"", "damaged": b"damaged", "short": whole_file(key(1), payload(9, 4096))}
OUTCOMES = {"nothing": Miss(), "damaged": Fault.TRUNCATED, "short": Fault.LENGTH}
"""Of a read, by what lies under the block's name."""


@pytest.mark.parametrize(("before", "torn_bytes"), [("nothing", 0), ("nothing", 5000), ("damaged", 1), ("short", 5000)])
def test_a_store_killed_anywhere_leaves_all_or_none(
    tmp_path: Path, killer: Killer, before: str, torn_bytes: int
) -> None:
    outcomes, content = [], BEFORE[before]
    make = functools.partial(claimed, content=content)
    for root in killed_at_each_step(killer, tmp_path, "put", make, torn_bytes=torn_bytes):
        other, into = PlainEngine(root), pages()
        outcomes.append(other.get(key(1), into))
        assert outcomes[-1] in {OUTCOMES[before], Hit(BLOCK_BYTES)}
        assert not isinstance(outcomes[-1], Hit) or into == payload(1)
        assert len(clear(root, LeftoverKind.PARTIAL)) <= 1
        clear(root, LeftoverKind.QUARANTINED)
        assert other.put(key(1), payload(1)) in {Stored(BLOCK_BYTES), Present()}
        assert other.get(key(1), into) == Hit(BLOCK_BYTES)
        assert into == payload(1)
        assert_sound(root)
    assert len(outcomes) > 10
    assert (outcomes[0], outcomes[-1]) == (OUTCOMES[before], Hit(BLOCK_BYTES))


@pytest.mark.parametrize("is_good", [True, False])
def test_a_read_killed_anywhere_loses_no_block_and_serves_no_bad(tmp_path: Path, killer: Killer, is_good: bool) -> None:
    content = whole_file(key(1), payload(1))
    make = functools.partial(claimed, content=content if is_good else content[:-1] + b"\xff")
    for root in killed_at_each_step(killer, tmp_path, "get", make):
        outcome = PlainEngine(root).get(key(1), pages())
        assert outcome == Hit(BLOCK_BYTES) if is_good else outcome in {Fault.CHECKSUM, Miss()}
        assert_sound(root, LeftoverKind.PARTIAL, LeftoverKind.QUARANTINED)


def test_a_removal_killed_anywhere_leaves_the_block_or_none(tmp_path: Path, killer: Killer) -> None:
    outcomes = []
    make = functools.partial(claimed, content=whole_file(key(1), payload(1)))
    for root in killed_at_each_step(killer, tmp_path, "delete", make):
        outcomes.append(PlainEngine(root).get(key(1), pages()))
        assert outcomes[-1] in {Miss(), Hit(BLOCK_BYTES)}
        assert_sound(root)
    assert (outcomes[0], outcomes[-1]) == (Hit(BLOCK_BYTES), Miss())


@pytest.mark.parametrize("torn_bytes", [0, 5])
def test_a_claim_killed_anywhere_leaves_a_directory_to_claim(tmp_path: Path, killer: Killer, torn_bytes: int) -> None:
    for root in killed_at_each_step(killer, tmp_path, "claim", lambda _: None, torn_bytes=torn_bytes):
        claim(root, {"model": "test"}, "d1gest")
        assert_sound(root, LeftoverKind.PARTIAL)


def test_a_permit_killed_anywhere_is_the_old_or_the_new_one(tmp_path: Path, killer: Killer) -> None:
    def make(root: Path) -> None:
        root.mkdir(parents=True)
        PermitWriter(str(root), fs=LOCAL).renew(Room(100), used_bytes=0, writers=1, largest_bytes=1, tenants=())

    steps = killed_at_each_step(killer, tmp_path, "permit", make)
    sizes = [decode_permit((root / PERMIT_FILE).read_bytes()).bytes for root in steps]
    assert (sizes[0], sizes[-1]) == (6, 0)
