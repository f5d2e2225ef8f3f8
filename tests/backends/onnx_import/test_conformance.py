"""ONNX's own node tests: each case is imported, run on the CPU and compared with what it expects.

`make test` runs one case of each operator, `make test-slow` all of them.
"""

from pathlib import Path

import onnx
import pytest
from onnx_cases import REFUSALS, Case, cases, operators, outcomes

# The goals of the importer.
MIN_OPERATORS = 150
MIN_CASES = 1100
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "onnx-on-gpus.md"


def test_one_case_of_each_operator() -> None:
    chosen: dict[str, Case] = {}
    for case in cases():
        for name in operators(case):
            if name not in chosen or len(operators(chosen[name])) > 1 == len(operators(case)):
                chosen[name] = case
    found = outcomes({case.name: case for case in chosen.values()}.values())
    assert {name: why for name, why in found.items() if why.startswith("FAILED")} == {}
    passed = [name for name, case in chosen.items() if not found[case.name]]
    assert len(passed) >= MIN_OPERATORS


@pytest.mark.slow
def test_every_case() -> None:
    found = outcomes(cases())
    assert {name: why for name, why in found.items() if why.startswith("FAILED")} == {}
    num_passed = list(found.values()).count("")
    assert num_passed >= MIN_CASES
    passed = {name for case in cases() if not found[case.name] for name in operators(case)}
    release = ".".join(onnx.__version__.split(".")[:2])
    text = f"(onnx {release}): {num_passed:,} of {len(found):,} cases"
    if f"(onnx {release})" in (document := DOCUMENT.read_text()):
        assert text in document
        assert f"over {len(passed)} operators" in document


def test_reasons_are_documented() -> None:
    text = DOCUMENT.read_text()
    assert [why for why in REFUSALS if why not in text] == []
