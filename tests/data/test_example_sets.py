"""Examples fitted to a model's inputs: all problems at once, then samples."""

from collections.abc import Mapping

import numpy as np
import pytest

from penstock.data.cycling import shares
from penstock.data.example_sets import (
    Columns,
    TensorExamples,
    TextExamples,
    check_batches,
    from_arrays,
    from_list,
    from_rows,
    rename,
)
from penstock.data.files import FileRows, Row
from penstock.data.non_finite import NonFinite
from penstock.data.samples import Origin, RequestForm, Sample
from penstock.errors import ConfigError
from penstock.types import TensorSpec

ORIGIN = Origin("a test", is_random=False)
TWO = RequestForm(
    "tensors",
    (
        TensorSpec("a", "FP32", (2,)),
        TensorSpec("b", "INT64", (-1,)),
        TensorSpec("c", "FP32", (1,), is_optional=True),
    ),
    has_batch=True,
)
ONE = RequestForm("tensors", (TensorSpec("a", "FP32", (2,)),), has_batch=True)


def rows(*rows: Row) -> FileRows:
    return FileRows(rows, range(1, len(rows) + 1), "line")


def source(columns: Columns, batch_size: int = 1, has_batch: bool = True) -> TensorExamples:
    order = shares(columns.num_examples, 0, 0, 1, batch_size)
    return TensorExamples(columns, has_batch, order, ORIGIN)


def tensors(sample: Sample) -> Mapping[str, list[object]]:
    return {name: array.tolist() for name, array in sample.tensors.items()}


def test_arrays_become_columns() -> None:
    columns = from_arrays(TWO, {"a": np.zeros((5, 2)), "b": np.zeros((5, 7), np.int32)}, "f")
    assert columns.num_examples == 5
    assert {name: column.dtype.name for name, column in columns.by_name.items()} == {
        "a": "float32",
        "b": "int64",
    }


def test_a_single_array_without_a_name_is_for_the_single_input() -> None:
    assert list(from_arrays(ONE, {"arr_0": np.zeros((5, 2))}, "f").by_name) == ["a"]


def test_an_array_that_matches_no_input_is_an_error_that_lists_both_sides() -> None:
    with pytest.raises(ConfigError) as caught:
        from_arrays(ONE, {"features": np.zeros((5, 2))}, "data.npz", ["label"])
    assert caught.value.problems == (
        "data.npz has 'features' and 'label'; the model's input is 'a' (FP32 [-1, 2]); "
        "rename 'features' to 'a'",
    )
    with pytest.raises(ConfigError) as caught:
        from_rows(TWO, rows(*[{"a": [1, 2], "ids": [3]}] * 9), "data.jsonl")
    assert caught.value.problems == (
        "data.jsonl has 'a' and 'ids'; the model's inputs are 'a' (FP32 [-1, 2]), "
        "'b' (INT64 [-1, -1]) and 'c' (FP32 [-1, 1], optional); rename 'ids' to 'b'",
    )

    with pytest.raises(ConfigError, match="add 'b', or rename what is meant to be that"):
        from_arrays(TWO, {"a": np.zeros((5, 2)), "m": np.zeros(5), "n": np.zeros(5)}, "f")


def test_other_columns_are_ignored_and_named_where_every_input_is_there() -> None:
    arrays = {"a": np.zeros((5, 2)), "id": np.arange(5), "split": np.arange(5)}
    columns = from_arrays(ONE, arrays, "f")
    assert list(columns.by_name) == ["a"]
    assert columns.notes == ("ignored: 'id' and 'split'",)
    assert from_rows(ONE, rows({"a": [1, 2], "id": 7}), "f").notes == ("ignored: 'id'",)


def test_all_problems_of_arrays_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        from_arrays(TWO, {"a": np.zeros((5, 3)), "label": np.zeros(5)}, "data.npz")
    assert caught.value.problems == (
        "data.npz has 'a' and 'label'; the model's inputs are 'a' (FP32 [-1, 2]), "
        "'b' (INT64 [-1, -1]) and 'c' (FP32 [-1, 1], optional); rename 'label' to 'b'",
        "data.npz: input 'a': shape [3] does not fit [2]",
    )


def test_all_problems_of_rows_are_told_at_once_and_where() -> None:
    with pytest.raises(ConfigError) as caught:
        from_rows(
            TWO,
            rows(
                {"a": [1, 2], "b": [1]},
                {"a": [1, 2, 3], "b": [1.5]},
                {"a": [1, 2], "B": [1]},
            ),
            "data.jsonl",
        )
    assert caught.value.problems == (
        "data.jsonl, line 2: input 'a': shape [3] does not fit [2]",
        "data.jsonl, line 2: input 'b': floats cannot be cast to INT64",
        "data.jsonl, line 3: input 'b' is missing",
    )


def test_many_problems_of_one_input_are_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        from_rows(ONE, rows(*[{"a": [1]}] * 1003), "f")
    assert len(caught.value.problems) == 4
    assert caught.value.problems[3] == "f: input 'a': 1,000 more such examples"


def test_values_that_are_not_finite_are_noted() -> None:
    columns = from_arrays(ONE, {"a": np.array([[1, 2], [1, np.nan]])}, "f")
    assert columns.non_finite == (NonFinite("f", "a", 1, "row 1", "NaN"),)
    found = from_rows(ONE, rows({"a": [1, 2]}, {"a": [float("inf"), 2]}), "f").non_finite
    assert found == (NonFinite("f", "a", 1, "line 2", "infinity"),)


