# SPDX-License-Identifier: Apache-2.0
"""An engine stores while the janitor permits it, and no longer: whatever clocks say, and whatever lies in the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from clocks import Clock
from planted import KINDS, TOO_DEEP, plant

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.store.blockstore import StoreFault
from kvtier_connector.store.permit import (
    ALL_TENANTS,
    PERMIT_BYTES,
    PERMIT_FILE,
    Permit,
    StorePermit,
    decode_permit,
    encode_permit,
)

NOON = 1_800_000_000.0
"""The volume's time at the start, in seconds since 1970."""
SECONDS = 60.0


class Volume:
    """A volume with a clock of its own, and an engine's permit on it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / PERMIT_FILE
        self.clock = Clock()
        self._began = self.clock()
        self._turn = 0
        self.engine = self.start_engine()

    def start_engine(self, *, knows_time: bool = True) -> StorePermit:
        permit = StorePermit(str(self.path), now=self.clock)
        if knows_time:
            permit.set_time(int(self.time() * 1e9))
        return permit

    def time(self) -> float:
        return NOON + self.clock() - self._began

    def renew(self, count: int = 1000, *, stamped: float | None = None, tenants: tuple[str, ...] = ()) -> None:
        self._turn += 1
        reason = "" if count else "the volume is full"
        self.write(encode_permit(Permit(f"n{self._turn}", SECONDS, count, frozenset(tenants), reason)), stamped=stamped)

    def write(self, content: bytes, *, stamped: float | None = None) -> None:
        self.path.write_bytes(content)
        at = self.time() if stamped is None else stamped
        os.utime(self.path, (at, at))


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def test_nothing_is_stored_without_a_permit(volume: Volume) -> None:
    volume.engine.refresh()
    assert volume.engine.reserve(1) is StoreFault.NO_PERMIT
    assert PERMIT_FILE in volume.engine.reason


def test_a_permit_allows_so_many_bytes_until_the_next_one(volume: Volume) -> None:
    volume.renew(1000)
    volume.engine.refresh()
    assert volume.engine.reserve(600) is None
    assert volume.engine.reserve(600) is StoreFault.NO_BUDGET
    volume.engine.end(600, 200)
    assert volume.engine.reserve(600) is None
    volume.engine.end(600, 600)
    volume.renew(1000)
    volume.engine.refresh()
    assert volume.engine.reserve(1000) is None


def test_one_block_that_is_larger_than_the_share_is_allowed_while_no_other_is_written(volume: Volume) -> None:
    volume.renew(100)
    volume.engine.refresh()
    assert volume.engine.reserve(600) is None
    assert volume.engine.reserve(600) is StoreFault.NO_BUDGET
    volume.engine.end(600, 600)
    assert volume.engine.reserve(600) is StoreFault.NO_BUDGET


def test_bytes_that_are_still_being_written_count_against_the_next_permit(volume: Volume) -> None:
    volume.renew(1000)
    volume.engine.refresh()
    assert volume.engine.reserve(900) is None
    volume.renew(1000)
    volume.engine.refresh()
    assert volume.engine.reserve(200) is StoreFault.NO_BUDGET


def test_a_permit_ends_when_it_is_not_renewed(volume: Volume) -> None:
    volume.renew()
    volume.engine.refresh()
    volume.clock.seconds += SECONDS - 1
    volume.engine.refresh()
    assert volume.engine.refusal() is None
    volume.clock.seconds += 1
    volume.engine.refresh()
    assert volume.engine.reserve(1) is StoreFault.NO_PERMIT


def test_an_old_permit_is_not_believed_by_an_engine_that_starts(volume: Volume) -> None:
    volume.renew()
    volume.clock.seconds += SECONDS / 2
    half = volume.start_engine()
    half.refresh()
    assert half.refusal() is None
    volume.clock.seconds += SECONDS / 2
    assert half.refusal() is StoreFault.NO_PERMIT
    late = volume.start_engine()
    late.refresh()
    assert late.refusal() is StoreFault.NO_PERMIT


@pytest.mark.parametrize("skew", [-3600.0, 3600.0], ids=["behind", "ahead"])
def test_where_modification_times_are_not_of_one_clock_the_next_renewal_counts(volume: Volume, skew: float) -> None:
    volume.renew(stamped=volume.time() + skew)
    volume.engine.refresh()
    assert volume.engine.refusal() is StoreFault.NO_PERMIT
    volume.clock.seconds += 5
    volume.renew(stamped=volume.time() + skew)
    volume.engine.refresh()
    assert volume.engine.refusal() is None
    volume.clock.seconds += SECONDS - 5
    assert volume.engine.refusal() is StoreFault.NO_PERMIT


def test_an_engine_that_does_not_know_the_time_of_the_volume_waits_for_a_renewal(volume: Volume) -> None:
    engine = volume.start_engine(knows_time=False)
    volume.renew()
    engine.refresh()
    assert engine.refusal() is StoreFault.NO_PERMIT
    volume.renew()
    engine.refresh()
    assert engine.refusal() is None


def test_a_tenant_over_its_quota_is_refused_and_no_other(volume: Volume) -> None:
    volume.renew(tenants=("red",))
    volume.engine.refresh()
    assert volume.engine.reserve(1, "red") is StoreFault.NO_QUOTA
    assert volume.engine.reserve(1, "blue") is None
    assert volume.engine.reserve(1) is None


def test_tenants_that_do_not_fit_the_file_make_all_tenants_wait(volume: Volume) -> None:
    volume.renew(tenants=tuple(f"tenant-{number:025d}" for number in range(1000)))
    assert volume.path.stat().st_size == PERMIT_BYTES
    volume.engine.refresh()
    assert volume.engine.reserve(1, "blue") is StoreFault.NO_QUOTA
    assert volume.engine.reserve(1) is None


def test_a_permit_of_nothing_says_why(volume: Volume) -> None:
    volume.renew(0)
    volume.engine.refresh()
    assert volume.engine.reserve(1) is StoreFault.NO_BUDGET
    assert volume.engine.reason == "the volume is full"


def test_without_a_janitor_there_is_no_limit(volume: Volume) -> None:
    volume.engine.is_needed = False
    assert volume.engine.reserve(1 << 50) is None
    assert volume.engine.reason == ""


@pytest.mark.parametrize("kind", [*KINDS, "empty", "half", "other", "deep", "negative", "late"])
def test_what_is_no_permit_allows_nothing_and_is_named(volume: Volume, kind: str) -> None:
    good = encode_permit(Permit("n", SECONDS, 1000))
    content = {
        "empty": b"",
        "half": good[:30],
        "other": good.replace(b"1000", b"9999"),
        "deep": TOO_DEEP,
        "negative": encode_permit(Permit("n", SECONDS, -1)),
        "late": encode_permit(Permit("n", 1e9, 1)),
    }
    if kind in content:
        volume.write(content[kind])
    else:
        plant(kind, volume.path)
    volume.engine.refresh()
    assert volume.engine.reserve(1) is StoreFault.NO_PERMIT
    assert str(volume.path) in volume.engine.reason


@pytest.mark.parametrize(
    "permit",
    [
        Permit("a" * 32, 60.0, 1 << 62),
        Permit("b", 1.0, 0, frozenset({"x", "y"}), "full"),
        Permit("c", 60.0, 5, frozenset({ALL_TENANTS})),
    ],
)
def test_what_is_written_is_read(permit: Permit) -> None:
    content = encode_permit(permit)
    assert len(content) == PERMIT_BYTES
    assert decode_permit(content) == permit


def test_half_of_one_permit_and_half_of_another_is_none() -> None:
    one, other = (encode_permit(Permit(number * 32, 60.0, 1000)) for number in "ab")
    with pytest.raises(ConfigInvalid):
        decode_permit(one[:60] + other[60:])
