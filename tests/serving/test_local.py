"""A model in this process: `LocalModel(path).infer(x)`."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from doubles import FakeGpus, RecordingSink
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from penstock.errors import (
    BackendFailed,
    Cancelled,
    ConfigError,
    InvalidRequest,
    NotReady,
    PenstockError,
    Unsupported,
)
from penstock.serving.local import LocalModel
from penstock.system import devices
from penstock.types import Request, from_array

WriteOnnx = Callable[..., Path]
NULL = """
backend: "null"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
TWO_INPUTS = """
backend: "null"
input { name: "a" data_type: TYPE_INT8 dims: [ -1 ] }
input { name: "b" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "c" data_type: TYPE_INT8 dims: [ -1 ] }
output { name: "d" data_type: TYPE_STRING dims: [ -1 ] }
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def model_folder(root: Path, text: str | None, *versions: str) -> str:
    folder = root / "model"
    for version in versions or ("1",):
        (folder / version).mkdir(parents=True)
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def digits(examples: Path) -> Iterator[LocalModel]:
    with LocalModel(str(examples / "digits")) as model:
        yield model


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    """Answers with what it is given, in batches."""
    path = model_folder(tmp_path_factory.mktemp("echo"), NULL + "dynamic_batching { }")
    with LocalModel(path) as model:
        yield model


@pytest.fixture(scope="module")
def session(examples: Path) -> onnxruntime.InferenceSession:
    path = examples / "digits" / "1" / "model.onnx"
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def images(num_images: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((num_images, 1, 8, 8), dtype=np.float32)


def logits(session: onnxruntime.InferenceSession, batch: np.ndarray) -> np.ndarray:
    return session.run(["logits"], {"image": batch})[0]


# Answers


@pytest.mark.parametrize("num_images", [1, 3, 64])
def test_answer_is_the_one_of_onnx_runtime(
    digits: LocalModel, session: onnxruntime.InferenceSession, num_images: int
) -> None:
    outputs = digits.infer(images(num_images))
    assert list(outputs) == ["logits"]
    assert outputs["logits"].dtype == np.float32
    expected = logits(session, images(num_images))
    np.testing.assert_allclose(outputs["logits"], expected, rtol=1e-4, atol=1e-5)


def test_one_input_can_be_given_by_name_or_alone(digits: LocalModel) -> None:
    by_name = digits.infer({"image": images(2)})["logits"]
    np.testing.assert_array_equal(by_name, digits.infer(images(2))["logits"])


def test_answer_belongs_to_the_caller(digits: LocalModel) -> None:
    first = digits.infer(images(1))["logits"]
    kept = first.copy()
    digits.infer(images(1, seed=1))
    np.testing.assert_array_equal(first, kept)
    first[:] = 0
    np.testing.assert_array_equal(digits.infer(images(1))["logits"], kept)


def test_input_is_not_modified_and_may_be_read_only(digits: LocalModel) -> None:
    array = images(2)
    array.flags.writeable = False
    digits.infer(array)
    np.testing.assert_array_equal(array, images(2))


def test_input_need_not_be_contiguous_or_of_this_machines_byte_order(digits: LocalModel) -> None:
    expected = digits.infer(images(4)[::2])["logits"]
    np.testing.assert_array_equal(digits.infer(images(4)[::2].copy())["logits"], expected)
    np.testing.assert_array_equal(digits.infer(images(4)[::2].astype(">f4"))["logits"], expected)


def test_many_threads_get_each_its_own_answer(
    digits: LocalModel, session: onnxruntime.InferenceSession
) -> None:
    def answer(seed: int) -> np.ndarray:
        return digits.infer(images(1 + seed % 5, seed))["logits"]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(answer, range(200)))
    for seed, actual in enumerate(answers):
        expected = logits(session, images(1 + seed % 5, seed))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_requests_that_wait_together_are_all_answered(digits: LocalModel) -> None:
    futures = [digits.submit(images(1, seed)) for seed in range(100)]
    alone = [digits.infer(images(1, seed))["logits"] for seed in range(100)]
    for future, expected in zip(futures, alone, strict=True):
        actual = future.result(timeout=60)["logits"]
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_model_of_several_inputs_takes_them_by_name_in_any_order(
    tmp_path: Path, write_onnx: WriteOnnx
) -> None:
    path = model_folder(tmp_path, None)
    write_onnx(
        Path(path) / "1" / "model.onnx",
        [helper.make_node("Sub", ["a", "b"], ["difference"])],
        {"a": ("FP32", [2]), "b": ("FP32", [2])},
        {"difference": ("FP32", [2])},
    )
    a, b = np.array([5, 6], np.float32), np.array([1, 1], np.float32)
    with LocalModel(path) as model:
        assert model.infer({"a": a, "b": b})["difference"].tolist() == [4, 5]
        assert model.infer({"b": b, "a": a})["difference"].tolist() == [4, 5]


def test_text_may_be_given_as_str(tmp_path: Path) -> None:
    with LocalModel(model_folder(tmp_path, TWO_INPUTS)) as model:
        inputs = {"a": np.zeros(1, np.int8), "b": np.array(["é"])}
        assert model.infer(inputs)["d"].tolist() == ["é".encode()]


def test_a_text_for_each_row_is_an_output_without_dimensions(tmp_path: Path, write_onnx) -> None:
    """The label of a classifier, as scikit-learn exports it."""
    names = numpy_helper.from_array(np.array([b"cat", b"dog"], object), "names")
    nodes = [
        helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
        helper.make_node("Gather", ["names", "best"], ["name"]),
    ]
    inputs, outputs = {"x": ("FP32", ["batch", 2])}, {"name": ("BYTES", ["batch"])}
    write_onnx(tmp_path / "m" / "1" / "model.onnx", nodes, inputs, outputs, [names])
    with LocalModel(tmp_path / "m") as model:
        answer = model.infer(np.eye(2, dtype=np.float32)[::-1])
    assert answer["name"].tolist() == [b"dog", b"cat"]


def test_numbers_of_the_same_kind_are_converted(digits: LocalModel) -> None:
    np.testing.assert_array_equal(
        digits.infer(images(1).astype(np.float64))["logits"], digits.infer(images(1))["logits"]
    )


# Which model and version


def test_repr_and_config_say_which_model_it_is(digits: LocalModel) -> None:
    assert "digits/1" in repr(digits)
    assert (digits.config.name, digits.config.version) == ("digits", "1")


@pytest.mark.parametrize("order", ["1, 2, 10", "10, 2, 1"])
def test_the_highest_version_answers_unless_one_is_named(tmp_path: Path, order: str) -> None:
    text = f"version_policy {{ specific {{ versions: [ {order} ] }} }}" + NULL
    path = model_folder(tmp_path, text, "1", "2", "10")
    with LocalModel(path) as model:
        assert model.config.version == "10"
    with LocalModel(path, version="2") as model:
        assert model.config.version == "2"


def test_a_version_that_is_not_there_is_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="7"):
        LocalModel(model_folder(tmp_path, NULL), version="7")


def test_a_repository_of_several_models_is_refused_with_their_names(examples: Path) -> None:
    with pytest.raises(ConfigError, match=r"digits, identity"):
        LocalModel(str(examples))


# Errors


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (images(1)[0], r"image.*\[-1,1,8,8\].*\[1,8,8\]"),
        (np.zeros((1, 1, 8, 9), np.float32), r"image.*\[-1,1,8,8\].*\[1,1,8,9\]"),
        (np.zeros((0, 1, 8, 8), np.float32), "batch"),
        (images(65), "64.*65"),
        (np.zeros((1, 1, 8, 8), np.complex64), "image.*complex64.*FP32"),
        (np.full((1, 1, 8, 8), "a"), "image.*FP32"),
        ({"picture": images(1)}, "'picture'.*image"),
        ({"image": images(1), "more": images(1)}, "'more'.*image"),
        ({}, "image"),
    ],
)
def test_wrong_input_is_refused_in_words_and_the_next_request_is_answered(
    digits: LocalModel, inputs: object, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        digits.infer(inputs)
    assert digits.infer(images(1))["logits"].shape == (1, 10)


def test_a_bare_array_is_refused_where_there_are_several_inputs(tmp_path: Path) -> None:
    with (
        LocalModel(model_folder(tmp_path, TWO_INPUTS)) as model,
        pytest.raises(InvalidRequest, match="a, b"),
    ):
        model.infer(np.zeros(1, np.int8))


def test_a_float_that_is_too_large_is_refused_and_infinity_is_not(digits: LocalModel) -> None:
    batch = images(1).astype(np.float64)
    batch[0, 0, 0, 0] = 1e300
    with pytest.raises(InvalidRequest, match="'image' has values that do not fit FP32"):
        digits.infer(batch)
    batch[0, 0, 0, 0] = np.inf
    assert digits.infer(batch)["logits"].shape == (1, 10)


def test_rows_of_several_lengths_are_refused(digits: LocalModel) -> None:
    with pytest.raises(InvalidRequest, match="'image' is no array"):
        digits.infer([[1.0], [1.0, 2.0]])


def test_a_bare_array_is_the_one_input_that_the_model_needs(tmp_path: Path) -> None:
    text = """
    backend: "null"
    input { name: "a" data_type: TYPE_INT8 dims: 1 optional: true }
    input { name: "b" data_type: TYPE_INT8 dims: 1 }
    output { name: "y" data_type: TYPE_INT8 dims: 1 }
    """
    with LocalModel(model_folder(tmp_path, text)) as model:
        assert model.infer(np.zeros(1, np.int8))["y"].shape == (1,)


def test_inputs_whose_batches_differ_are_refused(tmp_path: Path) -> None:
    text = """
    backend: "null" max_batch_size: 4
    input { name: "a" data_type: TYPE_FP32 dims: [ 1 ] }
    input { name: "b" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "c" data_type: TYPE_FP32 dims: [ 1 ] }
    """
    with (
        LocalModel(model_folder(tmp_path, text)) as model,
        pytest.raises(InvalidRequest, match="batch"),
    ):
        model.infer({"a": np.zeros((1, 1), np.float32), "b": np.zeros((2, 1), np.float32)})


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_numbers_of_another_kind_are_refused(tmp_path: Path, dtype: type) -> None:
    with LocalModel(model_folder(tmp_path, TWO_INPUTS)) as model:
        inputs = {"a": np.zeros(1, dtype), "b": np.array([b""], np.object_)}
        with pytest.raises(InvalidRequest, match=f"a.*{np.dtype(dtype)}.*INT8"):
            model.infer(inputs)


def test_whole_numbers_that_fit_the_datatype_are_converted(tmp_path: Path) -> None:
    with LocalModel(model_folder(tmp_path, TWO_INPUTS)) as model:
        inputs = {"a": np.array([-128, 127]), "b": np.array([b""], np.object_)}
        assert model.infer(inputs)["c"].tolist() == [-128, 127]


@pytest.mark.parametrize("array", [np.array([300]), np.array([-129]), np.array([200], np.uint8)])
def test_a_number_that_does_not_fit_the_datatype_is_refused(
    tmp_path: Path, array: np.ndarray
) -> None:
    with LocalModel(model_folder(tmp_path, TWO_INPUTS)) as model:
        inputs = {"a": array, "b": np.array([b""], np.object_)}
        with pytest.raises(InvalidRequest, match="'a'.*INT8"):
            model.infer(inputs)


def test_numbers_are_not_text(tmp_path: Path) -> None:
    with (
        LocalModel(model_folder(tmp_path, TWO_INPUTS)) as model,
        pytest.raises(InvalidRequest, match="b.*BYTES"),
    ):
        model.infer({"a": np.zeros(1, np.int8), "b": np.array([1.5])})


def test_an_error_of_the_model_reaches_the_caller_and_the_next_request_is_answered(
    tmp_path: Path,
) -> None:
    text = NULL + parameter("null.fail_on", "7") + parameter("null.a_ms", "0")
    with LocalModel(model_folder(tmp_path, text)) as model:
        for _ in range(2):
            with pytest.raises(BackendFailed, match="fail_on"):
                model.infer(np.full((1, 2), 7, np.float32))
            assert model.infer(np.ones((1, 2), np.float32))["y"].tolist() == [[1, 1]]


def test_an_error_of_one_request_is_not_the_error_of_its_batch(tmp_path: Path) -> None:
    text = NULL + "dynamic_batching { }" + parameter("null.fail_on", "7")
    text += parameter("null.a_ms", "20")
    with LocalModel(model_folder(tmp_path, text)) as model:
        futures = [model.submit(np.full((1, 2), n, np.float32)) for n in (1, 2, 7, 3)]
        for number, future in zip((1, 2, 7, 3), futures, strict=True):
            if number == 7:
                with pytest.raises(BackendFailed):
                    future.result(timeout=60)
            else:
                assert future.result(timeout=60)["y"].tolist() == [[number, number]]


def test_cancelling_one_request_does_not_harm_those_in_its_batch(tmp_path: Path) -> None:
    """The batch of three forms when the third comes, or without the cancelled one after a while."""
    wait_for_three = "preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 1000000"
    text = NULL + f"dynamic_batching {{ {wait_for_three} }}"
    row = np.zeros((1, 2), np.float32)
    with LocalModel(model_folder(tmp_path, text)) as model:
        cancelled = model.submit(row)
        assert cancelled.cancel()
        futures = [model.submit(row + n) for n in (1, 2)]
        for number, future in zip((1, 2), futures, strict=True):
            assert future.result(timeout=60)["y"].tolist() == [[number, number]]
        with pytest.raises(CancelledError):
            cancelled.result(timeout=0)


# Closing


def run_script(script: str, path: Path) -> tuple[int, str, str]:
    command = [sys.executable, "-c", script, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


def started_since(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that were not there before and have not ended after a moment."""
    threads = [thread for thread in threading.enumerate() if thread not in before]
    for thread in threads:
        thread.join(timeout=60)
    return [thread for thread in threads if thread.is_alive()]


