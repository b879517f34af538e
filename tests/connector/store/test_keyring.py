# SPDX-License-Identifier: Apache-2.0
"""Keys in a mounted directory: every form of a key, changes of the mount, and that no key is ever shown."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.store.crypto import Keyring, parse_key

SECRET = bytes(range(200, 232))
OTHER = bytes(range(32))


class SecretMount:
    """Changes as the kubelet changes a mounted Secret: a new directory, then the link to it swapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = 0
        path.mkdir()

    def put(self, **keys: bytes) -> None:
        self._turn += 1
        made = self.path / f"..{self._turn}"
        made.mkdir()
        for name, content in keys.items():
            (made / name).write_bytes(content)
        link = self.path / "..data_tmp"
        link.symlink_to(made.name)
        link.replace(self.path / "..data")
        for entry in self.path.iterdir():
            if not entry.name.startswith("..") and entry.name not in keys:
                entry.unlink()
        for name in keys:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        # Each another time, also where the tests run on a volume that tells times in whole seconds.
        os.utime(self.path, (self._turn, self._turn))


@pytest.fixture
def mount(tmp_path: Path) -> SecretMount:
    return SecretMount(tmp_path / "keys")


@pytest.mark.parametrize(
    "content",
    [
        SECRET,
        SECRET.hex().encode(),
        SECRET.hex().upper().encode() + b"\n",
        base64.b64encode(SECRET),
        base64.b64encode(SECRET) + b"\n",
    ],
    ids=["raw", "hex", "upper hex, new line", "base64", "base64, new line"],
)
def test_a_key_is_understood_in_each_form(content: bytes) -> None:
    key = parse_key("k1", content)
    assert key.secret == SECRET
    assert key.name == "k1"


@pytest.mark.parametrize(
    "content", [b"", SECRET[:31], SECRET + b"x", b"a" * 63, SECRET[:16].hex().encode(), base64.b64encode(SECRET[:31])]
)
def test_a_key_of_another_length_is_none(content: bytes) -> None:
    assert parse_key("k1", content) is None


@given(st.binary(max_size=100))
def test_any_bytes_are_a_key_or_none(content: bytes) -> None:
    key = parse_key("k1", content)
    assert key is None or len(key.secret) == 32


def test_two_keys_of_one_name_have_different_checks_and_one_key_always_the_same() -> None:
    one, other = parse_key("k1", SECRET), parse_key("k1", OTHER)
    assert one.check != other.check
    assert one.check.hex() == "6bf495a1b2f22956", "another value makes every block unreadable that is there"


def test_the_active_key_is_found_in_a_mounted_secret(mount: SecretMount) -> None:
    mount.put(k1=SECRET, k2=OTHER.hex().encode())
    ring = Keyring(str(mount.path), seconds=0)
    assert ring.active() is None
    ring.active_name = "k2"
    key = ring.active()
    assert key.secret == OTHER
    assert ring.is_usable
    assert ring.problem == ""
    assert ring.find("k1") is not None
    assert ring.find("k3") is None


def test_keys_are_read_again_when_the_secret_changes(mount: SecretMount) -> None:
    mount.put(k1=SECRET)
    ring = Keyring(str(mount.path), seconds=0)
    assert ring.find("k2") is None
    mount.put(k1=SECRET, k2=OTHER)
    assert ring.find("k2") is not None
    mount.put(k2=OTHER)
    assert ring.find("k1") is None


def test_the_directory_is_looked_at_now_and_then_only(mount: SecretMount) -> None:
    mount.put(k1=SECRET)
    seconds = [0.0]
    ring = Keyring(str(mount.path), seconds=5, now=lambda: seconds[0])
    assert ring.find("k1") is not None
    mount.put()
    seconds[0] = 4.9
    assert ring.find("k1") is not None
    seconds[0] = 5.1
    assert ring.find("k1") is None
    mount.put(k1=SECRET)
    seconds[0] = 6.2
    assert ring.find("k1") is not None, "a key that is missing is looked for sooner"


def test_keys_stay_good_while_the_directory_cannot_be_read(mount: SecretMount) -> None:
    mount.put(k1=SECRET)
    ring = Keyring(str(mount.path), seconds=0)
    ring.active_name = "k1"
    assert ring.active() is not None
    shutil.rmtree(mount.path)
    assert ring.active() is not None
    assert "cannot be read" in ring.problem


def test_what_is_wrong_is_said_with_a_remedy(mount: SecretMount) -> None:
    mount.put(k1=SECRET[:16], k2=OTHER)
    ring = Keyring(str(mount.path), seconds=0)
    assert "spec.disk.encryption.activeKey" in ring.problem
    ring.active_name = "k1"
    assert ring.active() is None
    assert not ring.is_usable
    assert "k1 in" in ring.problem
    assert "32 bytes" in ring.problem
    ring.active_name = "k2"
    assert ring.active() is not None
    assert "not a key" in ring.problem


def test_a_directory_that_is_not_there_is_no_key_and_no_crash(tmp_path: Path) -> None:
    ring = Keyring(str(tmp_path / "nothing"), seconds=0)
    ring.active_name = "k1"
    assert ring.active() is None
    assert "add it to the Secret first" in ring.problem


def test_no_key_is_ever_shown(mount: SecretMount) -> None:
    mount.put(k1=SECRET, broken=SECRET[:20])
    ring = Keyring(str(mount.path), seconds=0)
    ring.active_name = "k1"
    key = ring.active()
    shown = f"{key!r} {key} {ring!r} {ring.problem} {[key]}"
    for form in (SECRET.hex(), repr(SECRET)[2:-1], base64.b64encode(SECRET).decode(), SECRET[:20].hex()):
        assert form not in shown
