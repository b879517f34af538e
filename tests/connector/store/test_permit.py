# SPDX-License-Identifier: Apache-2.0
"""An engine stores while the janitor permits it, whatever clocks and files say; a circuit opens where calls fail."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from store_faults import KINDS, TOO_DEEP, FailingFs, KubeletMount, NotingFs, plant
from waiting import Clock

from kvtier_connector.contract.engine import LiveSettings, encode_live
from kvtier_connector.store import permit as permits
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.header import Fault
from kvtier_connector.store.health import Breaker, BreakerLimits, CircuitState, Direction
from kvtier_connector.store.permit import (
    ALL_TENANTS,
    PERMIT_BYTES,
    Mode,
    Permit,
    RuntimeSettings,
    StorePermit,
    encode_permit,
)

NOON = 1_800_000_000.0
"""The volume's time at the start, in seconds since 1970."""
SECONDS = 60.0


class Volume:
    def __init__(self, directory: Path) -> None:
        self.path = directory / permits.PERMIT_FILE
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
        self.engine.refresh()

    def write(self, content: bytes, *, stamped: float | None = None) -> None:
        self.path.write_bytes(content)
        at = self.time() if stamped is None else stamped
        os.utime(self.path, (at, at))


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


@pytest.mark.parametrize("janitor", ["none needed", "no permit yet", "no room"])
def test_who_stores_nothing_is_told_why(volume: Volume, janitor: str) -> None:
    if janitor == "no room":
        volume.renew(0)
    volume.engine.is_needed = janitor != "none needed"
    volume.engine.refresh()
    refusal, reason = {
        "none needed": (None, ""),
        "no permit yet": (StoreFault.NO_PERMIT, permits.PERMIT_FILE),
        "no room": (StoreFault.NO_BUDGET, "the volume is full"),
    }[janitor]
    assert volume.engine.reserve(1 << 50) is refusal
    assert volume.engine.reason.endswith(reason) if not reason else reason in volume.engine.reason


def test_a_permit_allows_so_many_bytes_until_the_next_one(volume: Volume) -> None:
    volume.renew(1000)
    assert volume.engine.reserve(600) is None
    assert volume.engine.reserve(600) is StoreFault.NO_BUDGET
    volume.engine.end(600, 200)
    assert volume.engine.reserve(600) is None
    volume.engine.end(600, 600)
    volume.renew(1000)
    assert volume.engine.reserve(900) is None
    volume.renew(1000)
    assert volume.engine.reserve(200) is StoreFault.NO_BUDGET, "what is still being written counts"


def test_one_block_that_is_larger_than_the_share_is_allowed_while_no_other_is_written(volume: Volume) -> None:
    volume.renew(100)
    assert volume.engine.reserve(600) is None
    assert volume.engine.reserve(600) is StoreFault.NO_BUDGET
    volume.engine.end(600, 600)
    assert volume.engine.reserve(600) is StoreFault.NO_BUDGET


def test_a_permit_ends_when_it_is_not_renewed_also_for_an_engine_that_starts_later(volume: Volume) -> None:
    volume.renew()
    volume.clock.seconds += SECONDS / 2
    later = volume.start_engine()
    later.refresh()
    volume.clock.seconds += SECONDS / 2 - 1
    volume.engine.refresh()
    assert (volume.engine.refusal(), later.refusal()) == (None, None)
    volume.clock.seconds += 1
    volume.engine.refresh()
    assert volume.engine.reserve(1) is StoreFault.NO_PERMIT
    assert later.refusal() is StoreFault.NO_PERMIT
    late = volume.start_engine()
    late.refresh()
    assert late.refusal() is StoreFault.NO_PERMIT