def test_close_ends_its_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = LocalModel(model_folder(tmp_path, NULL))
    # Threads of other tests may end meanwhile.
    assert set(threading.enumerate()) - before
    model.infer(np.zeros((1, 2), np.float32))
    model.close()
    assert started_since(before) == []


def test_leaving_the_with_block_closes_the_model_even_after_an_error(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), LocalModel(model_folder(tmp_path, NULL)):
        raise ZeroDivisionError
    assert started_since(before) == []


def test_close_answers_everything_that_still_waits(tmp_path: Path) -> None:
    path = model_folder(tmp_path, NULL + parameter("null.a_ms", "50"))
    model = LocalModel(path)
    futures: list[Future[dict[str, np.ndarray]]] = [
        model.submit(np.zeros((1, 2), np.float32)) for _ in range(20)
    ]
    model.close()
    done, waiting = wait(futures, timeout=60)
    assert not waiting
    for future in done:
        error = future.exception()
        assert error is None or isinstance(error, PenstockError)


def test_a_closed_model_refuses_requests_with_our_error(tmp_path: Path) -> None:
    model = LocalModel(model_folder(tmp_path, NULL))
    model.close()
    with pytest.raises(PenstockError, match="closed"):
        model.infer(np.zeros((1, 2), np.float32))


