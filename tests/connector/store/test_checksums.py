# SPDX-License-Identifier: Apache-2.0
"""Checksums: pinned values, any pieces, and a Python without the library that the faster one needs."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.store.header import DEFAULT_ALGORITHM, Algorithm, checksum, new_hasher

PAYLOAD = bytes(index * 7 % 256 for index in range(8192))
DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("algorithm", "pinned"),
    [
        (Algorithm.BLAKE3_256, "1299b73a9c0e9ee19ea671262c301371185f3df0bf8102228cbae67d937fe4dc"),
        (Algorithm.AES_GMAC, "db5ee3dae7555945c587aa13b65c108c" + 32 * "0"),
    ],
)
def test_a_checksum_is_what_it_always_was(algorithm: Algorithm, pinned: str) -> None:
    assert checksum(memoryview(PAYLOAD), algorithm).hex() == pinned


@pytest.mark.parametrize("algorithm", [Algorithm.BLAKE3_256, Algorithm.AES_GMAC])
@given(cuts=st.lists(st.integers(0, len(PAYLOAD)), max_size=6))
def test_the_pieces_do_not_matter(algorithm: Algorithm, cuts: list[int]) -> None:
    hasher = new_hasher(algorithm)
    places = [0, *sorted(cuts), len(PAYLOAD)]
    for start, end in itertools.pairwise(places):
        hasher.update(memoryview(PAYLOAD)[start:end])
    assert hasher.digest() == checksum(memoryview(PAYLOAD), algorithm)


def test_what_is_no_checksum_cannot_be_computed() -> None:
    for algorithm in (Algorithm.NONE, 7):
        with pytest.raises(ValueError, match="cannot be computed here"):
            new_hasher(algorithm)


WITHOUT = """
import sys
sys.modules["cryptography"] = None
from pathlib import Path
from kvtier_connector.store.blockstore import BlockStore, Hit, Stored, StoreFault
from kvtier_connector.store.header import DEFAULT_ALGORITHM, Algorithm
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import BlockKey, block_path
root, data, payload = Path(sys.argv[1]), Path(sys.argv[2]), memoryview(bytes(index * 7 % 256 for index in range(8192)))
of, into = BlockKey(bytes(range(32)), 3, "acme"), memoryview(bytearray(8192))
store = BlockStore(root, direct=False)
assert DEFAULT_ALGORITHM is Algorithm.BLAKE3_256
assert isinstance(store.put(of, payload), Stored)
assert isinstance(store.get(of, into), Hit) and into == payload
(root / block_path(of)).write_bytes((data / "block_v4_gmac.kvb").read_bytes())
assert store.get(of, into) is Fault.ALGORITHM
assert isinstance(store.put(of, payload), Stored)
(root / block_path(of)).write_bytes((data / "block_v4_encrypted.kvb").read_bytes())
(root / "keys").mkdir()
(root / "keys" / "k1").write_bytes(bytes(range(32)))
store = BlockStore(root, direct=False, keys_dir=str(root / "keys"))
store.keyring.active_name = "k1"
assert store.get(of, into) is Fault.KEY_MISSING
assert store.put(of, payload) is StoreFault.NO_KEY
assert "cryptography" in store.keyring.problem
assert (root / block_path(of)).exists()
"""


def test_without_the_library_blocks_are_written_with_the_other_checksum_and_never_in_clear(tmp_path: Path) -> None:
    assert DEFAULT_ALGORITHM is Algorithm.AES_GMAC
    subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path / "d1gest"), str(DATA)], check=True)