@pytest.mark.parametrize("skew", [-3600.0, 3600.0, None], ids=["behind", "ahead", "unknown"])
def test_where_modification_times_are_not_of_one_clock_a_renewal_counts(volume: Volume, skew: float | None) -> None:
    engine = volume.start_engine(knows_time=skew is not None)
    volume.renew(stamped=volume.time() + (skew or 0))
    engine.refresh()
    assert engine.refusal() is StoreFault.NO_PERMIT
    volume.clock.seconds += 5
    volume.renew(stamped=volume.time() + (skew or 0))
    engine.refresh()
    assert engine.refusal() is None
    volume.clock.seconds += SECONDS - 5
    assert engine.refusal() is StoreFault.NO_PERMIT


def test_a_tenant_over_its_quota_is_refused_and_no_other_if_all_of_them_fit_the_file(volume: Volume) -> None:
    many = tuple(f"tenant-{number:025d}" for number in range(1000))
    for refused, blue in ((("red",), None), (many, StoreFault.NO_QUOTA)):
        volume.renew(tenants=refused)
        assert volume.path.stat().st_size == PERMIT_BYTES
        volume.engine.refresh()
        assert volume.engine.reserve(1, "red") is StoreFault.NO_QUOTA
        assert volume.engine.reserve(1, "blue") is blue
        assert volume.engine.reserve(1) is None


@pytest.mark.parametrize("kind", [*KINDS, "empty", "half", "other", "two halves", "deep", "negative", "late"])
def test_what_is_no_permit_allows_nothing_and_is_named(volume: Volume, kind: str) -> None:
    good = encode_permit(Permit("n", SECONDS, 1000))
    content = {
        "empty": b"",
        "half": good[:30],
        "other": good.replace(b"1000", b"9999"),
        "two halves": good[:60] + encode_permit(Permit("m", SECONDS, 1000))[60:],
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


@pytest.mark.parametrize(("left", "tenants", "reason"), [(1 << 62, "", ""), (0, "xy", "full"), (5, ALL_TENANTS, "")])
def test_what_is_written_is_read(left: int, tenants: str, reason: str) -> None:
    permit = Permit("a" * 32, 1.0, left, frozenset(tenants), reason)
    content = encode_permit(permit)
    assert len(content) == PERMIT_BYTES
    assert permits.decode_permit(content) == permit


def said(mode: Mode) -> bytes:
    return encode_live(mode.value).encode()


@pytest.fixture
def mounted(tmp_path: Path) -> KubeletMount:
    return KubeletMount(tmp_path)


@pytest.fixture
def live_file(tmp_path: Path) -> RuntimeSettings:
    return RuntimeSettings(str(tmp_path / "mode"), seconds=0)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("end", ["", "\n", "  \r\n"])
def test_each_mode_is_understood(mounted: KubeletMount, live_file: RuntimeSettings, mode: Mode, end: str) -> None:
    mounted.put(mode=said(mode) + end.encode())
    assert live_file.refresh().mode == mode.value
    assert live_file.mode is mode
    assert live_file.problem == ""


@pytest.mark.parametrize(
    "content",
    [b"", b"Bypass", b'{"mode": "bypass"}', b'{"mode": ["Bypass"]}', b"{}", b"\xff\xfe", b"x" * 5000, b"[]", None]
    + [b'{"mode": "Bypass", "needs_permit": %s}' % value for value in (b"0", b"1", b'"true"', b"null")]
    + [b'{"mode": "Bypass", "active_key": %s}' % value for value in (b"1", b'"../x"', b'""a')],
)
def test_what_cannot_be_understood_keeps_the_last_mode_and_is_reported(
    mounted: KubeletMount, live_file: RuntimeSettings, content: bytes | None
) -> None:
    mounted.put(mode=said(Mode.READ_ONLY))
    live_file.refresh()
    mounted.put(**({} if content is None else {"mode": content}))
    assert live_file.refresh().mode == "ReadOnly"
    assert "staying with mode ReadOnly" in live_file.problem
    mounted.put(mode=said(Mode.READ_WRITE))
    assert live_file.refresh().mode == "ReadWrite"
    assert live_file.problem == ""


@pytest.mark.parametrize(("call", "why"), [("open", "broken"), ("preadv", "broken"), ("", "No such file")])
def test_a_file_that_is_not_there_or_cannot_be_read_leaves_the_volume_in_use(
    mounted: KubeletMount, tmp_path: Path, call: str, why: str
) -> None:
    mounted.put(**({"mode": said(Mode.BYPASS)} if call else {}))
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda name, path: name == call)
    live_file = RuntimeSettings(str(tmp_path / "mode"), seconds=0, fs=fs)
    assert live_file.refresh().mode == "ReadWrite"
    assert "cannot be read" in live_file.problem
    assert why in live_file.problem