def test_closing_twice_is_harmless(examples: Path) -> None:
    script = "import sys, penstock; m = penstock.load(sys.argv[1]); m.close(); m.close()"
    assert run_script(script, examples / "identity") == (0, "", "")


@pytest.mark.parametrize(
    "text",
    [
        "not a config",
        'backend: "nobody"' + NULL.replace('backend: "null"', ""),
        NULL + parameter("null.a_mss", "1"),
        NULL.replace('"null"', '"onnxruntime"'),
    ],
    ids=["syntax", "backend", "option", "no file"],
)
def test_a_broken_model_is_a_config_error_and_leaves_no_thread(tmp_path: Path, text: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        LocalModel(model_folder(tmp_path, text))
    assert started_since(before) == []


def test_a_file_that_onnx_runtime_refuses_is_a_config_error_and_leaves_no_thread(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    path = model_folder(tmp_path, NULL.replace('"null"', '"onnxruntime"'))
    write_identity(Path(path) / "1" / "model.onnx")
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="'x'.*x0"):
        LocalModel(path)
    assert started_since(before) == []


def test_a_script_may_end_without_closing_its_model(examples: Path) -> None:
    script = (
        "import sys, numpy, penstock; model = penstock.load(sys.argv[1]); "
        "print(model.infer(numpy.ones((1, 16), numpy.float32))['OUTPUT0'].sum())"
    )
    assert run_script(script, examples / "identity") == (0, "16.0\n", "")


# Requests made elsewhere


def null_request(sink: RecordingSink) -> Request:
    values = np.ones((1, 2), np.float32)
    return Request(sink, [from_array("x", "FP32", values)], time.monotonic())


def test_requests_of_ones_own_are_answered_through_their_sinks(tmp_path: Path) -> None:
    sinks = [RecordingSink() for _ in range(20)]
    with LocalModel(model_folder(tmp_path, NULL)) as model:
        for sink in sinks:
            model.send(null_request(sink))
        # Sent later, answered later: all before it are through.
        model.infer(np.zeros((1, 2), np.float32))
        statistics = model.statistics()
    assert [sink.num_final for sink in sinks] == [1] * 20
    assert all(np.array_equal(sink.outputs[0]["y"], [[1.0, 1.0]]) for sink in sinks)
    assert statistics["inference_stats"]["success"]["count"] == 21


def test_a_request_that_is_cancelled_is_told_so(tmp_path: Path) -> None:
    text = NULL + parameter("null.a_ms", "50")
    sinks = [RecordingSink() for _ in range(3)]
    with LocalModel(model_folder(tmp_path, text.replace("size: 4", "size: 1"))) as model:
        requests = [null_request(sink) for sink in sinks]
        for request in requests:
            model.send(request)
        model.cancel(requests[-1])
        model.infer(np.zeros((1, 2), np.float32))
        model.cancel(requests[0])
    assert [sink.num_final for sink in sinks] == [1, 1, 1]
    assert [sink.error for sink in sinks[:2]] == [None, None]
    assert isinstance(sinks[2].error, Cancelled)


def test_a_closed_model_takes_and_says_nothing(tmp_path: Path) -> None:
    model = LocalModel(model_folder(tmp_path, NULL))
    model.close()
    sink = RecordingSink()
    with pytest.raises(NotReady, match="is closed"):
        model.send(null_request(sink))
    with pytest.raises(NotReady, match="is closed"):
        model.statistics()
    model.cancel(null_request(sink))
    assert sink.num_final == 0


def test_a_model_of_the_gpus_is_placed_on_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "read_gpus", FakeGpus(1 << 30, 1 << 30))
    path = model_folder(tmp_path, NULL + "instance_group { kind: KIND_GPU }")
    with LocalModel(path) as model:
        assert model.config.devices == ("cuda:0", "cuda:1")
        np.testing.assert_array_equal(model.infer(np.ones((1, 2)))["y"], np.ones((1, 2)))
    monkeypatch.setattr(devices, "read_gpus", FakeGpus())
    with pytest.raises(ConfigError, match="no NVIDIA GPU is seen here"):
        LocalModel(path)