def test_other_inputs_that_are_needed_are_missed() -> None:
    with pytest.raises(ConfigError, match="f: input 'b' is missing"):
        from_list(TWO, "a", [np.zeros(2, np.float32)], "f")


def test_a_sample_has_the_batch_dimension_of_its_model() -> None:
    columns = from_arrays(ONE, {"a": np.array([[1, 2]])}, "f")
    assert tensors(source(columns).next()[1]) == {"a": [[1, 2]]}
    assert tensors(source(columns, has_batch=False).next()[1]) == {"a": [1, 2]}


def test_an_example_is_named_by_its_index_and_made_once() -> None:
    columns = from_arrays(ONE, {"a": np.arange(20).reshape(10, 2)}, "f")
    examples = source(columns)
    first: dict[int | None, Sample] = dict(examples.next() for _ in range(10))
    assert set(first) == set(range(10))
    assert all(tensors(s) == {"a": [[2 * i, 2 * i + 1]]} for i, s in first.items() if i is not None)
    assert all(first[index] is sample for index, sample in (examples.next() for _ in range(10)))


def test_a_batch_is_made_of_examples_that_follow_each_other() -> None:
    columns = from_arrays(ONE, {"a": np.arange(20).reshape(10, 2)}, "f")
    single, batched = source(columns), source(columns, batch_size=4)
    for _ in range(10):
        index, sample = batched.next()
        assert index is None
        alone = [single.next()[1].tensors["a"] for _ in range(4)]
        assert sample.tensors["a"].tolist() == np.concatenate(alone).tolist()


def test_examples_of_different_shapes_are_sent_one_by_one() -> None:
    columns = from_rows(TWO, rows({"a": [1, 2], "b": [1]}, {"a": [3, 4], "b": [1, 2, 3]}), "f")
    check_batches(columns, 1, "f")
    examples = source(columns)
    seen = [examples.next()[1].tensors["b"].shape for _ in range(2)]
    assert sorted(seen) == [(1, 1), (1, 3)]


def test_examples_of_different_shapes_are_not_stacked() -> None:
    columns = from_rows(TWO, rows({"a": [1, 2], "b": [1]}, {"a": [3, 4], "b": [1, 2, 3]}), "f")
    with pytest.raises(ConfigError) as caught:
        check_batches(columns, 4, "f")
    assert caught.value.problems == (
        "f: input 'b': examples of different shapes ([1], [3]) cannot share a request; "
        "expected one shape, or batch_size 1 instead of 4",
    )


def test_an_optional_input_may_be_left_out() -> None:
    one, other = {"a": [1, 2], "b": [1]}, {"a": [3, 4], "b": [1], "c": [5]}
    examples = source(from_rows(TWO, rows(one, other), "f"))
    found = dict(examples.next() for _ in range(2))
    assert set(found[0].tensors) == {"a", "b"}
    assert set(found[1].tensors) == {"a", "b", "c"}
    with pytest.raises(ConfigError, match=r"\(\[1\], none\) cannot share"):
        check_batches(from_rows(TWO, rows(one, other), "f"), 2, "f")


def test_tensors_without_dimensions() -> None:
    form = RequestForm("tensors", (TensorSpec("a", "BYTES", ()), TensorSpec("b", "FP32", ())))
    columns = from_rows(form, rows({"a": "x", "b": 1.5}), "f")
    (_, sample) = source(columns, has_batch=False).next()
    assert {name: array.shape for name, array in sample.tensors.items()} == {"a": (), "b": ()}
    assert sample.tensors["a"].item() == b"x"


def test_texts_come_as_they_are() -> None:
    samples = [Sample(fields={"prompt": text}, max_tokens=len(text)) for text in ("a", "bb")]
    examples = TextExamples(samples, None, shares(2, 0, 0, 1), ORIGIN)
    found = dict(examples.next() for _ in range(2))
    assert found == {0: samples[0], 1: samples[1]}


def test_answers_of_another_length_each_are_samples_of_their_own() -> None:
    samples = [Sample(fields={"prompt": "a"}, max_tokens=5)]
    examples = TextExamples(samples, iter([7, 8]), shares(1, 0, 0, 1), ORIGIN)
    found = [examples.next() for _ in range(2)]
    assert [(index, s.fields, s.max_tokens) for index, s in found] == [
        (None, {"prompt": "a"}, 7),
        (None, {"prompt": "a"}, 8),
    ]


def test_a_template_that_names_the_limit_gets_it() -> None:
    samples = [Sample(fields={"text": "a", "max_tokens": 5})]
    examples = TextExamples(samples, iter([7]), shares(1, 0, 0, 1), ORIGIN)
    assert examples.next()[1].fields == {"text": "a", "max_tokens": 7}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["text", "id"], {"text": "TEXT"}),
        (["Sentence"], {"Sentence": "TEXT"}),
        (["TEXT", "text"], {}),
        (["other"], {}),
    ],
)
def test_the_column_of_texts_is_found_by_its_usual_names(names, expected):
    assert rename(TensorSpec("TEXT", "BYTES", (1,)), names) == expected
    assert rename(TensorSpec("TEXT", "FP32", (1,)), names) == {}