def test_the_file_is_read_at_most_every_so_many_seconds(mounted: KubeletMount, tmp_path: Path) -> None:
    clock, fs = Clock(1000.0), NotingFs()
    mounted.put(mode=said(Mode.READ_WRITE))
    live_file = RuntimeSettings(str(tmp_path / "mode"), seconds=5, fs=fs, now=clock)
    for _ in range(11):
        live_file.refresh()
        clock.seconds += 1
    assert fs.calls.count("open") == 3


def test_the_limit_and_the_active_key_are_live_too(mounted: KubeletMount, live_file: RuntimeSettings) -> None:
    mounted.put(mode=encode_live("ReadWrite", needs_permit=True, active_key="k1").encode())
    assert live_file.refresh() == LiveSettings(mode="ReadWrite", needs_permit=True, active_key="k1")
    # A field of a later release is ignored.
    mounted.put(mode=json.dumps({"mode": "ReadWrite", "colour": "blue"}).encode())
    assert live_file.refresh() == LiveSettings(mode="ReadWrite")


LOAD, STORE = Direction.LOAD, Direction.STORE
CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    limits = BreakerLimits(bad_in_a_row=3, first_backoff_seconds=2, longest_backoff_seconds=10, attempt_seconds=30)
    return Breaker(limits=limits, now=clock)


def states(breaker: Breaker) -> tuple[CircuitState, CircuitState]:
    return breaker.state(LOAD), breaker.state(STORE)


def is_open_for(seconds: float, breaker: Breaker, direction: Direction, clock: Clock) -> bool:
    """Let so many seconds pass; tell whether the circuit was open until then, and is half open now."""
    clock.seconds += seconds - 0.25
    before = breaker.state(direction)
    clock.seconds += 0.25
    return (before, breaker.state(direction)) == (OPEN, HALF_OPEN)


STORE_TABLE = {
    "a stored block is good": (Stored(1), CLOSED, CLOSED),
    "a block that was there says nothing": (Present(), CLOSED, CLOSED),
    "our own limit says nothing about the volume": (StoreFault.NO_BUDGET, CLOSED, CLOSED),
    "a full volume stops stores at once": (StoreFault.NO_SPACE, OPEN, OPEN),
    "a read-only volume stops stores at once": (StoreFault.READ_ONLY, OPEN, OPEN),
    "a volume that denies stops stores at once": (StoreFault.DENIED, OPEN, OPEN),
    "a host without descriptors stops stores if it stays so": (StoreFault.RESOURCES, CLOSED, OPEN),
    "a failing volume stops stores if it stays so": (StoreFault.IO, CLOSED, OPEN),
}


@pytest.mark.parametrize(("outcome", "after_one", "after_three"), STORE_TABLE.values(), ids=STORE_TABLE)
def test_what_a_store_does_to_its_circuit_and_never_to_loads(
    breaker: Breaker, outcome: Stored | Present | StoreFault, after_one: CircuitState, after_three: CircuitState
) -> None:
    breaker.record_store(outcome)
    assert states(breaker) == (CLOSED, after_one)
    breaker.record_store(outcome)
    breaker.record_store(outcome)
    assert states(breaker) == (CLOSED, after_three)