# Submitting


ECHO = NULL + "dynamic_batching { }"


@pytest.mark.parametrize("form", ["array", "dict", "strided", "float64", "list"])
@pytest.mark.parametrize("size", [2, 5000])
def test_the_caller_may_change_small_arrays_and_copies(
    tmp_path: Path, form: str, size: int
) -> None:
    text = (ECHO + parameter("null.a_ms", "20")).replace("[ 2 ]", f"[ {size} ]")
    with LocalModel(model_folder(tmp_path, text)) as model:
        futures = []
        array = np.empty((2, size), np.float64 if form == "float64" else np.float32)
        if form == "strided":
            array = np.empty((size, 2), array.dtype).T
        for number in range(8):
            array[:] = number
            inputs: object = array
            if form == "dict":
                inputs = {"x": array}
            elif form == "list":
                inputs = array.tolist()
            futures.append(model.submit(inputs, copy=size > 2))
            array[:] = -1
        for number, future in enumerate(futures):
            assert future.result(timeout=60)["y"].tolist() == [[number] * size] * 2


def test_a_transposed_array_is_read_in_its_order(tmp_path: Path) -> None:
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    with LocalModel(model_folder(tmp_path, ECHO)) as model:
        for _ in range(2):
            assert model.infer(array.T)["y"].tolist() == array.T.tolist()
            assert model.infer({"x": array[:, ::-1]})["y"].tolist() == array[:, ::-1].tolist()


