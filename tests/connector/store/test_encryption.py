# SPDX-License-Identifier: Apache-2.0
"""Encrypted blocks: what is right comes back, and nothing else does, whatever was done to the file or to the keys."""

from __future__ import annotations

import base64
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_contract import (
    BLOCK_BYTES,
    HOME,
    K1,
    K2,
    NOW_NS,
    BlockStoreContract,
    header_of,
    key,
    pages,
    payload,
    read,
    stream,
    whole_file,
    write_block,
)
from store_faults import KubeletMount, flip

from kvtier_connector.janitor import commands
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Stored, StoreFault
from kvtier_connector.store.crypto import Keyring, encrypt, parse_key
from kvtier_connector.store.fsck import check_all
from kvtier_connector.store.header import HEADER_BYTES, Fault, Header, decode_header
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import QUARANTINE, BlockKey, Lineage, block_path

DATA = Path(__file__).parents[1] / "data"


def make(root: Path, keys_dir: Path, active: str = "k1", direct: bool | None = None) -> BlockStore:
    store = BlockStore(root, direct=direct, clock=lambda: NOW_NS, keys_dir=str(keys_dir))
    store.keyring.active_name = active
    return store


def test_the_payload_stays_unless_it_is_scratch(root: Path, keys_dir: Path) -> None:
    store = make(root, keys_dir)
    kept, scratch = payload(1), payload(2)
    store.put(key(1), kept)
    store.put(key(2), scratch, is_scratch=True)
    assert kept == payload(1)
    assert scratch != payload(2)
    assert read(store, key(2)) == (Hit(BLOCK_BYTES), bytes(payload(2)))


