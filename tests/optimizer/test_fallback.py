"""Which layers stay in float: ranked by error avoided for time lost, and no more than needed."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.optimizer import fallback
from penstock.optimizer.fallback import Effect, Group, WeightedLayer
from penstock.optimizer.numerics import Answers


def layer(name: str, cost: float = 1.0) -> WeightedLayer:
    return WeightedLayer(name, "MatMul", cost)


def effect(name: str, error: float, cost: float = 1.0) -> Effect:
    return Effect(Group(name, (layer(name, cost),)), error)


def names(found: list[Effect] | None) -> list[str]:
    assert found is not None
    return [name for each in found for name in each.group.names]


def needs(*wanted: str) -> Callable[[tuple[str, ...]], bool]:
    return lambda keep: set(wanted) <= set(keep)


def test_error_avoided_for_time_lost_decides_the_order() -> None:
    found = fallback.rank([effect("dear", 1.0, 10.0), effect("cheap", 0.8, 1.0)])
    assert [each.group.name for each in found] == ["cheap", "dear"]


def test_a_layer_that_costs_nothing_and_helps_nothing_is_last() -> None:
    found = fallback.rank([effect("free", 0.001, 0.0), effect("bad", 1.0, 5.0)])
    assert [each.group.name for each in found] == ["bad", "free"]


def test_costs_are_seconds_where_they_are_known_else_shares_of_flop() -> None:
    known = [("a", "MatMul", 30.0), ("b", "Conv", 10.0)]
    assert [each.cost for each in fallback.with_costs(known)] == [0.75, 0.25]
    assert [each.cost for each in fallback.with_costs(known, {"a": 0.002})] == [0.002, 0.0]
    # Seconds of kernels, which have other names, say nothing of layers.
    kernels = {"aten::conv2d 1x3x8x8": 0.002}
    assert [each.cost for each in fallback.with_costs(known, kernels)] == [0.75, 0.25]


def test_a_refusal_names_the_layers_that_lose_most() -> None:
    ranked = [effect("cheap", 1.0, 0.1), effect("worst", 6.0), effect("bad", 3.0)]
    found = fallback.most_harmful(ranked)
    assert [(each.name, each.regained) for each in found] == [
        ("worst", 0.6),
        ("bad", 0.3),
        ("cheap", 0.1),
    ]


def test_layers_of_one_block_are_judged_together() -> None:
    made = [layer(f"/m/encoder/layer.{i}/{part}/MatMul") for i in range(3) for part in "qkv"]
    groups = fallback.blocks(made)
    assert [len(group.layers) for group in groups] == [3, 3, 3]
    assert groups[1].name == "/m/encoder/layer.1"


def test_names_that_say_nothing_are_cut_into_runs() -> None:
    groups = fallback.blocks([layer(f"Conv_{index}") for index in range(9)])
    assert [len(group.layers) for group in groups] == [3, 3, 3]


def test_every_layer_is_in_exactly_one_block() -> None:
    made = [layer(name) for name in ("stem/conv", "layers.0/a/x", "layers.0/b/x", "head/fc", "q")]
    groups = fallback.blocks(made)
    assert sorted(name for group in groups for name in group.names) == sorted(
        each.name for each in made
    )


@given(
    st.integers(1, 30).flatmap(
        lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), min_size=1))
    )
)
def test_what_was_not_needed_is_quantised_again(case: tuple[int, set[int]]) -> None:
    count, wanted = case
    ranked = [effect(f"l{index}", 1.0) for index in range(count)]
    asked: list[tuple[str, ...]] = []
    judge = needs(*(f"l{index}" for index in wanted))

    def passes(keep: tuple[str, ...]) -> bool:
        asked.append(keep)
        return judge(keep)

    found = fallback.find_fallback(ranked, passes, max_calls=100)
    assert set(names(found)) == {f"l{index}" for index in wanted}
    assert len(asked) == len(set(map(frozenset, asked))), "nothing is asked twice"


def test_the_gate_is_asked_a_bounded_number_of_times() -> None:
    asked: list[tuple[str, ...]] = []

    def never(keep: tuple[str, ...]) -> bool:
        asked.append(keep)
        return False

    ranked = [effect(f"l{index}", 1.0) for index in range(100)]
    assert fallback.find_fallback(ranked, never, max_calls=5) is None
    assert len(asked) == 5
    assert fallback.find_fallback([], never) is None


def test_what_was_found_passed_even_when_questions_ran_out() -> None:
    ranked = [effect(f"l{index}", 1.0) for index in range(32)]
    for limit in range(1, 20):
        found = fallback.find_fallback(ranked, needs("l3", "l9"), max_calls=limit)
        assert found is None or needs("l3", "l9")(tuple(names(found)))


@pytest.mark.parametrize("seed", range(8))
def test_the_destroyed_layers_are_ranked_first_whichever_they_are(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers = [layer(f"layers.{index}/{part}/MatMul") for index in range(5) for part in "abc"]
    bad = {layers[index].name for index in random.choice(len(layers), 2, replace=False)}
    original = [{"y": random.normal(size=8)} for _ in range(4)]

    def evaluate(keep: tuple[str, ...]) -> Answers:
        """Each quantised layer adds a little noise, a destroyed one drowns the answer."""
        size = sum((1.0 if each.name in bad else 1e-3) for each in layers if each.name not in keep)
        return [{"y": row["y"] + size * random.normal(size=8)} for row in original]

    ranked = fallback.sensitivity(layers, evaluate, original)
    assert {each.group.name for each in ranked[:2]} == bad
    kept = fallback.find_fallback(ranked, needs(*bad))
    assert set(names(kept)) == bad
    assert kept is not None
    assert sum(each.regained for each in fallback.described(kept, ranked)) > 0.9


def test_error_is_relative_and_sees_what_is_not_a_number() -> None:
    one = [{"y": np.array([3.0, 4.0]), "label": np.array([1])}]
    assert fallback.output_error(one, one) == 0.0
    off = [{"y": np.array([3.3, 4.4]), "label": np.array([2])}]
    assert fallback.output_error(one, off) == pytest.approx(0.01)
    assert fallback.output_error(one, [{"y": np.array([np.nan, 4.0])}]) == float("inf")
    assert fallback.output_error(one, [{"y": np.zeros(3)}]) == float("inf")


def test_rows_that_differ_most_come_first() -> None:
    original = [{"y": np.ones(2)} for _ in range(3)]
    candidate = [{"y": np.full(2, value)} for value in (1.1, 3.0, 1.5)]
    assert fallback.most_different(original, candidate, limit=2) == [1, 2]
