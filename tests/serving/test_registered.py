"""Rows of registered memory are submitted by reference, and answered like arrays."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BackendFailed, InvalidRequest, NotReady
from penstock.serving.local import LocalModel

# Rows of 2 values are copied into slabs; those of LARGE are read where they are.
SMALL, LARGE = 2, 8192
MODEL = """
backend: "null" max_batch_size: 8 dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {size} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {size} ] }}
"""
TWO_INPUTS = """
backend: "null" max_batch_size: 8 dynamic_batching { }
input { name: "a" data_type: TYPE_FP32 dims: [ 8192 ] }
input { name: "b" data_type: TYPE_INT8 dims: [ -1 ] }
output { name: "c" data_type: TYPE_FP32 dims: [ 8192 ] }
output { name: "d" data_type: TYPE_INT8 dims: [ -1 ] }
"""


def folder(root: Path, text: str, **options: str) -> str:
    (root / "model" / "1").mkdir(parents=True)
    for key, value in options.items():
        text += f'parameters {{ key: "null.{key}" value {{ string_value: "{value}" }} }}\n'
    (root / "model" / "config.pbtxt").write_text(text)
    return str(root / "model")


def numbered(num_rows: int, size: int) -> np.ndarray:
    """Rows whose values differ from those of all others."""
    rows = np.random.default_rng(size).random((num_rows, size), dtype=np.float32)
    rows[:, 0] = np.arange(num_rows)
    return rows


@pytest.fixture(scope="module", params=[SMALL, LARGE])
def echo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalModel, np.ndarray]]:
    path = folder(tmp_path_factory.mktemp("echo"), MODEL.format(size=request.param))
    with LocalModel(path) as model:
        yield model, numbered(64, request.param)


@pytest.mark.parametrize("order", ["as they lie", "backwards", "every third"])
def test_rows_are_answered_bit_for_bit(echo: tuple[LocalModel, np.ndarray], order: str) -> None:
    model, values = echo
    rows = model.register(values)
    numbers = list(range(64))[:: {"as they lie": 1, "backwards": -1, "every third": 3}[order]]
    futures = [(n, model.submit(rows[n])) for n in numbers]
    for number, future in futures:
        answer = future.result(timeout=60)["y"]
        assert answer.tobytes() == values[number].tobytes() and answer.shape == (1, values.shape[1])


def test_slices_and_single_rows_are_rows(echo: tuple[LocalModel, np.ndarray]) -> None:
    model, values = echo
    rows = model.register({"x": values})
    assert len(rows) == 64 and len(rows[3:7]) == 4 and len(rows[-1]) == 1
    np.testing.assert_array_equal(model.infer(rows[3:7])["y"], values[3:7])
    np.testing.assert_array_equal(model.infer(rows[10:20][-2])["y"], values[18:19])
    np.testing.assert_array_equal(model.infer(rows[np.int64(5)])["y"], values[5:6])
    assert sum(len(row) for row in rows) == 64
    for index in (64, -65):
        with pytest.raises(IndexError, match="of 64"):
            rows[index]
    with pytest.raises(InvalidRequest, match="consecutive"):
        rows[::2]
    with pytest.raises(InvalidRequest, match="<= 8.*got 9"):
        model.infer(rows[:9])
    with pytest.raises(InvalidRequest, match="at least 1"):
        model.infer(rows[5:5])


def test_answers_belong_to_the_caller_and_the_memory_is_not_changed(
    echo: tuple[LocalModel, np.ndarray],
) -> None:
    model, values = echo
    kept = values.copy()
    answer = model.infer(model.register(values)[:4])["y"]
    answer[:] = -1
    np.testing.assert_array_equal(values, kept)
    assert values.flags.writeable


def test_memory_may_change_between_requests(echo: tuple[LocalModel, np.ndarray]) -> None:
    model, values = echo
    mine = values.copy()
    rows = model.register(mine)
    for number in range(3):
        mine[1] = number
        np.testing.assert_array_equal(model.infer(rows[1])["y"], mine[1:2])


@settings(max_examples=25, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 63), st.integers(1, 8), st.booleans(), st.booleans()),
        min_size=1,
        max_size=60,
    ),
    num_threads=st.integers(1, 4),
)
def test_each_submit_gets_its_own_answer(
    echo: tuple[LocalModel, np.ndarray],
    asked: list[tuple[int, int, bool, bool]],
    num_threads: int,
) -> None:
    """Registered rows and arrays in the same batches, from several threads, some cancelled."""
    model, values = echo
    rows = model.register(values)

    def send(each: tuple[int, int, bool, bool]) -> tuple[np.ndarray, Future]:
        start, count, is_registered, is_cancelled = each
        wanted = values[start : start + count]
        future = model.submit(rows[start : start + count] if is_registered else wanted)
        if is_cancelled:
            future.cancel()
        return wanted, future

    with ThreadPoolExecutor(num_threads) as threads:
        sent = list(threads.map(send, asked))
    for wanted, future in sent:
        if not future.cancelled():
            np.testing.assert_array_equal(future.result(timeout=60)["y"], wanted)


def test_several_inputs_are_registered_together(tmp_path: Path) -> None:
    a, b = numbered(16, 8192), np.arange(48, dtype=np.int8).reshape(16, 3)
    with LocalModel(folder(tmp_path, TWO_INPUTS)) as model:
        rows = model.register({"b": b, "a": a})
        futures = [model.submit(rows[n : n + 2]) for n in range(0, 16, 2)]
        for n, future in enumerate(futures):
            answer = future.result(timeout=60)
            np.testing.assert_array_equal(answer["c"], a[2 * n : 2 * n + 2])
            np.testing.assert_array_equal(answer["d"], b[2 * n : 2 * n + 2])
        for wrong, words in (
            ({"a": a}, "needs b"),
            ({"a": a, "b": b[:8]}, "'b' has 8 rows.*16"),
            ({"a": a, "b": b, "z": b}, "no input 'z'; it takes a, b"),
            (a, "by name: a, b"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                model.register(wrong)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 2)), "'x'.*dtype is <f8, expected <f4 for FP32"),
        (np.zeros((4, 2), ">f4"), "dtype is >f4, expected <f4"),
        (np.zeros((4, 3), np.float32), r"shape is \[4, 3\], expected \[-1, 2\]"),
        (np.zeros(2, np.float32), r"shape is \[2\], expected \[-1, 2\]"),
        (np.zeros((0, 2), np.float32), "one or more rows"),
        (np.zeros((2, 4), np.float32).T, "not C-contiguous"),
        (np.zeros((8, 2), np.float32)[::2], "not C-contiguous"),
        ([[1.0, 2.0]], "a list is no numpy array"),
        ({}, "needs x"),
    ],
)
def test_memory_that_cannot_be_used_as_it_is_is_refused(
    tmp_path: Path, array: object, words: str
) -> None:
    with (
        LocalModel(folder(tmp_path, MODEL.format(size=2))) as model,
        pytest.raises(InvalidRequest, match=words),
    ):
        model.register(array)


def test_texts_and_models_without_rows_are_refused(tmp_path: Path) -> None:
    texts = MODEL.format(size=1).replace("FP32", "STRING")
    with (
        LocalModel(folder(tmp_path / "a", texts)) as model,
        pytest.raises(InvalidRequest, match="texts have no fixed size"),
    ):
        model.register(np.array([["a"]], np.object_))
    alone = MODEL.format(size=2).replace("max_batch_size: 8 dynamic_batching { }", "")
    with (
        LocalModel(folder(tmp_path / "b", alone)) as model,
        pytest.raises(InvalidRequest, match="no batch dimension"),
    ):
        model.register(np.zeros((4, 2), np.float32))


def test_rows_belong_to_the_model_that_registered_them(tmp_path: Path) -> None:
    path = folder(tmp_path, MODEL.format(size=2))
    with LocalModel(path) as first, LocalModel(path) as second:
        rows = first.register(np.zeros((4, 2), np.float32))
        with pytest.raises(InvalidRequest, match="not registered with 'model'"):
            second.submit(rows[0])
    with pytest.raises(NotReady, match="closed"):
        first.submit(rows[0])


def test_memory_lives_until_its_requests_are_answered_and_not_longer(tmp_path: Path) -> None:
    with LocalModel(folder(tmp_path, MODEL.format(size=LARGE), a_ms="50")) as model:
        values = numbered(8, LARGE)
        kept, gone = values.copy(), weakref.ref(values)
        futures = [model.submit(row) for row in model.register(values)]
        del values
        for number, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(timeout=60)["y"], kept[number : number + 1])
        # The batch is forgotten after its answers; the next one comes after that.
        model.infer(np.zeros((1, LARGE), np.float32))
        gc.collect()
        assert gone() is None


def test_an_error_of_one_row_is_not_the_error_of_its_batch(tmp_path: Path) -> None:
    """The batch fails, and each of its requests runs again alone."""
    options = {"fail_on": "5", "a_ms": "20"}
    with LocalModel(folder(tmp_path, MODEL.format(size=LARGE), **options)) as model:
        values = numbered(8, LARGE)
        for number, future in enumerate([model.submit(row) for row in model.register(values)]):
            if number == 5:
                with pytest.raises(BackendFailed, match="fail_on"):
                    future.result(timeout=60)
            else:
                answer = future.result(timeout=60)["y"]
                np.testing.assert_array_equal(answer, values[number : number + 1])


def test_a_cancelled_row_does_not_harm_those_in_its_batch(tmp_path: Path) -> None:
    with LocalModel(folder(tmp_path, MODEL.format(size=LARGE), a_ms="30")) as model:
        values = numbered(16, LARGE)
        futures = [model.submit(row) for row in model.register(values)]
        cancelled = [number for number in range(0, 16, 3) if futures[number].cancel()]
        for number, future in enumerate(futures):
            if number not in cancelled:
                answer = future.result(timeout=60)["y"]
                np.testing.assert_array_equal(answer, values[number : number + 1])
