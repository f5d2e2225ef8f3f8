"""Which requests fit a model, in Triton's words, and how they lie in memory."""

import struct
from dataclasses import replace

import pytest
from doubles import RecordingSink

from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding, Preprocess
from penstock.errors import InvalidRequest
from penstock.serving.padding import Pads
from penstock.serving.plan import Planner
from penstock.types import Request, RequestedOutput, Tensor, TensorSpec

CONFIG = ModelConfig(
    name="m",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)), TensorSpec("n", "INT64", (-1,))),
    outputs=(TensorSpec("y", "FP32", (4,)), TensorSpec("z", "INT64", (-1,))),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
)


def ask(*tensors: Tensor, outputs: tuple[str, ...] = ()) -> Request:
    wanted = [RequestedOutput(name) for name in outputs]
    return Request(RecordingSink(), tensors, 0.0, outputs=wanted)


def x(rows: int = 2, width: int = 4, datatype: str = "FP32", extra: int = 0) -> Tensor:
    return Tensor("x", datatype, (rows, width), bytes(rows * width * 4 + extra))


def n(rows: int = 2, width: int = 3) -> Tensor:
    return Tensor("n", "INT64", (rows, width), bytes(rows * width * 8))


def planner(**changes: object) -> Planner:
    return Planner(replace(CONFIG, **changes), slab_bytes=4096)


def test_inputs_may_come_in_any_order():
    plan = planner().plan(ask(n(), x()))
    assert plan.order == (1, 0)
    assert plan.num_rows == 2
    assert plan.geometry.row_shapes == ((4,), (3,))


def test_requests_of_one_geometry_share_it_whatever_their_batch():
    plans = planner()
    first, second = plans.plan(ask(x(1), n(1))), plans.plan(ask(x(3), n(3)))
    assert first.geometry is second.geometry
    assert plans.plan(ask(x(1), n(1, 5))).geometry is not first.geometry


def test_columns_of_a_slab_hold_inputs_then_fixed_outputs():
    geometry = planner().plan(ask(x(), n())).geometry
    assert [size for _, size in geometry.input_columns] == [16, 24]
    assert [size for _, size in geometry.output_columns] == [16], "z has no fixed size"
    assert geometry.layout.capacity == 8


def test_rows_too_large_for_a_slab_get_extents():
    assert planner().plan(ask(x(1), n(1, 4096))).geometry.layout is None


def test_a_request_of_more_rows_than_the_slab_holds_gets_extents():
    plans = planner()
    few, many = plans.plan(ask(x(1), n(1, 100))), plans.plan(ask(x(8), n(8, 100)))
    assert few.geometry.layout is not None
    assert many.geometry.layout is None


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        (b"plain", True),
        ("größe 水 😀".encode(), True),
        (b"x" * 200, True),
        (b"", True),
        (b"\xff", False),
        (b"caf\xe9", False),
        ("😀".encode()[:-1], False),
        (b"\xed\xa0\x80", False),
    ],
)
def test_strings_for_onnx_must_be_utf8(text, is_good):
    def asked() -> Request:
        data = b"".join(struct.pack("<I", len(each)) + each for each in (b"a", text))
        return ask(Tensor("s", "BYTES", (1, 2), data))

    strings = {"inputs": (TensorSpec("s", "BYTES", (2,)),)}
    planner(**strings).plan(asked())
    before = Preprocess("pre.py:f", strings["inputs"])
    planner(**strings, backend="onnxruntime", preprocess=before).plan(asked())
    if is_good:
        planner(**strings, backend="onnxruntime").plan(asked())
    else:
        with pytest.raises(InvalidRequest, match="input 's': element 1 is not valid UTF-8"):
            planner(**strings, backend="onnxruntime").plan(asked())


