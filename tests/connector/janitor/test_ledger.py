# SPDX-License-Identifier: Apache-2.0
"""The ledger agrees with a plain dict of blocks, whatever engines tell, in whatever order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_connector.janitor.catalog import Ledger, Sum, make_blocks
from kvtier_connector.janitor.policy import Limits, choose
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.journal import Op, Record
from kvtier_connector.store.layout import BlockKey, Lineage


def key(number: int, tenant: str = "", group: int = 0) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") * 8, group, tenant)


def stored(number: int, time_ns: int, *, tenant: str = "", parent: int | None = None, position: int = 0) -> Record:
    lineage = Lineage(key(parent).hash if parent is not None else b"", position)
    return Record(Op.STORED, key(number, tenant), 100, time_ns, lineage)


news = st.lists(
    st.tuples(st.sampled_from(list(Op)), st.integers(0, 9), st.sampled_from(["", "alice"]), st.integers(0, 1)),
    max_size=60,
)


@given(news)
@settings(max_examples=100, deadline=None)
def test_what_was_told_is_what_is_counted(told: list[tuple[Op, int, str, int]]) -> None:
    ledger, model = Ledger(), set()
    generations = [ledger.generation("aa"), ledger.generation("bb")]
    for time_ns, (op, number, tenant, which) in enumerate(told, start=1):
        place = (generations[which], key(number, tenant))
        doubtful = ledger.apply(generations[which], [Record(op, key(number, tenant), 100, time_ns)])
        if op is Op.STORED:
            model.add(place)
        elif op in {Op.USED, Op.RETAINED}:
            assert bool(doubtful) == (place not in model)
        else:
            # A removal is believed once the file is seen to be gone.
            assert doubtful == []
        if time_ns % 7 == 0:
            ledger.renumber()
    assert ledger.total == ledger.unconfirmed == Sum(len(model), len(model) * (HEADER_BYTES + 100))
    for generation in generations:
        for number in range(10):
            for tenant in ("", "alice"):
                row = ledger.find(generation, key(number, tenant))
                assert (row >= 0) == ((generation, key(number, tenant)) in model)
                assert row < 0 or ledger.key(row) == key(number, tenant)


def test_many_blocks_are_all_found_again() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    count = 70_000
    ledger.apply(generation, (stored(number, number + 1) for number in range(count)))
    assert ledger.total.blocks == count
    assert all(ledger.key(ledger.find(generation, key(number))) == key(number) for number in range(0, count, 997))


def test_a_record_of_a_block_that_was_removed_is_looked_at_whatever_its_time_is() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    ledger.apply(generation, [stored(1, 10)])
    ledger.forget([ledger.find(generation, key(1))])
    for time_ns in (9, 21):
        ledger.has_suspects = False
        ledger.apply(generation, [stored(1, time_ns)])
        assert (ledger.has_suspects, ledger.unconfirmed) == (True, Sum(1, HEADER_BYTES + 100))


def test_a_removal_that_a_journal_tells_of_is_looked_at_whatever_its_time_is() -> None:
    for time_ns in (9, 40):
        ledger = Ledger()
        generation = ledger.generation("aa")
        ledger.apply(generation, [stored(1, 10)])
        ledger.confirm(ledger.find(generation, key(1)), size=5000, created_ns=10)
        assert ledger.unconfirmed == Sum()
        ledger.apply(generation, [Record(Op.GONE, key(1), 100, time_ns)])
        assert (ledger.has_suspects, ledger.unconfirmed, ledger.total) == (True, Sum(1, 5000), Sum(1, 5000))


def test_no_record_makes_a_block_larger_than_its_file_or_than_any_of_its_generation() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    ledger.apply(generation, [stored(1, 10)])
    ledger.confirm(ledger.find(generation, key(1)), size=5000, created_ns=10)
    ledger.apply(generation, [Record(Op.STORED, key(number), 1 << 40, 11) for number in (1, 2)])
    assert ledger.total == Sum(2, 10_000)


def test_a_walk_forgets_what_it_did_not_find_and_keeps_what_was_stored_meanwhile() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    ledger.apply(generation, [stored(1, 10), stored(2, 10)])
    ledger.begin_walk()
    ledger.see(ledger.find(generation, key(1)))
    ledger.apply(generation, [stored(3, 30)])
    assert ledger.end_walk() == 1
    assert [ledger.find(generation, key(number)) >= 0 for number in (1, 2, 3)] == [True, False, True]


def test_a_generation_is_dropped_whole() -> None:
    ledger = Ledger()
    one, two = ledger.generation("aa"), ledger.generation("bb")
    ledger.apply(one, [stored(1, 10), stored(2, 10)])
    ledger.apply(two, [stored(1, 10)])
    ledger.drop_generation(one)
    assert ledger.total.blocks == 1
    assert ledger.find(two, key(1)) >= 0


def test_who_used_or_continued_a_block_since_is_remembered() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    ledger.apply(generation, [stored(1, 10)])
    ledger.touched.clear()
    ledger.apply(generation, [stored(2, 11, parent=1, position=1), Record(Op.USED, key(1), 100, 12)])
    assert ledger.touched == [ledger.find(generation, key(2)), ledger.find(generation, key(1))]


def test_the_place_of_a_dropped_generation_is_taken_again() -> None:
    ledger = Ledger()
    for number in range(1000):
        generation = ledger.generation(f"{number:04x}")
        ledger.apply(generation, [stored(1, 10 + number)])
        assert ledger.total.blocks == 1
        ledger.drop_generation(generation)
    assert ledger.total.blocks == 0


def test_tenants_may_be_very_many() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    count = 70_000
    ledger.apply(generation, (stored(1, 10, tenant=f"t{number}") for number in range(count)))
    ledger.renumber()
    assert ledger.total.blocks == count
    assert ledger.key(ledger.find(generation, key(1, "t69999"))) == key(1, "t69999")


def test_tenants_that_have_no_block_any_more_are_forgotten_and_the_others_stay_as_they_are() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    ledger.apply(generation, (stored(number, 10, tenant=f"t{number}") for number in range(1000)))
    ledger.apply(generation, [stored(2001, 11, tenant="t998", parent=998, position=1)])
    for number in range(998):
        ledger.forget([ledger.find(generation, key(number, f"t{number}"))])
    ledger.renumber()
    assert ledger.tenants == ["", "t998", "t999"]
    for number, tenant in ((998, "t998"), (999, "t999"), (2001, "t998")):
        assert ledger.key(ledger.find(generation, key(number, tenant))) == key(number, tenant)
    assert {ledger.tenants[tenant]: each.blocks for (_, tenant), each in ledger.sums().items()} == {
        "t998": 2,
        "t999": 1,
    }
    continued = ledger.find(generation, key(2001, "t998"))
    assert ledger.find_name(int(ledger.rows["parent"][continued])) == ledger.find(generation, key(998, "t998"))
    ledger.apply(generation, [stored(1, 20, tenant="t1")])
    assert ledger.key(ledger.find(generation, key(1, "t1"))) == key(1, "t1")
    assert ledger.total.blocks == 4


def test_whoever_asks_for_a_tenants_block_does_not_add_the_tenant() -> None:
    ledger = Ledger()
    generation = ledger.generation("aa")
    used = [Record(Op.USED, key(number, f"t{number}"), 100, 12) for number in range(1000)]
    assert ledger.apply(generation, used) == used
    assert ledger.tenants == [""]


@given(news)
@settings(max_examples=50, deadline=None)
def test_a_ledger_that_was_restored_counts_as_before(told: list[tuple[Op, int, str, int]]) -> None:
    ledger = Ledger()
    numbers = [ledger.generation("aa"), ledger.generation("bb")]
    for time_ns, (op, number, tenant, which) in enumerate(told):
        ledger.apply(numbers[which], [Record(op, key(number, tenant), 100, time_ns + 1)])
    other = Ledger()
    other.restore(
        ledger.rows.copy(), generations=list(ledger.generations), tenants=list(ledger.tenants), epoch=ledger.epoch
    )
    assert other.sums() == ledger.sums()


def told(op: Op, number: int, time_ns: int) -> Record:
    return Record(op, key(number), 100, time_ns)


def order_of_eviction(ledger: Ledger) -> list[int]:
    """Return the numbers of the blocks, the one that goes first at the front."""
    for row in range(ledger.rows.size):
        ledger.confirm(row, size=5000, created_ns=1)
    blocks, rows = make_blocks(ledger, order=["aa"], pins=())
    everything = int(blocks.size.sum())
    choice = choose(blocks, Limits(high_bytes=1, low_bytes=0))
    assert int(blocks.size[choice.rows].sum()) == everything
    return [int.from_bytes(ledger.key(int(rows[row])).hash[:4], "little") for row in choice.rows]


def chains() -> tuple[Ledger, int]:
    """Return a ledger with 0-1-2, 0-1-3 and 4, stored in this order."""
    ledger = Ledger()
    generation = ledger.generation("aa")
    ledger.apply(
        generation,
        [
            stored(0, 1),
            stored(1, 2, parent=0, position=1),
            stored(2, 3, parent=1, position=2),
            stored(3, 4, parent=1, position=2),
            stored(4, 5),
        ],
    )
    return ledger, generation


def test_what_is_retained_goes_after_what_was_used_until_its_time_is_over() -> None:
    ledger, generation = chains()
    ledger.apply(generation, [told(Op.RETAINED, 2, 100), told(Op.USED, 4, 50), told(Op.USED, 3, 60)])
    assert order_of_eviction(ledger) == [4, 3, 2, 1, 0]
    ledger.apply(generation, [told(Op.USED, 4, 101)])
    assert order_of_eviction(ledger) == [3, 2, 1, 0, 4]


def test_to_go_on_from_a_block_that_nobody_told_of_is_no_use_of_it() -> None:
    ledger = Ledger()
    generation = ledger.generation("digest")
    (doubtful,) = ledger.apply(generation, [stored(2, 70, parent=1, position=1)])
    assert (doubtful.key, doubtful.time_ns) == (key(1), 0)
