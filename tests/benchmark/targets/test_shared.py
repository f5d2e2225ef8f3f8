"""What targets share: samples to tensors, statistics to counters, texts to causes."""

import asyncio

import msgspec
import numpy as np
import pytest

from penstock.benchmark.targets import Counters, combine
from penstock.benchmark.targets.shared import (
    MAX_TEXT,
    Member,
    V2Config,
    V2Metadata,
    V2Tensor,
    add_members,
    config_digest,
    counters_of,
    find_members,
    form_of,
    in_short,
    tensors_of,
)
from penstock.data import RequestForm, Sample
from penstock.errors import ConfigError
from penstock.types import TensorSpec, to_array

IMAGE = RequestForm("tensors", (TensorSpec("image", "FP32", (1, 8)),), has_batch=True)
PAIR = RequestForm(
    "tensors",
    (TensorSpec("a", "INT32", (2,)), TensorSpec("b", "BYTES", (-1,), is_optional=True)),
    has_batch=True,
)


def problems(form: RequestForm, **tensors: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        tensors_of(form, Sample({name: np.asarray(array) for name, array in tensors.items()}))
    return list(caught.value.problems)


# Members of ensembles


def ensemble_of(*steps: tuple[str, int | str]) -> V2Config:
    scheduling = {"step": [{"model_name": name, "model_version": n} for name, n in steps]}
    return msgspec.convert({"ensemble_scheduling": scheduling}, V2Config)


def test_members_are_the_models_that_compute() -> None:
    """Each once, in the order of the steps; members of nested ensembles instead of these. A server
    that has no configuration of one, or a cycle, ends the search."""
    configs = {
        "outer": ensemble_of(("first", -1), ("inner", -1), ("last", "2")),
        "inner": ensemble_of(("first", "-1"), ("deep", 1), ("outer", -1)),
        "last": V2Config(),
    }
    asked: list[Member] = []

    async def ask(member: Member) -> V2Config | None:
        asked.append(member)
        return configs.get(member.name)

    found = asyncio.run(find_members(configs["outer"], ask))
    assert [each.label for each in found] == ["first", "deep/1", "last/2"]
    assert len(asked) == len(set(asked))
    assert asyncio.run(find_members(V2Config(), ask)) == []
    assert asyncio.run(find_members(None, ask)) == []


def test_counters_of_members_are_added_and_subtracted_by_name() -> None:
    whole, none = counters_of({"execution_count": 5}), counters_of({})
    counted = {"a": counters_of({"execution_count": 3}), "b": none}

    async def count(member: Member) -> Counters | None:
        return counted.get(member.name)

    members = [Member("a"), Member("b"), Member("gone")]
    found = asyncio.run(add_members(whole, members, count))
    assert found is not None and found.num_executions == 5
    assert {name: each.num_executions for name, each in found.members.items()} == {"a": 3, "b": 0}
    before = Counters(*none.numbers, members={"a": none})
    left = combine((before, found), lambda pair: pair[1] - pair[0])
    assert left.num_executions == 5
    assert {name: each.num_executions for name, each in left.members.items()} == {"a": 3}
    assert asyncio.run(add_members(None, members, count)) is None


# Samples


def test_tensors_come_in_the_order_of_the_signature_with_their_values() -> None:
    words = np.array([["x", "yy"]], object)
    numbers = np.array([[3, 4]], np.int64)
    a, b = tensors_of(PAIR, Sample({"b": words, "a": numbers}))
    assert (a.name, a.datatype, a.shape) == ("a", "INT32", (1, 2))
    assert to_array(a).tolist() == [[3, 4]]
    assert (b.name, b.shape) == ("b", (1, 2))
    assert to_array(b).tolist() == [[b"x", b"yy"]]


def test_what_is_optional_may_be_left_out() -> None:
    (tensor,) = tensors_of(PAIR, Sample({"a": np.zeros((1, 2), np.int32)}))
    assert tensor.name == "a"


def test_without_a_batch_the_shape_is_the_signatures_own() -> None:
    form = RequestForm("tensors", (TensorSpec("x", "FP64", (2,)),))
    (tensor,) = tensors_of(form, Sample({"x": np.zeros(2)}))
    assert tensor.shape == (2,)
    assert problems(form, x=np.zeros((1, 2))) == ["input 'x': shape [1, 2] does not fit [2]"]


def test_bf16_comes_as_its_bits() -> None:
    form = RequestForm("tensors", (TensorSpec("x", "BF16", (2,)),))
    (tensor,) = tensors_of(form, Sample({"x": np.array([0x3F80, 0], np.uint16)}))
    assert bytes(tensor.data) == b"\x80\x3f\x00\x00"
    assert problems(form, x=np.zeros(2, np.float32)) == [
        "input 'x': float32 values cannot be given as BF16"
    ]


def test_all_problems_are_told_at_once() -> None:
    assert problems(PAIR, c=[1], b=[1.5]) == [
        "input 'c': unknown; the model takes a, b",
        "input 'a': missing; the model takes a, b",
        "input 'b': shape [1] does not fit [-1, -1]",
    ]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((3, 224), np.float32), "shape [3, 224] does not fit [-1, 1, 8]"),
        (np.zeros((1, 1, 9), np.float32), "shape [1, 1, 9] does not fit [-1, 1, 8]"),
        (np.zeros((1, 1, 8), np.complex64), "complex64 values cannot be given as FP32"),
        (np.full((1, 1, 8), "x"), "<U1 values cannot be given as FP32"),
    ],
)
def test_what_does_not_fit_is_told_with_what_was_expected(array: np.ndarray, text: str) -> None:
    assert problems(IMAGE, image=array) == [f"input 'image': {text}"]


