# SPDX-License-Identifier: Apache-2.0
"""What verifying and encrypting cost one core: ``python -m e2e.bench.checksums``. Bytes are in memory already.

Prints GB/s, the best of the repetitions: a core that does nothing else. FORMAT.md cites it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import cryptography

from kvtier_connector.store.checksums import Algorithm, checksum
from kvtier_connector.store.format import Header
from kvtier_connector.store.keyring import parse_key
from kvtier_connector.store.layout import BlockKey, Home
from kvtier_connector.store.sealing import encrypt

MIB = 1 << 20


def best(act: Callable[[], object], repetitions: int) -> float:
    """Return the shortest time in seconds."""
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=8, help="length of a payload")
    parser.add_argument("--repetitions", type=int, default=50)
    options = parser.parse_args()
    payload = memoryview(bytearray(options.mib * MIB))
    key = parse_key("bench", bytes(range(32)))
    assert key is not None
    header = Header(BlockKey(bytes(32), 0), payload.nbytes, bytes(32), 0, Home("bench"))
    acts: dict[str, Callable[[], object]] = {
        "AES-GMAC (checksum)": lambda: checksum(payload, Algorithm.AES_GMAC),
        "AES-256-GCM (encryption)": lambda: encrypt(header, payload, payload, key),
        "BLAKE3-256 (checksum)": lambda: checksum(payload, Algorithm.BLAKE3_256),
    }
    sys.stdout.write(f"cryptography {cryptography.__version__}, {options.mib} MiB\n")
    for name, act in acts.items():
        sys.stdout.write(f"{name:26} {payload.nbytes / best(act, options.repetitions) / 1e9:6.1f} GB/s\n")


if __name__ == "__main__":
    main()
