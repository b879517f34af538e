# SPDX-License-Identifier: Apache-2.0
"""A directory belongs to one model and layout, whoever comes first, and says so for ever."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checks import check
from store_faults import KINDS, TOO_DEEP, FailingFs, HookedFs, WatchedFs, plant

from kvtier_connector.contract.errors import IdentityMismatch, StoreUnavailable
from kvtier_connector.store.identity import RootClaim, RootState, claim, read
from kvtier_connector.store.layout import TIER_FILE

IDENTITY = {"model": "llama", "dtype": "bfloat16", "groups": [[1, 2], [3]]}
CONNECTOR = Path(sys.modules["kvtier_connector.store.identity"].__file__ or "").parents[2]


def test_the_first_claim_makes_the_directory_and_the_file(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "d1gest"
    claim(root, IDENTITY, "d1gest")
    assert json.loads((root / TIER_FILE).read_text()) == {"digest": "d1gest", "format": 4, "identity": IDENTITY}
    assert [path.name for path in root.iterdir()] == [TIER_FILE]
    assert check(root, partial_age_seconds=0) == []


class HalfMadeFs(WatchedFs):
    """Another client is making the directory above: for some calls it is there, and nothing can be made in it."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def before(self, call: str, path: str | None) -> None:
        if call == "mkdir" and path is not None and path.endswith("d1gest") and self.left:
            self.left -= 1
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)


def test_a_directory_that_another_client_is_making_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    claim(tmp_path / "a" / "d1gest", IDENTITY, "d1gest", fs=HalfMadeFs(4))
    assert (tmp_path / "a" / "d1gest" / TIER_FILE).exists()
    with pytest.raises(StoreUnavailable, match="cannot be claimed"):
        claim(tmp_path / "b" / "d1gest", IDENTITY, "d1gest", fs=HalfMadeFs(1000))


