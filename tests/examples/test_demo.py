"""How the demo chooses its target: from what the original keeps on this machine."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import demo as module
    sys.modules.pop("demo")
    return module


@pytest.mark.parametrize("most", [300, 590, 874, 1300, 9999])
def test_the_target_is_the_next_rate_after_the_last_that_was_kept(
    demo: ModuleType, most: float
) -> None:
    rates = demo.rates_from(590)
    is_kept = [each <= most for each in rates]
    rate = demo.first_missed(rates, is_kept)
    assert rate > min(most, rates[-1])
    assert rate <= max(590, 1.21 * most)
    text = demo.explained(demo.Measured(9.0, 20.0, 590.0, 0, ""), rates, is_kept, rate)
    assert f"p99 < 100 ms at {rate:.0f}/s" in text and "590/s to 16 clients" in text


def test_one_missed_rate_below_one_that_was_kept_is_an_accident(demo: ModuleType) -> None:
    rates = demo.rates_from(590)
    found = demo.first_missed(rates, [False, True, False, True, False])
    assert found == rates[4]


def test_figures_of_an_overloaded_original_are_shown_as_unknown(demo: ModuleType) -> None:
    measured = demo.Measured(9.0, 20.0, 590.0, 0, "kept")
    found = {"before": {"p99": {"value": "inf"}, "verdicts": []}, "held_out": None}
    table = demo.table("p99 < 100 ms at 590/s", measured, measured, measured, found)
    assert list(table.columns[3].cells) == ["-", "20.0 ms"]
    assert demo.finite("nan") is None and demo.finite(2.5) == 2.5


@pytest.mark.parametrize(
    ("p99_ms", "num_failed", "expected"),
    [(99.0, 0, True), (101.0, 0, False), (50.0, 1, False), (None, 0, False)],
)
def test_a_rate_is_kept_within_the_limit_and_without_failures(
    demo: ModuleType, p99_ms: float | None, num_failed: int, expected: bool
) -> None:
    measured = demo.Measured(p99_ms, p99_ms, 590.0, num_failed, "")
    assert measured.is_within_limit == expected