def test_wrong_shapes_are_refused_each_time(digits: LocalModel) -> None:
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="image"):
            digits.infer(np.zeros((1, 1, 8, 9), np.float32))


def test_submit_may_be_called_while_it_closes(tmp_path: Path) -> None:
    """Each request is answered or refused; none is lost."""
    model = LocalModel(model_folder(tmp_path, ECHO))
    row, futures, ended = np.ones((1, 2), np.float32), [], []

    def send() -> None:
        try:
            while True:
                futures.append(model.submit(row))
        except NotReady as error:
            ended.append(error)

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    model.close()
    for thread in threads:
        thread.join(timeout=60)
    assert len(ended) == 3
    for future in futures:
        error = future.exception(timeout=60)
        assert error is None or isinstance(error, PenstockError)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=60),
    num_threads=st.integers(1, 4),
    cancelled=st.sets(st.integers(0, 59)),
)
def test_each_submit_gets_its_own_answer(
    echo: LocalModel, sizes: list[int], num_threads: int, cancelled: set[int]
) -> None:
    def send(index: int) -> tuple[np.ndarray, Future]:
        first = np.float32(1000 * index)
        array = first + np.arange(2 * sizes[index], dtype=np.float32).reshape(-1, 2)
        future = echo.submit({"x": array} if index % 2 else array)
        kept = array.copy()
        array[:] = -1
        if index in cancelled:
            future.cancel()
        return kept, future

    with ThreadPoolExecutor(num_threads) as threads:
        sent = list(threads.map(send, range(len(sizes))))
    for kept, future in sent:
        if not future.cancelled():
            np.testing.assert_array_equal(future.result(timeout=60)["y"], kept)


