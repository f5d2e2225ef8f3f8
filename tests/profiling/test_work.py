"""Operations and bytes of operators, against sums done by hand."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.profiling.work import MULTIPLIERS, PER_ELEMENT, Shaped, work_of


def floats(*shape: int) -> Shaped:
    return Shaped("fp32", shape)


def small(*shape: int) -> Shaped:
    return Shaped("int8", shape)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "flops"),
    [
        ("MatMul", [floats(2, 32, 384), floats(384, 96)], floats(2, 32, 96), 2 * 2 * 32 * 384 * 96),
        (
            "MatMul",
            [floats(4, 8, 5, 7), floats(4, 8, 7, 3)],
            floats(4, 8, 5, 3),
            2 * 32 * 5 * 7 * 3,
        ),
        ("MatMul", [floats(5, 7), floats(9, 7, 3)], floats(9, 5, 3), 2 * 9 * 5 * 7 * 3),
        ("MatMul", [floats(7), floats(7, 3)], floats(3), 2 * 7 * 3),
        ("Gemm", [floats(7, 5), floats(7, 3)], floats(5, 3), 2 * 5 * 7 * 3),
        ("Conv", [floats(1, 3, 8, 8), floats(16, 3, 3, 3)], floats(1, 16, 6, 6), 2 * 576 * 27),
        ("Conv", [floats(1, 16, 8, 8), floats(16, 1, 3, 3)], floats(1, 16, 8, 8), 2 * 1024 * 9),
        ("ConvTranspose", [floats(1, 4, 8, 8), floats(4, 2, 2, 2)], floats(1, 2, 16, 16), 4096),
        ("MultiHeadAttention", [floats(2, 10, 64)] * 3, floats(2, 10, 64), 4 * 2 * 10 * 10 * 64),
        ("LSTM", [floats(5, 2, 3), floats(1, 16, 3), floats(1, 16, 4)], floats(5, 1, 2, 4), 2240),
        ("Add", [floats(10, 10), floats(10)], floats(10, 10), 100),
        ("ReduceMean", [floats(4, 25)], floats(4, 1), 100),
        ("Transpose", [floats(4, 25)], floats(25, 4), 0),
    ],
)
def test_operations(kind, inputs, output, flops) -> None:
    assert work_of(kind, inputs, [output]).flops == flops


def test_an_attention_makes_its_projections_and_lets_them_meet() -> None:
    inputs = [floats(2, 10, 64), floats(64, 192), floats(192)]
    expected = 2 * 2 * 10 * 64 * 192 + 4 * 2 * 10 * 10 * 64
    assert work_of("Attention", inputs, [floats(2, 10, 64)]).flops == expected


def test_a_quantised_convolution_has_its_weights_behind_scales() -> None:
    inputs = [small(1, 3, 8, 8), floats(1), small(1), small(16, 3, 3, 3)]
    work = work_of("QLinearConv", inputs, [small(1, 16, 6, 6)])
    assert (work.flops, work.datatype) == (2 * 576 * 27, "int8")


@pytest.mark.parametrize(
    ("kind", "inputs", "datatype"),
    [
        ("MatMul", [floats(2, 2), floats(2, 2)], "fp32"),
        ("MatMul", [Shaped("bf16", (2, 2)), Shaped("bf16", (2, 2))], "bf16"),
        ("MatMulInteger", [Shaped("uint8", (2, 2)), small(2, 2)], "int8"),
        # Inputs are quantised inside.
        ("DynamicQuantizeMatMul", [floats(2, 2), small(2, 2)], "int8"),
        # Weights are made wide before they are used.
        ("MatMulNBits", [floats(2, 2), Shaped("uint8", (2, 1, 1))], "fp32"),
        ("Gather", [Shaped("int64", (2, 2))], "fp32"),
    ],
)
def test_the_peak_is_that_of_the_multiplications(kind, inputs, datatype) -> None:
    assert work_of(kind, inputs, [floats(2, 2)]).datatype == datatype


def test_bytes_are_all_that_is_read_and_written() -> None:
    inputs = [Shaped("fp16", (10, 10)), Shaped("int64", (10,))]
    assert work_of("Pow", inputs, [Shaped("fp16", (10, 10))]).num_bytes == 200 + 80 + 200


def test_four_bits_are_half_a_byte() -> None:
    assert Shaped("int4", (3, 2)).num_bytes == 3


def test_of_a_table_only_the_rows_asked_for_are_read() -> None:
    table, indices = floats(30_000, 384), Shaped("int64", (1, 32))
    work = work_of("Gather", [table, indices], [floats(1, 32, 384)])
    assert (work.flops, work.num_bytes) == (0, 2 * 32 * 384 * 4 + 32 * 8)


def test_naming_memory_anew_is_no_work() -> None:
    work = work_of("Reshape", [floats(10, 10), Shaped("int64", (2,))], [floats(100)])
    assert (work.flops, work.num_bytes) == (0, 0)


def test_what_nobody_knows_has_bytes_only() -> None:
    work = work_of("MyOperator", [floats(10)], [floats(10)])
    assert (work.flops, work.num_bytes) == (None, 80)


def test_without_shapes_nothing_is_known() -> None:
    work = work_of("MatMul", [], [])
    assert (work.flops, work.num_bytes) == (None, None)


def test_weights_that_were_not_told_leave_the_operations_open() -> None:
    assert work_of("Conv", [floats(1, 3, 8, 8)], [floats(1, 16, 6, 6)]).flops is None


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@example("Attention", [()], [()])
@given(
    st.sampled_from([*MULTIPLIERS, *PER_ELEMENT, "Gather", "Reshape", "?"]),
    st.lists(shapes, max_size=4),
    st.lists(shapes, max_size=2),
)
def test_any_shapes_are_answered(kind, inputs, outputs) -> None:
    work = work_of(kind, [floats(*each) for each in inputs], [floats(*each) for each in outputs])
    for value in (work.flops, work.num_bytes):
        assert value is None or (value >= 0 and math.isfinite(value))