def test_read_only_memory_can_be_encrypted(root: Path, keys_dir: Path) -> None:
    store = make(root, keys_dir)
    assert store.put(key(1), memoryview(bytes(payload(1))), is_scratch=True) == Stored(BLOCK_BYTES)
    assert stream(store, key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    base = tmp_path_factory.mktemp("sound")
    (base / "keys").mkdir()
    (base / "keys" / "k1").write_bytes(K1)
    root = base / "d1gest"
    of = key(1)._replace(tenant="acme")
    make(root, base / "keys").put(of, payload(1, 4096), Lineage(key(7).hash, 3))
    return base, (root / block_path(of)).read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(bit=st.integers(0, 8 * (HEADER_BYTES + 4096) - 1), is_resealed=st.booleans(), is_direct=st.booleans())
def test_a_flipped_bit_anywhere_is_noticed_also_with_the_headers_checksum_made_right(
    sound: tuple[Path, bytes], bit: int, is_resealed: bool, is_direct: bool
) -> None:
    base, content = sound
    root, of = base / "d1gest", key(1)._replace(tenant="acme")
    data = bytearray(content)
    data[bit // 8] ^= 1 << bit % 8
    if is_resealed and bit // 8 < HEADER_BYTES - 4:
        data[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack("<I", zlib.crc32(data[: HEADER_BYTES - 4]))
    (root / block_path(of)).write_bytes(data)
    assert isinstance(make(root, base / "keys", direct=None if is_direct else False).get(of, pages(size=4096)), Fault)
    for moved in (root / "tenants/acme" / QUARANTINE).glob("*"):
        moved.unlink()


def test_a_block_under_another_name_or_tenant_is_not_believed(unchecked_root: Path, keys_dir: Path) -> None:
    store = make(unchecked_root, keys_dir)
    victim, attacker = key(1)._replace(tenant="victim"), key(1)._replace(tenant="attacker")
    store.put(victim, payload(1))
    content = bytearray((unchecked_root / block_path(victim)).read_bytes())
    for target, offset, value in ((attacker, 120, b"attacker"), (key(2)._replace(tenant="victim"), 48, key(2).hash)):
        path = write_block(unchecked_root, target, content)
        assert store.get(target, pages()) is Fault.KEY
        forged = bytearray(content)
        forged[offset : offset + 32] = value.ljust(32, b"\0")
        forged[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack("<I", zlib.crc32(forged[: HEADER_BYTES - 4]))
        path.write_bytes(forged)
        decoded = decode_header(forged)
        assert isinstance(decoded, Header)
        assert decoded.key == target, "the header says what the name says, and still"
        assert store.get(target, pages()) is Fault.TAG
        assert store.get(target, pages()) == Miss()


def test_a_block_that_is_not_encrypted_is_not_believed_and_is_replaced(root: Path, keys_dir: Path) -> None:
    path = write_block(root, key(1), whole_file(key(1), payload(9)))
    store = make(root, keys_dir)
    assert store.get(key(1), pages()) is Fault.CLEAR
    assert path.exists()
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert stream(store, key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


@pytest.mark.parametrize(
    ("content", "active", "fault"),
    [(None, "", Fault.KEY_MISSING), (None, "k2", Fault.KEY_MISSING), (K2, "k1", Fault.KEY_WRONG)],
    ids=["no keys", "its key is gone", "another key of its name"],
)
def test_a_block_whose_key_is_not_there_is_a_miss_that_stays_and_is_written_anew(
    root: Path, keys_dir: Path, content: bytes | None, active: str, fault: Fault
) -> None:
    make(root, keys_dir).put(key(1), payload(1))
    (keys_dir / "k1").unlink() if content is None else (keys_dir / "k1").write_bytes(content)
    store = make(root, keys_dir, active) if active else BlockStore(root)
    assert store.get(key(1), pages()) is fault
    assert stream(store, key(1))[0] is fault
    assert not (root / QUARANTINE).exists()
    (keys_dir / "k1").write_bytes(K1)
    assert make(root, keys_dir).get(key(1), pages()) == Hit(BLOCK_BYTES)
    if content is None:
        (keys_dir / "k1").unlink()
        assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
        assert header_of(root, key(1)).seal.key_id == active
        assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


@pytest.mark.parametrize("active", ["", "k3", "broken"])
def test_without_active_key_nothing_is_written_and_old_blocks_are_read(root: Path, keys_dir: Path, active: str) -> None:
    make(root, keys_dir).put(key(1), payload(1))
    (keys_dir / "broken").write_bytes(b"short")
    store = make(root, keys_dir, active)
    assert store.put(key(2), payload(2)) is StoreFault.NO_KEY
    assert not (root / block_path(key(2))).exists()
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


def test_check_verifies_with_the_keys_and_says_what_it_could_not_verify(root: Path, keys_dir: Path) -> None:
    store = make(root, keys_dir)
    for number in range(3):
        store.put(key(number), payload(number))
    flip(root / block_path(key(1)))
    without = check_all(root)
    assert (without.blocks, without.unverified, without.problems) == (3, 3, [])
    with_keys = check_all(root, keyring=Keyring(str(keys_dir)))
    assert with_keys.unverified == 0
    assert [problem.kind for problem in with_keys.problems] == ["tag"]
    found = commands.do("check", root, {"keys_dir": str(keys_dir)}, lambda *_: None)
    assert (found.status, [problem["kind"] for problem in found.document["problems"]]) == (1, ["tag"])
    found = commands.do("check", root, {}, lambda *_: None)
    assert (found.status, found.document["unverified"]) == (0, 3)


def test_the_tag_covers_the_generation_and_the_weights_that_a_block_names(unchecked_root: Path, keys_dir: Path) -> None:
    assert isinstance(make(unchecked_root.with_name("d2gest"), keys_dir).put(key(1), payload(1)), Stored)
    page = bytearray((unchecked_root.with_name("d2gest") / block_path(key(1))).read_bytes())
    page[page.index(b"d2gest") + 1] = ord("1")
    page[4092:4096] = struct.pack("<I", zlib.crc32(page[:4092]))
    write_block(unchecked_root, key(1), page)
    assert make(unchecked_root, keys_dir).get(key(1), pages()) is Fault.TAG


def test_a_block_that_was_frozen_is_still_decrypted(root: Path, keys_dir: Path) -> None:
    of = BlockKey(bytes(range(32)), 3, "acme")
    write_block(root, of, (DATA / "block_v4_encrypted.kvb").read_bytes())
    expected = bytes(index * 7 % 256 for index in range(8192))
    assert read(make(root, keys_dir), of, 8192) == (Hit(HEADER_BYTES + 8192), expected)


def test_the_first_page_is_the_same_but_for_nonce_tag_and_checksum() -> None:
    found = parse_key("k1", K1)
    assert found is not None
    header = Header(key(1), 4096, bytes(32), NOW_NS, HOME, Lineage(key(0).hash, 1))
    contents = [pages(size=4096) for _ in range(2)]
    one, other = (encrypt(header, payload(1, 4096), content, found) for content in contents)
    assert len({bytes(content)[:64] for content in (*contents, payload(1, 4096))}) == 3
    assert (one[:152], one[184:256], one[268:4092]) == (other[:152], other[184:256], other[268:4092])
    assert one[256:268] != other[256:268]


class TestContractWithEncryption(BlockStoreContract):
    """Everything that a store promises, with encrypted blocks."""

    @pytest.fixture
    def root(self, base: Path) -> Iterator[Path]:
        (base / "keys").mkdir(exist_ok=True)
        (base / "keys" / "k1").write_bytes(K1)
        root = base / "tier" / "d1gest"
        claim(root, {"model": "test"}, "d1gest")
        yield root
        report = check_all(root, partial_age_seconds=0, keyring=Keyring(str(base / "keys")))
        assert (report.problems, report.unverified) == ([], 0)

    def make(self, root: Path, direct: bool | None) -> BlockStore:
        return make(root, root.parents[1] / "keys", direct=direct)

    def whole_file(self, of: BlockKey, data: memoryview) -> bytes:
        found = parse_key("k1", K1)
        assert found is not None
        sealed = pages(size=data.nbytes)
        return encrypt(Header(of, data.nbytes, bytes(32), NOW_NS, HOME), data, sealed, found) + bytes(sealed)

    damage = Fault.TAG

    def test_the_file_is_the_header_and_the_payload_and_nothing_else(self, root: Path, store: BlockStore) -> None:
        store.put(key(1), payload(1))
        assert (root / block_path(key(1))).stat().st_size == BLOCK_BYTES


SECRET = bytes(range(200, 232))


@pytest.fixture
def mount(tmp_path: Path) -> KubeletMount:
    return KubeletMount(tmp_path / "keys")


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


def test_two_keys_of_one_name_have_different_checks_and_one_key_always_the_same() -> None:
    one, other = parse_key("k1", SECRET), parse_key("k1", K1)
    assert one.check != other.check
    assert one.check.hex() == "6bf495a1b2f22956", "another value makes every block unreadable that is there"


def ring_of(mount: KubeletMount, active: str = "", **keys: bytes) -> Keyring:
    mount.put(**keys)
    ring = Keyring(str(mount.path), seconds=0)
    ring.active_name = active
    return ring


def test_the_active_key_is_found_in_a_mounted_secret(mount: KubeletMount) -> None:
    ring = ring_of(mount, k1=SECRET, k2=K1.hex().encode())
    assert ring.active() is None
    ring.active_name = "k2"
    assert ring.active().secret == K1
    assert ring.is_usable
    assert ring.problem == ""
    assert ring.find("k1") is not None
    assert ring.find("k3") is None


def test_the_directory_is_looked_at_now_and_then_only(mount: KubeletMount) -> None:
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


def test_keys_stay_good_while_the_directory_cannot_be_read(mount: KubeletMount) -> None:
    ring = ring_of(mount, "k1", k1=SECRET)
    assert ring.active() is not None
    shutil.rmtree(mount.path)
    assert ring.active() is not None
    assert "cannot be read" in ring.problem
    late = Keyring(str(mount.path), seconds=0)
    late.active_name = "k1"
    assert late.active() is None
    assert "add it to the Secret first" in late.problem


def test_what_is_wrong_is_said_with_a_remedy(mount: KubeletMount) -> None:
    ring = ring_of(mount, k1=SECRET[:16], k2=K1)
    assert "spec.disk.encryption.activeKey" in ring.problem
    ring.active_name = "k1"
    assert ring.active() is None
    assert not ring.is_usable
    assert "k1 in" in ring.problem
    assert "32 bytes" in ring.problem
    ring.active_name = "k2"
    assert ring.active() is not None
    assert "not a key" in ring.problem


def test_no_key_is_ever_shown(mount: KubeletMount) -> None:
    ring = ring_of(mount, "k1", k1=SECRET, broken=SECRET[:20])
    key = ring.active()
    for form in (SECRET.hex(), repr(SECRET)[2:-1], base64.b64encode(SECRET).decode(), SECRET[:20].hex()):
        assert form not in f"{key!r} {key} {ring!r} {ring.problem} {[key]}"