# Answers


# A batch starts when it is full, with 4 rows.
DELAYED = ECHO.replace("batching { }", "batching { max_queue_delay_microseconds: 60000000 }")


@pytest.mark.parametrize("size", [2, 5000])
def test_answers_of_one_batch_share_nothing_that_is_written(tmp_path: Path, size: int) -> None:
    text = DELAYED.replace("[ 2 ]", f"[ {size} ]")
    with LocalModel(model_folder(tmp_path, text)) as model:
        given = np.arange(4 * size, dtype=np.float32).reshape(4, size)
        futures = [model.submit(given[index : index + 1]) for index in range(4)]
        answers = [future.result(timeout=60)["y"] for future in futures]
        assert model.statistics()["execution_count"] == 1
        kept = given.copy()
        for index, answer in enumerate(answers):
            assert not np.shares_memory(answer, given)
            np.testing.assert_array_equal(answer, kept[index : index + 1])
            answer[:] = -1
        if size > 2:
            # Who keeps one answer does not keep the others.
            assert all(answer.base is None for answer in answers)


def test_sinks_of_both_kinds_may_share_a_batch(tmp_path: Path) -> None:
    sink = RecordingSink()
    with LocalModel(model_folder(tmp_path, DELAYED)) as model:
        futures = [model.submit(np.full((1, 2), number, np.float32)) for number in (1, 2)]
        tensor = from_array("x", "FP32", np.full((2, 2), 3, np.float32))
        model.send(Request(sink, [tensor], time.monotonic()))
        answers = [future.result(timeout=60)["y"].tolist() for future in futures]
        assert answers == [[[1, 1]], [[2, 2]]]
        assert model.statistics()["execution_count"] == 1
    assert sink.num_final == 1 and sink.outputs[0]["y"].tolist() == [[3, 3], [3, 3]]


