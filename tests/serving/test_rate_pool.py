"""The rate limiter's rules: never more than there is, nobody starves, priorities are weights."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.rate_pool import RatePool, ResourceKey, needs_of

R, S = ResourceKey("R"), ResourceKey("S")
KEYS = [R, S, ResourceKey("T", "cuda:0"), ResourceKey("T", "cuda:1")]


def pool(given: dict | None = None, **members: tuple[dict, int]) -> RatePool:
    made = RatePool(given or {})
    for name, (needs, priority) in members.items():
        made.add(name, needs, priority)
    return made


def serve(made: RatePool, names: str, turns: int) -> Counter[str]:
    """Let instances that always want execute, one at a time ending; return their executions."""
    counts: Counter[str] = Counter()
    running: list[str] = []
    for _ in range(turns):
        for name in names:
            if name not in running:
                made.want(name)
        running += made.grant()
        assert running, "nobody may execute"
        counts[ended := running.pop(0)] += 1
        made.release(ended)
    return counts


def test_an_instance_executes_only_with_its_resources():
    made = pool(a=({R: 1}, 1), b=({R: 1}, 1))
    made.want("a")
    made.want("b")
    assert made.grant() == ["a"]
    assert made.grant() == []
    made.release("a")
    assert made.grant() == ["b"]


def test_there_is_as_much_as_the_instance_that_needs_most():
    made = pool(a=({R: 1}, 1), b=({R: 1}, 1), c=({R: 2}, 1))
    assert made.count(R) == 2
    for name in "abc":
        made.want(name)
    assert made.grant() == ["a", "b"]
    made.remove("c")
    assert made.count(R) == 1


def test_the_operator_may_give_more_and_by_device():
    each, one = ResourceKey("T", ""), ResourceKey("T", "cuda:1")
    made = pool({R: 5, each: 2, one: 3})
    assert [made.count(key) for key in (R, KEYS[2], KEYS[3])] == [5, 2, 3]


def test_what_can_never_be_is_a_problem():
    made = pool({R: 2})
    assert made.problems({R: 2, S: 9}) == []
    [found] = made.problems({R: 3})
    assert found.startswith("needs 3 of 'R' (global), and the server has 2; raise --rate-limit-")
    made.add("a", {KEYS[2]: 1})
    [found] = made.problems({ResourceKey("T"): 1})
    assert found == "'T' is per device in another model; declare it alike in both"


@pytest.mark.parametrize(
    ("priorities", "shares"), [((1, 2), (2, 1)), ((1, 1), (1, 1)), ((3, 1), (1, 3))]
)
def test_a_priority_is_a_weight(priorities, shares):
    made = pool(a=({R: 1}, priorities[0]), b=({R: 1}, priorities[1]))
    counts = serve(made, "ab", 1200)
    total = sum(shares)
    assert counts["a"] == pytest.approx(1200 * shares[0] / total, abs=3)


def test_one_that_was_silent_does_not_make_up_for_it():
    made = pool(a=({R: 1}, 1), b=({R: 1}, 1))
    serve(made, "a", 100)
    counts = serve(made, "ab", 100)
    assert counts["a"] == pytest.approx(50, abs=2)


def test_a_grant_that_is_not_used_costs_nothing():
    made = pool(a=({R: 1}, 1), b=({R: 1}, 1))
    for _ in range(50):
        made.want("a")
        assert made.grant() == ["a"]
        made.release("a", was_used=False)
    counts = serve(made, "ab", 100)
    assert counts["a"] == pytest.approx(50, abs=2)


def test_one_that_needs_much_is_not_passed_for_ever_and_others_pass():
    made = pool({R: 2}, big=({R: 2}, 1), small=({R: 1}, 1), tiny=({R: 1}, 1), other=({S: 1}, 1))
    made.want("small")
    assert made.grant() == ["small"]
    made.want("big")
    made.want("tiny")
    made.want("other")
    # `tiny` would fit, and would keep `big` waiting.
    assert made.grant() == ["other"]
    made.release("small")
    assert made.grant() == ["big"]


Members = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(KEYS), st.integers(1, 3), max_size=3), st.integers(1, 4)
    ),
    min_size=1,
    max_size=5,
)
Steps = st.lists(st.tuples(st.sampled_from("wrdux"), st.integers(0, 4)), max_size=60)


@given(Members, Steps, st.dictionaries(st.sampled_from(KEYS), st.integers(3, 5), max_size=2))
def test_nothing_exceeds_the_pool_and_something_always_goes_on(members, steps, given_counts):
    made = RatePool(given_counts)
    held: Counter[int] = Counter()
    alive = dict(enumerate(members))
    for name, (needs, priority) in alive.items():
        made.add(name, needs, priority)
    wanting: set[int] = set()
    most = {key: made.count(key) for key in KEYS}

    def used(key) -> int:
        return sum(count * alive[name][0].get(key, 0) for name, count in held.items())

    for kind, number in steps:
        name = number % len(members)
        if name not in alive:
            continue
        if kind == "w":
            made.want(name)
            wanting.add(name)
        elif kind == "d":
            made.withdraw(name)
            wanting.discard(name)
        elif kind == "x" and len(alive) > 1:
            made.remove(name)
            wanting.discard(name)
            del held[name], alive[name]
        elif kind in "ru" and held[name]:
            made.release(name, was_used=kind == "r")
            held[name] -= 1
        for granted in made.grant():
            wanting.remove(granted)
            held[granted] += 1
        for key in KEYS:
            assert made.used(key) == used(key) <= most[key]
        # Without deadlock: if nothing executes, nothing waits.
        assert held.total() or not wanting


@given(Members)
def test_nobody_starves(members):
    made = RatePool()
    for name, (needs, priority) in zip("abcde", members, strict=False):
        made.add(name, needs, priority)
    names = "abcde"[: len(members)]
    counts = serve(made, names, 400)
    assert all(counts[name] >= 5 for name in names), counts


def test_a_resource_is_of_the_device_unless_it_is_global():
    assert needs_of([("T", False, 2), ("R", True, 1)], "cuda:1") == {KEYS[3]: 2, R: 1}
