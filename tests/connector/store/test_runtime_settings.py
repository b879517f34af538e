# SPDX-License-Identifier: Apache-2.0
"""Live settings: changed by swapping a link, and never lost to a bad text."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from clocks import Clock
from store_faults import FailingFs, NotingFs

from kvtier_connector.contract.engine import LiveSettings, encode_live
from kvtier_connector.store.permit import Mode, RuntimeSettings


def said(mode: Mode) -> bytes:
    return encode_live(mode.value).encode()


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
def live_file(tmp_path: Path) -> RuntimeSettings:
    return RuntimeSettings(str(tmp_path / "mode"), seconds=0)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("end", ["", "\n", "  \r\n"])
def test_each_mode_is_understood(mounted: ConfigMapDirectory, live_file: RuntimeSettings, mode: Mode, end: str) -> None:
    mounted.write(said(mode) + end.encode())
    assert live_file.refresh().mode == mode.value
    assert live_file.mode is mode
    assert live_file.problem == ""


def test_a_swap_is_seen_at_the_next_refresh(mounted: ConfigMapDirectory, live_file: RuntimeSettings) -> None:
    mounted.write(said(Mode.READ_ONLY))
    live_file.refresh()
    mounted.write(said(Mode.BYPASS))
    assert live_file.mode is Mode.READ_ONLY
    assert live_file.refresh().mode == "Bypass"


@pytest.mark.parametrize(
    "content",
    [b"", b"Bypass", b'{"mode": "bypass"}', b'{"mode": ["Bypass"]}', b"{}", b"\xff\xfe", b"x" * 5000, b"[]", None]
    + [b'{"mode": "Bypass", "needs_permit": %s}' % value for value in (b"0", b"1", b'"true"', b"null")]
    + [b'{"mode": "Bypass", "active_key": %s}' % value for value in (b"1", b'"../x"', b'""a')],
)
def test_what_cannot_be_understood_keeps_the_last_mode_and_is_reported(
    mounted: ConfigMapDirectory, live_file: RuntimeSettings, content: bytes | None
) -> None:
    mounted.write(said(Mode.READ_ONLY))
    live_file.refresh()
    mounted.write(content)
    assert live_file.refresh().mode == "ReadOnly"
    assert "staying with mode ReadOnly" in live_file.problem
    mounted.write(said(Mode.READ_WRITE))
    assert live_file.refresh().mode == "ReadWrite"
    assert live_file.problem == ""


def test_a_file_that_is_not_there_leaves_the_volume_in_use(tmp_path: Path) -> None:
    live_file = RuntimeSettings(str(tmp_path / "mode"), seconds=0)
    assert live_file.refresh().mode == "ReadWrite"
    assert "cannot be read" in live_file.problem


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_cannot_be_read_is_reported(mounted: ConfigMapDirectory, tmp_path: Path, call: str) -> None:
    mounted.write(said(Mode.BYPASS))
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda name, path: name == call)
    live_file = RuntimeSettings(str(tmp_path / "mode"), seconds=0, fs=fs)
    assert live_file.refresh().mode == "ReadWrite"
    assert "broken" in live_file.problem


def test_the_file_is_read_at_most_every_so_many_seconds(mounted: ConfigMapDirectory, tmp_path: Path) -> None:
    clock, fs = Clock(1000.0), NotingFs()
    mounted.write(said(Mode.READ_WRITE))
    live_file = RuntimeSettings(str(tmp_path / "mode"), seconds=5, fs=fs, now=clock)
    for _ in range(11):
        live_file.refresh()
        clock.seconds += 1
    assert fs.calls.count("open") == 3


def test_without_a_file_the_volume_is_in_use_for_ever() -> None:
    live_file = RuntimeSettings("")
    assert live_file.refresh().mode == "ReadWrite"
    assert live_file.problem == ""


def test_what_each_mode_allows() -> None:
    allowed = {mode: (mode.may_load, mode.may_store) for mode in Mode}
    assert allowed == {Mode.READ_WRITE: (True, True), Mode.READ_ONLY: (True, False), Mode.BYPASS: (False, False)}


def test_the_limit_and_the_active_key_are_live_too(mounted: ConfigMapDirectory, live_file: RuntimeSettings) -> None:
    mounted.write(encode_live("ReadWrite", needs_permit=True, active_key="k1").encode())
    assert live_file.refresh() == LiveSettings(mode="ReadWrite", needs_permit=True, active_key="k1")
    mounted.write(encode_live("ReadWrite").encode())
    assert live_file.refresh() == LiveSettings(mode="ReadWrite")


def test_a_field_of_a_later_release_is_ignored(mounted: ConfigMapDirectory, live_file: RuntimeSettings) -> None:
    mounted.write(json.dumps({"mode": "ReadOnly", "colour": "blue"}).encode())
    assert live_file.refresh().mode == "ReadOnly"