def test_outputs_of_any_size_belong_to_the_caller(tmp_path: Path) -> None:
    text = ECHO.replace("[ 2 ]", "[ -1 ]")
    with LocalModel(model_folder(tmp_path, text)) as model:
        arrays = [np.full((1, size), size, np.float32) for size in (1, 3, 3, 9000)]
        futures = [model.submit(array) for array in arrays]
        for array, future in zip(arrays, futures, strict=True):
            answer = future.result(timeout=60)["y"]
            np.testing.assert_array_equal(answer, array)
            assert not np.shares_memory(answer, array)
            answer[:] = -1


def test_answers_may_wait_for_their_turn(tmp_path: Path) -> None:
    text = ECHO.replace("batching { }", "batching { preserve_ordering: true }")
    text += "instance_group { count: 2 }" + parameter("null.a_ms", "2")
    with LocalModel(model_folder(tmp_path, text)) as model:
        done: list[int] = []
        futures = []
        for number in range(40):
            future = model.submit(np.full((1, 2), number, np.float32))
            future.add_done_callback(lambda _, number=number: done.append(number))
            futures.append(future)
        answers = [future.result(timeout=60)["y"][0, 0] for future in futures]
        assert answers == list(range(40)) and sorted(done) == list(range(40))


@pytest.mark.parametrize("call", ["infer", "result", "exception", "statistics", "drift", "close"])
def test_blocking_calls_in_a_callback_are_refused(tmp_path: Path, call: str) -> None:
    raised: list[BaseException] = []
    called = threading.Event()

    def block(model: LocalModel, slow: Future[dict[str, np.ndarray]]) -> None:
        calls: dict[str, Callable[[], object]] = {
            "infer": lambda: model.infer(np.ones((1, 2), np.float32)),
            "result": lambda: slow.result(timeout=60),
            "exception": slow.exception,
            "statistics": model.statistics,
            "drift": model.drift,
            "close": model.close,
        }
        try:
            calls[call]()
        except Unsupported as error:
            raised.append(error)
        called.set()

    with LocalModel(model_folder(tmp_path, NULL + parameter("null.a_ms", "100"))) as model:
        first = model.submit(np.ones((1, 2), np.float32))
        later = model.submit(np.full((1, 2), 5, np.float32))
        first.add_done_callback(lambda _: block(model, later))
        assert called.wait(60)
        assert [str(error).split()[0] for error in raised] == [f"{call}()"]
        # The model still answers, and so does a submit in a callback.
        assert later.result(timeout=60)["y"].tolist() == [[5, 5]]
        chained: Future[dict[str, np.ndarray]] = Future()
        model.submit(np.ones((1, 2), np.float32)).add_done_callback(
            lambda done: model.submit(done.result()["y"] + 1).add_done_callback(
                lambda last: chained.set_result(last.result())
            )
        )
        assert chained.result(timeout=60)["y"].tolist() == [[2, 2]]


def test_the_number_of_instances_does_not_follow_the_load(tmp_path: Path) -> None:
    """Instances are threads of the caller's process."""
    limits = parameter("penstock.min_instances", "0") + parameter("penstock.max_instances", "3")
    config = f"{NULL}instance_group {{ count: 2 kind: KIND_CPU }}\n{limits}"
    with LocalModel(model_folder(tmp_path, config)) as model:
        assert (model.config.num_instances, model.config.max_instances) == (2, 2)
        assert not model.config.is_scaled