def test_floats_are_no_integers_and_numbers_no_strings() -> None:
    assert problems(PAIR, a=np.zeros((1, 2)), b=np.zeros((1, 2))) == [
        "input 'a': float64 values cannot be given as INT32",
        "input 'b': float64 values cannot be given as BYTES",
    ]


def test_inputs_of_one_request_have_the_same_number_of_rows() -> None:
    given = {"a": np.zeros((2, 2), np.int32), "b": np.full((3, 1), "x")}
    assert problems(PAIR, **given) == ["inputs have different numbers of rows: 'a' 2, 'b' 3"]


def test_the_batch_dimension_is_cut_off_where_there_is_one() -> None:
    metadata = V2Metadata("m", [V2Tensor("x", "FP32", [-1, 3, 4])])
    for config, shape in ((V2Config(8), (3, 4)), (V2Config(), (-1, 3, 4)), (None, (3, 4))):
        (spec,) = form_of(metadata, config).inputs
        assert spec.shape == shape


# Statistics


def entry(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


TRITON = {
    "name": "m",
    "version": "1",
    "inference_count": "12",
    "execution_count": "5",
    "inference_stats": {
        "success": entry(6, 600),
        "fail": {"count": "2"},
        "queue": entry(6, 100),
        "compute_input": entry(6, 10),
        "compute_infer": {"count": "6", "ns": "400"},
        "compute_output": entry(6, 20),
    },
    "batch_stats": [
        {
            "batch_size": "2",
            "compute_input": entry(4, 5),
            "compute_infer": entry(4, 150),
            "compute_output": entry(4, 6),
        },
        {"batch_size": "4", "compute_infer": {"count": "1", "ns": "70"}},
    ],
}


def test_statistics_of_triton_as_counters() -> None:
    counters = counters_of(TRITON)
    assert (counters.num_success, counters.num_fail) == (6, 2)
    assert (counters.num_inferences, counters.num_executions) == (12, 5)
    assert (counters.success_ns, counters.queue_ns) == (600, 100)
    compute = (counters.compute_input_ns, counters.compute_infer_ns, counters.compute_output_ns)
    assert compute == (10, 400, 20)
    # Each execution once: not what its requests sum up to.
    assert counters.busy_ns == 5 + 150 + 6 + 70
    assert counters.batch_wait_ns is None
    assert counters.instance_wait_ns is None


def test_the_two_waits_of_a_penstock_queue() -> None:
    phases = {**TRITON["inference_stats"], "queue_batch": entry(6, 70)}
    phases["queue_instance"] = entry(6, 30)
    counters = counters_of({**TRITON, "inference_stats": phases})
    assert (counters.batch_wait_ns, counters.instance_wait_ns) == (70, 30)


def test_how_busy_is_unknown_where_batches_are_not_told() -> None:
    untold = {key: value for key, value in TRITON.items() if key != "batch_stats"}
    assert counters_of(untold).busy_ns is None
    assert counters_of({}).busy_ns == 0


def test_digest_does_not_depend_on_the_order_of_fields() -> None:
    assert config_digest({"a": 1, "b": [2]}) == config_digest({"b": [2], "a": 1})
    assert config_digest({"a": 1, "b": [2]}) != config_digest({"a": 1, "b": [3]})


# Texts


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("would be answered in 12.5 ms", "would be answered in N ms"),
        ("two \t spaces\nand a trace", "two spaces"),
        ("", ""),
        ("\n", ""),
    ],
)
def test_a_text_is_the_same_for_the_same_cause(text: str, short: str) -> None:
    assert in_short(text) == short


def test_a_long_text_is_cut() -> None:
    assert in_short("x" * 500) == "x" * (MAX_TEXT - 1) + "…"