@pytest.mark.parametrize("outcome", [Hit(1), Miss(), *Fault])
def test_what_a_load_does_to_its_circuit_and_never_to_stores(breaker: Breaker, outcome: Hit | Miss | Fault) -> None:
    breaker.record_load(outcome)
    breaker.record_load(outcome)
    assert states(breaker) == (CLOSED, CLOSED)
    breaker.record_load(outcome)
    assert states(breaker) == (OPEN if outcome is Fault.IO else CLOSED, CLOSED)


@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_a_time_out_opens_its_own_direction_at_once(breaker: Breaker, direction: Direction) -> None:
    breaker.record_timeout(direction)
    assert breaker.state(direction) is OPEN
    assert [breaker.state(other) for other in Direction if other is not direction] == [CLOSED]


def test_a_success_between_two_faults_starts_the_count_anew_and_what_says_nothing_does_not(breaker: Breaker) -> None:
    for outcome in (Fault.IO, Fault.IO, Miss(), Fault.IO, Fault.IO, Hit(1)):
        breaker.record_load(outcome)
    for outcome in (StoreFault.IO, StoreFault.IO, Present(), StoreFault.NO_BUDGET, StoreFault.IO):
        breaker.record_store(outcome)
    assert states(breaker) == (CLOSED, OPEN)


def test_an_open_circuit_lets_one_attempt_through_when_the_back_off_is_over(breaker: Breaker, clock: Clock) -> None:
    breaker.record_store(StoreFault.NO_SPACE)
    clock.seconds += 1.75
    assert (breaker.has_room(STORE), breaker.admit(STORE)) == (False, False)
    clock.seconds += 0.25
    assert breaker.state(STORE) is HALF_OPEN
    assert breaker.has_room(STORE)
    assert [breaker.admit(STORE) for _ in range(3)] == [True, False, False]
    assert not breaker.has_room(STORE)
    breaker.record_store(Stored(1))
    assert breaker.state(STORE) is CLOSED
    assert all(breaker.admit(STORE) for _ in range(5))


def test_each_attempt_that_fails_doubles_the_back_off_up_to_the_longest(breaker: Breaker, clock: Clock) -> None:
    breaker.record_store(StoreFault.NO_SPACE)
    for backoff in (2, 4, 8, 10, 10):
        assert is_open_for(backoff, breaker, STORE, clock)
        assert breaker.admit(STORE)
        breaker.record_store(StoreFault.NO_SPACE)
    clock.seconds += 10
    assert breaker.admit(STORE)
    # After a recovery it is short again.
    breaker.record_store(Stored(1))
    breaker.record_store(StoreFault.READ_ONLY)
    assert is_open_for(2, breaker, STORE, clock)


@pytest.mark.parametrize("says_nothing", [Present(), StoreFault.NO_BUDGET])
def test_attempts_that_say_nothing_are_none(breaker: Breaker, clock: Clock, says_nothing: Present | StoreFault) -> None:
    breaker.record_store(StoreFault.NO_SPACE)
    clock.seconds += 2
    breaker.admit(STORE)
    breaker.record_store(says_nothing)
    assert breaker.state(STORE) is HALF_OPEN
    assert breaker.admit(STORE)
    breaker.skip(STORE)
    assert breaker.admit(STORE)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_attempt_that_times_out_or_never_ends_has_failed(breaker: Breaker, clock: Clock, is_told: bool) -> None:
    breaker.record_timeout(LOAD)
    clock.seconds += 2
    if is_told:
        breaker.record_timeout(LOAD)
    else:
        assert breaker.admit(LOAD)
        clock.seconds += 29.9
        assert breaker.state(LOAD) is HALF_OPEN
        clock.seconds += 0.1
    assert is_open_for(4, breaker, LOAD, clock)


def test_operations_that_began_before_the_circuit_opened_change_nothing(breaker: Breaker, clock: Clock) -> None:
    for _ in range(16):
        breaker.record_timeout(LOAD)
    breaker.record_load(Hit(1))
    assert is_open_for(2, breaker, LOAD, clock)
    breaker.record_load(Fault.IO)
    assert breaker.state(LOAD) is HALF_OPEN
