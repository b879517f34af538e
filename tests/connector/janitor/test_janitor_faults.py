# SPDX-License-Identifier: Apache-2.0
"""A volume that refuses, and a janitor that dies: a problem is stated, nothing ends, and the volume stays sound."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import pytest
from checks import check
from store_faults import KINDS, TOO_DEEP, CrashError, CrashingFs, HookedFs, plant
from tier_dir import BLOCK_BYTES, Engine, Refusing, Rig, key

from kvtier_connector.janitor.catalog import CATALOG_FILE, ROW, Catalog, load
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.layout import block_path
from kvtier_connector.store.permit import PERMIT_FILE, decode_permit

LIMITS = {"max_bytes": 10 * BLOCK_BYTES, "high_watermark": 0.9, "low_watermark": 0.5}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("calls", [("unlink",), ("scandir",), ("stat",), ("open",), ("statvfs",), ("pwritev",)])
def test_what_is_refused_is_said_until_it_ends(rig: Rig, engine: Engine, number: int, calls: tuple[str, ...]) -> None:
    engine.put_chain(*range(10))
    fs = Refusing("", *calls, number=number)
    sweeper = rig.sweeper(fs, **LIMITS)
    rig.work(sweeper, 3)
    assert any(os.strerror(number) in problem for problem in sweeper.report.usage.problems)
    fs.calls = ()
    rig.clock.move(100)
    usage = rig.sweep(sweeper)
    rig.clock.move(4000)
    usage = rig.sweep(sweeper)
    assert usage.problems == ()
    assert engine.there(range(10)) == list(range(5))
    assert engine.check() == []


def test_a_janitor_killed_at_any_call_leaves_a_volume_that_the_next_one_finishes(rig: Rig) -> None:
    engine, old = rig.engine(), rig.engine("bb")
    engine.put_chain(*range(10))
    old.put(1)
    quarantined = engine.root / "quarantine" / "x"
    quarantined.parent.mkdir()
    quarantined.write_bytes(b"1")
    for path in [quarantined, *old.root.glob("journal/*"), old.root / "tier.json"]:
        os.utime(path, (0, 0))
    before = rig.dir.with_name("before")
    shutil.copytree(rig.dir, before)
    step, has_died = 0, True
    while has_died:
        shutil.rmtree(rig.dir)
        shutil.copytree(before, rig.dir, copy_function=shutil.copy2)
        try:
            sweeper = rig.sweeper(CrashingFs(step), keep_previous=0, **LIMITS)
            rig.work(sweeper, 8)
            sweeper.close()
            has_died = False
        except CrashError:
            step += 1
        assert check(engine.root) == [] or quarantined.exists()
        there = engine.there(range(10))
        assert there == list(range(len(there)))
        usage = rig.sweep(rig.sweeper(keep_previous=0, **LIMITS))
        there = engine.there(range(10))
        assert there == list(range(len(there)))
        assert 5 <= len(there) == usage.blocks <= 9
        assert not old.root.exists() or not list(old.root.iterdir())
        step += 4
    assert step > 50


def test_the_beginning_of_a_prefix_stays_as_long_as_its_end_does(rig: Rig, engine: Engine) -> None:
    # More than one thread takes at a time.
    engine.put_chain(*range(100))
    engine.put_chain(*range(100, 110))
    sweeper = rig.sweeper(Refusing(key(90).hash.hex(), "unlink"), max_bytes=110 * BLOCK_BYTES, low_watermark=0.001)
    sweeper.step()
    rig.work(sweeper, 5)
    assert engine.there(range(100)) == list(range(91))
    assert engine.there(range(100, 110)) == []


def test_what_was_written_anew_keeps_all_before_it(rig: Rig, engine: Engine) -> None:
    engine.put_chain(*range(5))
    rig.clock.move(60)
    file, times = engine.root / block_path(key(3)), [rig.clock.ns - 1]

    def rewrite(call: str, _: str) -> None:
        """Write a block as another engine does just before the janitor removes any."""
        if call == "unlink" and times:
            os.utime(file, ns=(times[0], times.pop()))

    sweeper = rig.sweeper(HookedFs(rewrite), max_bytes=5 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.1)
    while sweeper.step() == 0.0:
        pass
    assert engine.there(range(5)) == list(range(4))


def test_a_janitor_that_loses_the_lease_in_the_middle_of_a_batch_removes_no_more(rig: Rig, engine: Engine) -> None:
    engine.put(*range(200))
    removed: list[str] = []
    fs = HookedFs(lambda call, path: call == "unlink" and removed.append(path))
    # Another janitor becomes the active one after some removals.
    lease = {"may_act": lambda: len(removed) < 10}
    sweeper = rig.sweeper(fs, parts=lease, max_bytes=200 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.1)
    rig.work(sweeper, 20)
    # Each of the threads may be in the middle of one.
    assert 200 - len(engine.there(range(200))) <= 10 + rig.config.threads - 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_anywhere_on_the_volume_holds_up_no_janitor(rig: Rig, engine: Engine, kind: str) -> None:
    engine.put_chain(*range(10))
    plant(kind, engine.root / block_path(key(77)))
    plant(kind, engine.root / block_path(key(3)).replace(key(3).hash.hex(), key(78).hash.hex()))
    for name in (PERMIT_FILE, CATALOG_FILE):
        plant(kind, engine.root.parent / name)
    sweeper = rig.swept(**LIMITS)
    rig.clock.move(4000)
    usage = rig.sweep(sweeper)
    assert engine.there(range(10)) == list(range(5))
    assert usage.blocks == 5
    if kind != "directory":  # a problem names it, and a person removes it
        assert decode_permit((engine.root.parent / PERMIT_FILE).read_bytes()).bytes > 0


VERSION = 7
EMPTY: list[object] = [VERSION, [], [""], 0, {}, False]
ROWS_OF_NO_GENERATION = bytes(ROW.itemsize)
IMPOSSIBLE = [
    (0, 5),
    (1, [1]),
    (2, []),
    (2, ["acme"]),
    (1, ["../aa"]),
    (2, ["", "A B"]),
    (3, None),
    (3, 10**400),
    (4, []),
    (4, {"d1gest": {"journal": "1"}}),
    (4, {"d1gest": {"journal": 1 << 63}}),
    (5, "5"),
]
"""Places in the document of a catalog, and what no janitor writes there."""


@pytest.mark.parametrize(
    ("document", "rows", "is_taken"),
    [
        (EMPTY, b"", True),
        (EMPTY, ROWS_OF_NO_GENERATION, False),
        *((each, b"", False) for each in (TOO_DEEP, b"[]", b"{}", b"7", b"\xff")),
        *(([*EMPTY[:place], value, *EMPTY[place + 1 :]], b"", False) for place, value in IMPOSSIBLE),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_catalog_that_is_whole_is_taken_if_a_janitor_could_have_written_it(
    tmp_path: Path, document: bytes | list[object], rows: bytes, is_taken: bool
) -> None:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = struct.pack("<IQ", zlib.crc32(rows, zlib.crc32(content)), len(content))
    (tmp_path / CATALOG_FILE).write_bytes(head + content + rows)
    assert (load(Catalog(), str(tmp_path), fs=LOCAL) is not None) == is_taken