def test_claiming_again_changes_nothing(tmp_path: Path) -> None:
    claim(tmp_path, IDENTITY, "d1gest")
    before = (tmp_path / TIER_FILE).stat()
    claim(tmp_path, {"groups": ((1, 2), (3,)), "dtype": "bfloat16", "model": "llama"}, "d1gest")
    after = (tmp_path / TIER_FILE).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("identity", "digest", "expected"),
    [
        ({**IDENTITY, "dtype": "float16"}, "other", "identity.dtype is 'bfloat16' there and 'float16' here"),
        ({**IDENTITY, "model": "x", "dtype": "float16"}, "d1gest", "identity.dtype is"),
        (
            {"model": "llama", "dtype": "bfloat16"},
            "d1gest",
            r"identity.groups is \[\[1, 2\], \[3\]\] there and '\(absent\)",
        ),
        ({**IDENTITY, "rope": {"theta": 1}}, "d1gest", r"identity.rope is '\(absent\)' there and {'theta': 1} here"),
        (IDENTITY, "other", "digest is 'd1gest' there and 'other' here"),
    ],
)
def test_strangers_are_refused_by_reason(tmp_path: Path, identity: dict[str, Any], digest: str, expected: str) -> None:
    claim(tmp_path, IDENTITY, "d1gest")
    before = (tmp_path / TIER_FILE).read_bytes()
    with pytest.raises(
        IdentityMismatch, match=rf"^{tmp_path}/tier.json: .*{expected}.*volume.path.*remove the directory"
    ):
        claim(tmp_path, identity, digest)
    assert (tmp_path / TIER_FILE).read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"identity": 1}', "\xff", TOO_DEEP.decode()),
        json.dumps({"digest": "d1gest", "format": 5, "identity": IDENTITY}),
    ],
)
def test_a_damaged_file_and_one_of_another_format_are_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / TIER_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(IdentityMismatch, match="format is 5 there and 4 here" if "5" in text else "restore the file"):
        claim(tmp_path, IDENTITY, "d1gest")
    assert (tmp_path / TIER_FILE).read_bytes() == text.encode("latin-1")
    assert [problem.kind for problem in check(tmp_path)] == ["identity"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open", "pwritev", "fsync", "close", "link"])
def test_a_volume_that_fails_is_unavailable_and_says_why(tmp_path: Path, call: str, number: int) -> None:
    root = tmp_path / "d1gest"
    # Without the directory the first open is a plain "no such file": let only later ones fail.
    error = OSError(number, "as the system says")
    fs = FailingFs(error, when=lambda name, path: name == call and (name != "open" or "partial" in str(path)))
    if call == "close":
        fs = FailingFs(error, when=lambda name, path: name == call)
    with pytest.raises(StoreUnavailable, match="as the system says") as caught:
        claim(root, IDENTITY, "d1gest", fs=fs)
    assert caught.value.__cause__ is error
    assert not root.exists() or list(root.iterdir()) == []
    claim(root, IDENTITY, "d1gest")


@pytest.mark.parametrize("call", ["preadv", "stat"])
def test_a_volume_that_cannot_be_looked_at_says_nothing_of_a_claim(tmp_path: Path, call: str) -> None:
    claim(tmp_path, IDENTITY, "d1gest")
    fs = FailingFs(OSError(errno.ESTALE, "it fails"), when=lambda name, path: name == call)
    ours = RootClaim(tmp_path, IDENTITY, "d1gest", fs=fs)
    with pytest.raises(StoreUnavailable, match="it fails"):
        ours.look(may_write=True) if call == "stat" else ours.renew()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_volume_without_hard_links_can_be_claimed(tmp_path: Path, number: int) -> None:
    root = tmp_path / "d1gest"
    fs = FailingFs(OSError(number, "no links"), when=lambda name, path: name == "link")
    claim(root, IDENTITY, "d1gest", fs=fs)
    claim(root, IDENTITY, "d1gest", fs=fs)
    assert check(root, partial_age_seconds=0) == []


def test_who_comes_second_by_a_hair_keeps_the_first_ones_file(tmp_path: Path) -> None:
    fs = HookedFs(lambda call, _: call == "link" and claim(tmp_path, {"model": "faster"}, "d1gest"))
    with pytest.raises(IdentityMismatch, match="'faster'"):
        claim(tmp_path, {"model": "slower"}, "d1gest", fs=fs)
    assert [path.name for path in tmp_path.iterdir()] == [TIER_FILE]


def test_many_threads_and_processes_may_claim_at_once(tmp_path: Path) -> None:
    root = tmp_path / "d1gest"
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); "
        "from kvtier_connector.store.identity import claim; claim(Path(sys.argv[1]), {'model': 'test'}, 'd1gest')"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(root), str(CONNECTOR)]) for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: claim(root, {"model": "test"}, "d1gest"), range(16)))
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert [path.name for path in root.iterdir()] == [TIER_FILE]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_place_of_a_description_makes_it_unusable(tmp_path: Path, kind: str) -> None:
    plant(kind, tmp_path / TIER_FILE)
    with pytest.raises(StoreUnavailable, match="cannot be claimed"):
        claim(tmp_path, IDENTITY, "d1gest")


def test_a_claim_is_renewed_where_the_description_is_another_or_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "d1gest"
    ours = RootClaim(root, IDENTITY, "d1gest")
    ours.renew()
    assert ours.look(may_write=True) is RootState.SAME
    (root / TIER_FILE).unlink()
    assert ours.look(may_write=False) is RootState.GONE
    assert ours.look(may_write=True) is RootState.OTHER
    ours.renew()
    assert read(root) is not None
    assert ours.look(may_write=True) is RootState.SAME
    shutil.rmtree(root)
    # There is nothing that somebody else could take for theirs.
    assert ours.look(may_write=True) is RootState.GONE
    claim(root, {**IDENTITY, "dtype": "float16"}, "d1gest")
    assert ours.look(may_write=False) is RootState.OTHER
    with pytest.raises(IdentityMismatch, match="dtype"):
        ours.renew()


def test_a_description_that_has_another_file_number_but_was_not_written_is_no_news(tmp_path: Path) -> None:
    ours = RootClaim(tmp_path, IDENTITY, "d1gest")
    assert ours.renew()
    # Longer ago than any volume's clock is coarse.
    os.utime(tmp_path / TIER_FILE, (1, 1))
    assert ours.renew()
    shutil.copy2(tmp_path / TIER_FILE, tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / TIER_FILE)
    assert ours.look(may_write=True) is RootState.OTHER
    assert not ours.renew()
    assert ours.look(may_write=True) is RootState.SAME
    (tmp_path / TIER_FILE).unlink()
    assert ours.renew()