class TestTokens:
    """x has rows of four, n is padded: [2, 4] or longer."""

    def counted(self, rows: int, width: int, *, is_proven: bool = True, **changes: object) -> int:
        policy = BatchPolicy(8, is_dynamic=True, max_tokens=64)
        config = replace(CONFIG, padding=Padding((PadAxis("n", 0),), (2, 8)), batching=policy)
        config = replace(config, **changes)
        plans = Planner(config, slab_bytes=4096)
        plans.pads = Pads(config) if is_proven else None
        return plans.plan(ask(x(rows), n(rows, width))).num_tokens

    def test_padding_counts_where_it_is_computed(self):
        assert self.counted(1, 2) == 2
        assert self.counted(3, 3) == 24

    def test_and_not_where_it_is_not(self):
        packed = {"penstock.pack": "tokens"}
        assert self.counted(3, 3, options=packed) == 9

    def test_what_is_not_padded_counts_its_own_length(self):
        assert self.counted(2, 11) == 22, "longer than every bucket"
        assert self.counted(3, 3, is_proven=False) == 9, "padding would change answers"

    def test_a_row_of_nothing_is_one(self):
        assert self.counted(2, 0) == 2

    def test_of_lengths_that_differ_the_longest_counts(self):
        inputs = (TensorSpec("x", "FP32", (-1,)), TensorSpec("n", "INT64", (-1,)))
        both = Padding((PadAxis("x", 0), PadAxis("n", 0)), (2, 8))
        assert self.counted(2, 7, inputs=inputs, padding=both) == 14

    def test_without_a_budget_nothing_is_counted(self):
        assert self.counted(3, 3, batching=CONFIG.batching) == 0


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([x()], r"missing required input\(s\) \['n'\]"),
        ([x(), n(), x()], r"input 'x' already exists in request"),
        ([x(), n(), Tensor("q", "FP32", (1,), b"")], r"unexpected inference input 'q'"),
        ([x(datatype="INT32"), n()], r"input 'x' data-type is 'INT32', .* expects 'FP32'"),
        ([x(width=5), n()], r"unexpected shape for input 'x' .* Expected \[-1,4\], got \[2,5\]"),
        ([Tensor("x", "FP32", (4,), bytes(16)), n()], r"unexpected shape for input 'x'"),
        ([Tensor("x", "FP32", (-1, 4), b""), n()], r"unexpected shape for input 'x'"),
        ([x(9), n(9)], r"batch-size must be <= 8 for 'm', got 9"),
        ([x(0), n(0)], r"batch-size must be at least 1"),
        ([x(1), n(2)], r"input 'n' batch size does not match other inputs"),
        ([x(extra=8), n()], r"size mismatch for input 'x' for model 'm'. Expected 32, got 40"),
    ],
)
def test_what_does_not_fit_is_named(tensors, text):
    plans = planner()
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InvalidRequest, match=text):
            plans.plan(ask(*tensors))


def test_optional_inputs_may_be_left_out_but_do_not_mix_with_full_requests():
    inputs = (CONFIG.inputs[0], replace(CONFIG.inputs[1], is_optional=True))
    plans = planner(inputs=inputs)
    full, partial = plans.plan(ask(x(), n())), plans.plan(ask(x()))
    assert partial.geometry is not full.geometry
    with pytest.raises(InvalidRequest, match="expected number of inputs between 1 and 2"):
        plans.plan(ask(n()))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x01\0\0\0a", "got 1$"),
        (b"\x01\0\0\0a\x01\0\0\0b\x01\0\0\0c", "more than 2"),
        (b"\x01\0\0\0a\x01\0", "incomplete string length at byte 5"),
        (b"\x01\0\0\0a\xff\xff\xff\xffb", "runs .* bytes past the end"),
    ],
)
def test_bytes_tensors_are_counted(data, complaint):
    plans = planner(inputs=(TensorSpec("s", "BYTES", (2,)),))
    good = ask(Tensor("s", "BYTES", (1, 2), b"\x01\0\0\0a\0\0\0\0"))
    assert plans.plan(good).geometry.layout is None
    with pytest.raises(InvalidRequest, match=complaint):
        plans.plan(ask(Tensor("s", "BYTES", (1, 2), data)))


def test_outputs_are_selected_by_name():
    plans = planner()
    assert plans.select_outputs(ask(x(), n())) == (0, 1)
    assert plans.select_outputs(ask(outputs=("z",))) == (1,)
    with pytest.raises(InvalidRequest, match="unexpected inference output 'w'.*'y', 'z'"):
        plans.select_outputs(ask(outputs=("w",)))


def test_many_shapes_do_not_grow_the_cache_without_bound():
    plans = planner()
    for width in range(3000):
        plans.plan(ask(x(1), n(1, width)))
    assert plans.plan(ask(x(1), n(1, 1))).num_rows == 1


def test_what_has_run_before_shares_its_geometry_also_after_the_cache_was_full(monkeypatch):
    monkeypatch.setattr("penstock.serving.plan.MAX_PLANS", 2)
    plans = planner()
    known = ask(x(1), n(1, 3))
    known.form = "known"
    plans.fit(known)
    for width in (4, 5):
        plans.fit(ask(x(1), n(1, width)))
    same_shape = plans.fit(ask(x(2), n(2, 3)))
    assert plans.fit(known).plan.geometry is same_shape.plan.geometry


def test_without_inputs_a_request_is_one_row_where_the_model_takes_none():
    plan = planner(inputs=()).plan(ask())
    assert (plan.num_rows, plan.order) == (1, ())
    with pytest.raises(InvalidRequest, match="unexpected inference input 'x'"):
        planner(inputs=()).plan(ask(x()))


def test_without_inputs_a_request_is_refused_where_the_model_needs_some():
    with pytest.raises(InvalidRequest) as refused:
        planner().plan(ask())
    assert str(refused.value) == (
        "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required "
        "input(s) ['x','n']. Please provide all required input(s)."
    )


def test_without_inputs_a_request_is_one_row_where_all_are_optional():
    inputs = tuple(replace(spec, is_optional=True) for spec in CONFIG.inputs)
    plan = planner(inputs=inputs).plan(ask())
    assert (plan.num_rows, plan.order) == (1, ())
