"""The plan of one device's memory: who starts, who goes, who waits and who can never be loaded."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.evictions import MemoryDemand, MemoryPlan, Resident, plan_memory

GIB = 1 << 30


def resident(key: int, size: int, used: float = 0.0, stays: str = "", leaves: bool = False):
    return Resident(key, f"m{key}/1", size * GIB, used, stays, leaves)


def demand(key: int, size: int, *, evicts: bool = True) -> MemoryDemand:
    return MemoryDemand(key, f"m{key}/1", size * GIB, evicts)


def plan(limit: int, residents: list[Resident], *demands: MemoryDemand) -> MemoryPlan:
    return plan_memory(limit * GIB, residents, demands)


def test_a_model_starts_where_there_is_room():
    assert plan(4, [resident(1, 2)], demand(2, 2)) == MemoryPlan(start=(2,))


def test_the_least_recently_used_idle_model_goes_and_the_other_waits_for_its_memory():
    found = plan(4, [resident(1, 2, 20.0), resident(2, 2, 10.0)], demand(3, 1))
    assert found.evict == (2,) and found.start == ()
    assert found.waits == {3: "other models are being stopped"}
    leaving = [resident(1, 2, 20.0), resident(2, 2, 10.0, leaves=True)]
    assert plan(4, leaving, demand(3, 1)).evict == ()
    assert plan(4, leaving[:1], demand(3, 1)).start == (3,)


def test_no_more_goes_than_is_needed():
    residents = [resident(1, 1, 10.0), resident(2, 3, 20.0), resident(3, 4, 30.0)]
    assert plan(8, residents, demand(4, 3)).evict == (2,)
    assert plan(8, residents, demand(4, 4)).evict == (1, 2)


def test_what_has_requests_stays_and_nothing_goes_in_vain():
    residents = [resident(1, 3, stays="has requests"), resident(2, 1)]
    found = plan(4, residents, demand(3, 2))
    assert found.evict == () and found.start == ()
    assert (
        found.waits[3]
        == "it needs 2.0 GiB of 4.0 GiB, which others use: m1/1 3.0 GiB (has requests)"
    )


def test_a_model_larger_than_the_limit_is_refused_and_evicts_nothing():
    found = plan(4, [resident(1, 4)], demand(2, 5), demand(3, 1))
    expected = "it needs 5.0 GiB of memory, and models loaded on demand have 4.0 GiB"
    assert found.refused == {2: expected}
    assert found.evict == (1,), "for the third"


def test_one_that_fits_passes_one_that_nothing_can_be_evicted_for():
    residents = [resident(1, 3, stays="has requests")]
    found = plan(4, residents, demand(2, 2), demand(3, 1), demand(4, 2))
    assert found.start == (3,)
    assert (
        found.waits[4] == "it needs 2.0 GiB of 4.0 GiB, which others use: m1/1 3.0 GiB "
        "(has requests), m3/1 1.0 GiB (loads); m2/1 waits before it"
    )


def test_memory_that_becomes_free_is_kept_for_whom_it_was_evicted():
    residents = [resident(1, 3, leaves=True)]
    found = plan(4, residents, demand(2, 4), demand(3, 1))
    assert found.start == () and set(found.waits) == {2, 3}
    assert (
        found.waits[3] == "it needs 1.0 GiB of 4.0 GiB, which others use: m1/1 3.0 GiB "
        "(is being stopped); m2/1 waits before it"
    )


def test_a_model_that_begins_to_load_is_named_by_those_that_wait():
    found = plan(4, [], demand(1, 3), demand(2, 2))
    assert found.start == (1,)
    expected = "it needs 2.0 GiB of 4.0 GiB, which others use: m1/1 3.0 GiB (loads)"
    assert found.waits == {2: expected}


def test_a_further_worker_evicts_nothing():
    assert plan(4, [resident(1, 4)], demand(2, 2, evicts=False)) == MemoryPlan()


def test_models_that_have_grown_beyond_the_limit_make_one_of_them_go():
    residents = [resident(1, 3, 10.0), resident(2, 2, 20.0)]
    assert plan(4, residents).evict == (2,) or plan(4, residents).evict == (1,)
    busy = [replace(each, stays="has requests") for each in residents]
    assert plan(4, busy) == MemoryPlan()


residents = st.lists(
    st.builds(
        Resident,
        key=st.integers(0, 50),
        name=st.just("m/1"),
        num_bytes=st.integers(1, 12),
        last_used=st.floats(0, 100),
        stays=st.sampled_from(["", "", "has requests"]),
        is_leaving=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda each: each.key,
)
demands = st.lists(
    st.builds(
        MemoryDemand,
        key=st.integers(51, 99),
        name=st.just("n/1"),
        num_bytes=st.integers(1, 14),
        evicts=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda each: each.key,
)


@given(st.integers(1, 40), residents, demands)
def test_laws_of_one_plan(limit: int, there: list[Resident], wanted: list[MemoryDemand]) -> None:
    found = plan_memory(limit, there, wanted)
    sizes = {each.key: each.num_bytes for each in wanted}
    used = sum(each.num_bytes for each in there)
    if found.start:
        assert used + sum(sizes[key] for key in found.start) <= limit
    gone = [each for each in there if each.key in found.evict]
    assert len(gone) == len(found.evict)
    assert not any(each.stays or each.is_leaving for each in gone)
    assert set(found.refused) == {key for key, size in sizes.items() if size > limit}
    outcomes = [*found.start, *found.refused, *found.waits]
    assert len(outcomes) == len(set(outcomes))
    assert {each.key for each in wanted if each.evicts} <= set(outcomes)
    # Each that goes is needed: for the limit, or for the first that waits.
    if gone:
        kept = used - sum(each.num_bytes for each in there if each.is_leaving)
        kept -= sum(each.num_bytes for each in gone)
        kept += sum(sizes[key] for key in found.start)
        first = next((size for key, size in sizes.items() if key in found.waits), 0)
        for each in gone:
            assert kept + each.num_bytes + first > limit


@dataclass
class Machine:
    """Models that are asked for in any order. Loads and stops take steps; sizes are as said."""

    limit: int
    sizes: dict[int, int]
    loaded: dict[int, float] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)
    now: float = 0.0

    def residents(self) -> list[Resident]:
        found = [
            Resident(key, f"{key}", self.sizes[key], used, "busy" if key in self.busy else "")
            for key, used in self.loaded.items()
        ]
        return found + [
            Resident(key, f"{key}", self.sizes[key], is_leaving=True) for key in self.leaving
        ]

    def step(self) -> MemoryPlan:
        self.now += 1
        wanted = [MemoryDemand(key, f"{key}", self.sizes[key]) for key in self.waiting]
        found = plan_memory(self.limit, self.residents(), wanted)
        for key in found.evict:
            assert key not in self.busy
            del self.loaded[key]
            self.leaving.append(key)
        for key in found.start:
            self.waiting.remove(key)
            self.loaded[key] = self.now
        for key in found.refused:
            self.waiting.remove(key)
        taken = sum(self.sizes[key] for key in (*self.loaded, *self.leaving))
        assert taken <= self.limit
        return found

    def ask(self, key: int) -> None:
        if key in self.loaded:
            self.loaded[key] = self.now
        elif key not in self.waiting and key not in self.leaving:
            self.waiting.append(key)


events = st.lists(
    st.tuples(st.sampled_from(["ask", "begin", "end", "gone"]), st.integers(0, 5)), max_size=60
)


@given(st.integers(4, 12), st.lists(st.integers(1, 13), min_size=6, max_size=6), events)
def test_laws_of_a_history(limit: int, sizes: list[int], history: list[tuple[str, int]]) -> None:
    machine = Machine(limit, dict(enumerate(sizes)))
    for event, key in history:
        match event:
            case "ask":
                machine.ask(key)
            case "begin" if key in machine.loaded:
                machine.busy.add(key)
            case "end":
                machine.busy.discard(key)
            case "gone" if machine.leaving:
                machine.leaving.pop()
        machine.step()
    # When nothing is busy any more, each that waits is loaded or refused, in turn.
    machine.busy.clear()
    for _ in range(3 * len(sizes) + 3):
        machine.leaving.clear()
        machine.step()
    assert machine.waiting == []


def test_a_reason_names_the_largest_few():
    there = [resident(key, 1, stays="has requests") for key in range(6)]
    found = plan(6, there, demand(9, 1))
    assert found.waits[9].endswith(" and 2 others")


@pytest.mark.parametrize("size", [1, 4])
def test_without_demands_nothing_happens_below_the_limit(size: int) -> None:
    assert plan(4, [resident(1, size)]) == MemoryPlan()
