"""The table of Penstock's parameters: every row is documented, reads and writes."""

import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.repository import parameters
from penstock.repository.parameters import PARAMETERS, ConfigParameter

DOCS = Path(__file__).parents[2] / "docs"
BLANK = ModelConfig("m", "1", "null", "", (), (), 0, BatchPolicy(1))
NUMBERS = [each for each in PARAMETERS if each.field]


def row_of(parameter: ConfigParameter) -> list[str]:
    """The cells of a parameter's row; of a page without one, its key."""
    text = (DOCS / parameter.page).read_text()
    rows = re.findall(rf"^\|[^|]*`{re.escape(parameter.key)}`[^|]*\|.*\|$", text, re.M)
    assert rows or f'"{parameter.key}"' in text or f"`{parameter.key}`" in text, parameter.key
    return [cell.strip() for cell in rows[0].split("|")[1:-1]] if rows else [parameter.key]


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda each: f"{each.backend}{each.key}")
def test_every_parameter_is_on_its_page(parameter: ConfigParameter) -> None:
    assert parameter.key in row_of(parameter)[0]


@pytest.mark.parametrize("parameter", NUMBERS, ids=lambda each: each.key)
def test_the_documented_default_is_the_default(parameter: ConfigParameter) -> None:
    default = attrgetter(parameter.field)(BLANK)
    if default is not None:
        assert row_of(parameter)[1].split(",")[0] == f"{default:.12g}"


@pytest.mark.parametrize("parameter", NUMBERS, ids=lambda each: each.key)
def test_a_number_reads_back_as_it_is_written(parameter: ConfigParameter) -> None:
    value = parameter.parse("1")
    assert value is not None
    config = parameters.with_numbers(BLANK, {parameter.key: value})
    assert config != BLANK and parameters.write(config) == {
        parameter.key: "1" if parameter.is_whole or parameter.per_unit > 1 else "1.0"
    }
    assert parameters.with_numbers(config, {}) == config


@pytest.mark.parametrize("parameter", NUMBERS, ids=lambda each: each.key)
def test_numbers_have_bounds(parameter: ConfigParameter) -> None:
    assert parameter.parse(f"{parameter.most:.0f}") is not None
    for text in ("-1", "nan", "inf", "", "one", f"{parameter.most * 2:.0f}"):
        assert parameter.parse(text) is None
    assert (parameter.parse("0") is not None) == parameter.takes_zero
    assert replace(parameter, takes_zero=True).parse("0") == 0


def test_a_backend_has_its_own_parameters_and_those_of_all() -> None:
    assert "penstock.compile" in parameters.by_key("pytorch")
    assert "penstock.compile" not in parameters.by_key("llm")
    assert set(parameters.by_key("")) < set(
        parameters.by_key("onnxruntime") | parameters.by_key("llm")
    )
    given = {"penstock.slo": "off", "penstock.dtype": "bf16", "intra_op": "2"}
    assert parameters.options_of(given) == {"penstock.dtype": "bf16", "intra_op": "2"}


@pytest.mark.parametrize("backend", ["onnxruntime", "pytorch"])
@pytest.mark.parametrize("key", [key for key in parameters.VALUES if "gpu_engine" not in key])
def test_values_are_checked_wherever_the_model_runs(key: str, backend: str) -> None:
    found: list[str] = []

    def read(text: str) -> None:
        folder = Path()
        reader = parameters.ParameterReader(
            {key: text}, backend, folder, lambda path, problem: found.append(f"{path}: {problem}")
        )
        reader.numbers()

    known = parameters.VALUES[key]
    for text in ("", *known):
        read(text)
    assert found == []
    read("nonsense")
    assert found == [f"parameters.{key}: 'nonsense' is not one of {', '.join(known)}"]


def test_the_table_has_what_the_engine_takes() -> None:
    pytest.importorskip("torch")
    from penstock.backends import pytorch, torch_cuda, torch_fusion, torch_linear, torch_packing

    values = parameters.VALUES
    assert values["penstock.dtype"] == tuple(pytorch.DTYPES)[1:]
    assert values["penstock.compile"][1:] == pytorch.WITH_GRAPHS
    assert values["penstock.fuse"] == torch_fusion.WHAT
    assert values["penstock.pack"] == (torch_packing.TOKENS,)
    assert values["penstock.weights"] == tuple(torch_linear.WEIGHTS)
    assert values["penstock.stream_priority"] == tuple(torch_cuda.PRIORITIES)
