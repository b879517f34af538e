# SPDX-License-Identifier: Apache-2.0
"""The live mode: changed by swapping a link, as a ConfigMap's files are, and never lost to a bad text."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from store_faults import FailingFs, WatchedFs

from kvtier_connector.contract import encode_live
from kvtier_connector.store.mode import Mode, ModeFile


def said(mode: Mode) -> bytes:
    return encode_live(mode.value).encode()


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class ConfigMapDirectory:
    """Changes its files as a kubelet does: a new directory, then the link to it swapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = 0
        (path / "mode").symlink_to("..data/mode")

    def write(self, content: bytes | None) -> None:
        self._turn += 1
        made = self._path / f"..{self._turn}"
        made.mkdir()
        if content is not None:
            (made / "mode").write_bytes(content)
        link = self._path / "..data_tmp"
        link.symlink_to(made.name)
        link.replace(self._path / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> ConfigMapDirectory:
    return ConfigMapDirectory(tmp_path)


@pytest.fixture
def mode_file(tmp_path: Path) -> ModeFile:
    return ModeFile(str(tmp_path / "mode"), seconds=0)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("end", ["", "\n", "  \r\n"])
def test_each_mode_is_understood(mounted: ConfigMapDirectory, mode_file: ModeFile, mode: Mode, end: str) -> None:
    mounted.write(said(mode) + end.encode())
    assert mode_file.refresh() is mode
    assert mode_file.mode is mode
    assert mode_file.problem == ""


def test_a_swap_is_seen_at_the_next_refresh(mounted: ConfigMapDirectory, mode_file: ModeFile) -> None:
    mounted.write(said(Mode.READ_ONLY))
    mode_file.refresh()
    mounted.write(said(Mode.BYPASS))
    assert mode_file.mode is Mode.READ_ONLY
    assert mode_file.refresh() is Mode.BYPASS


@pytest.mark.parametrize(
    "content",
    [b"", b"Bypass", b'{"mode": "bypass"}', b'{"mode": ["Bypass"]}', b"{}", b"\xff\xfe", b"x" * 5000, b"[]", None],
)
def test_what_cannot_be_understood_keeps_the_last_mode_and_is_reported(
    mounted: ConfigMapDirectory, mode_file: ModeFile, content: bytes | None
) -> None:
    mounted.write(said(Mode.READ_ONLY))
    mode_file.refresh()
    mounted.write(content)
    assert mode_file.refresh() is Mode.READ_ONLY
    assert "staying with ReadOnly" in mode_file.problem
    mounted.write(said(Mode.READ_WRITE))
    assert mode_file.refresh() is Mode.READ_WRITE
    assert mode_file.problem == ""


def test_a_file_that_is_not_there_leaves_the_volume_in_use(tmp_path: Path) -> None:
    mode_file = ModeFile(str(tmp_path / "mode"), seconds=0)
    assert mode_file.refresh() is Mode.READ_WRITE
    assert "cannot be read" in mode_file.problem


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_cannot_be_read_is_reported(mounted: ConfigMapDirectory, tmp_path: Path, call: str) -> None:
    mounted.write(said(Mode.BYPASS))
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda name, path: name == call)
    mode_file = ModeFile(str(tmp_path / "mode"), seconds=0, fs=fs)
    assert mode_file.refresh() is Mode.READ_WRITE
    assert "broken" in mode_file.problem


def test_the_file_is_read_at_most_every_so_many_seconds(mounted: ConfigMapDirectory, tmp_path: Path) -> None:
    opened: list[str] = []

    class Counting(WatchedFs):
        def before(self, call: str, path: str | None) -> None:
            if call == "open":
                opened.append(str(path))

    clock = Clock()
    mounted.write(said(Mode.READ_WRITE))
    mode_file = ModeFile(str(tmp_path / "mode"), seconds=5, fs=Counting(), now=clock)
    for _ in range(11):
        mode_file.refresh()
        clock.seconds += 1
    assert len(opened) == 3


def test_without_a_file_the_volume_is_in_use_for_ever() -> None:
    mode_file = ModeFile("")
    assert mode_file.refresh() is Mode.READ_WRITE
    assert mode_file.problem == ""


def test_what_each_mode_allows() -> None:
    allowed = {mode: (mode.may_load, mode.may_store) for mode in Mode}
    assert allowed == {Mode.READ_WRITE: (True, True), Mode.READ_ONLY: (True, False), Mode.BYPASS: (False, False)}
