"""What every backend must do, as tests (`penstock.backends` states it in words).

A backend's test class inherits `BackendContract`, and `ArtifactContract` as well if it loads a
file, and provides the configurations that they ask for.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, Outputs, Runner, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import PenstockError
from penstock.types import DATATYPES, Array, TensorSpec, pack_bytes

MAX_BATCH = 5


def model_config(
    backend_name: str,
    artifact: Path | str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int = MAX_BATCH,
    options: dict[str, str] | None = None,
) -> ModelConfig:
    return ModelConfig(
        name="model",
        version="1",
        backend=backend_name,
        artifact=str(artifact),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        max_batch_size=max_batch_size,
        batching=BatchPolicy(max(1, max_batch_size)),
        options=options or {},
    )


def echo_specs(
    datatype: str, row_shape: Sequence[int], num_tensors: int = 1
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """x0 to y0, x1 to y1, ..., all of the same kind."""
    numbers = range(num_tensors)
    inputs = [TensorSpec(f"x{i}", datatype, tuple(row_shape)) for i in numbers]
    return inputs, [TensorSpec(f"y{i}", datatype, tuple(row_shape)) for i in numbers]


def values(datatype: str, shape: Sequence[int], seed: int = 0) -> Array:
    """Any bits that the datatype can hold: extremes, NaN and infinities included. Read-only, as in
    a worker."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if datatype == "BYTES":
        words = [b"", b"a", "é".encode(), b"longer than eight bytes", b"\t\n 0"]
        array = np.array([words[i] for i in generator.integers(0, len(words), count)], object)
    elif datatype == "BOOL":
        array = generator.integers(0, 2, count).astype(np.bool_)
    else:
        dtype = DATATYPES[datatype].numpy
        array = np.frombuffer(generator.bytes(count * dtype.itemsize), dtype).copy()
    array = array.reshape(tuple(shape))
    array.flags.writeable = False
    return array


def assert_same(actual: Array, expected: Array, datatype: str) -> None:
    """Bit for bit, with the datatype's own dtype."""
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == DATATYPES[datatype].numpy
    assert actual.shape == expected.shape
    if datatype == "BYTES":
        assert pack_bytes(actual) == pack_bytes(expected)
    else:
        assert actual.tobytes() == expected.tobytes()


def run(runner: Runner, inputs: dict[str, Array], num_rows: int) -> Outputs:
    """The one answer to a batch."""
    [outputs] = runner.start(Batch(inputs, num_rows)).wait()
    return outputs


class BackendContract:
    """Inherit, set `backend_name`, and implement the two methods that raise here."""

    backend_name: str

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        """A model that gives back x0 as y0, x1 as y1, ... It may skip what its library lacks."""
        raise NotImplementedError

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        """A model, a batch on which it raises, and a batch that it answers."""
        raise NotImplementedError

    def load(self, config: ModelConfig) -> Runner:
        return backend(self.backend_name)(config)

    def test_load_gives_a_runner(self, tmp_path: Path) -> None:
        runner = self.load(self.echo_config(tmp_path))
        assert runner.needs_requests in (True, False)
        assert callable(runner.start)
        assert callable(runner.close)
        runner.close()

    def test_declared_tensors_are_none_or_the_configured_ones_with_their_batch_dimension(
        self, tmp_path: Path
    ) -> None:
        config = self.echo_config(tmp_path, num_tensors=2)
        runner = self.load(config)
        for declared, configured in (
            (runner.inputs, config.inputs),
            (runner.outputs, config.outputs),
        ):
            if declared:
                assert [(spec.name, spec.datatype, tuple(spec.shape)) for spec in declared] == [
                    (spec.name, spec.datatype, (-1, *spec.shape)) for spec in configured
                ]

    def test_built_says_in_text_what_was_made(self, tmp_path: Path) -> None:
        """Plain text: it travels in a frame, and subclasses of str do not."""
        built = self.load(self.echo_config(tmp_path)).built()
        assert all(type(text) is str for item in built.items() for text in item)

    @pytest.mark.parametrize("num_rows", [1, 2, MAX_BATCH])
    @pytest.mark.parametrize("num_tensors", [1, 3])
    def test_answer_is_exactly_the_configured_outputs(
        self, tmp_path: Path, num_rows: int, num_tensors: int
    ) -> None:
        config = self.echo_config(tmp_path, "FP32", (3, 2), num_tensors=num_tensors)
        inputs = {
            spec.name: values("FP32", (num_rows, 3, 2), seed)
            for seed, spec in enumerate(config.inputs)
        }
        outputs = run(self.load(config), inputs, num_rows)
        assert set(outputs) == {spec.name for spec in config.outputs}
        for source, target in zip(config.inputs, config.outputs, strict=True):
            assert_same(outputs[target.name], inputs[source.name], "FP32")

    @pytest.mark.parametrize("datatype", DATATYPES)
    def test_every_datatype_comes_back_bit_for_bit(self, tmp_path: Path, datatype: str) -> None:
        runner = self.load(self.echo_config(tmp_path, datatype))
        array = values(datatype, (MAX_BATCH, 3))
        assert_same(run(runner, {"x0": array}, MAX_BATCH)["y0"], array, datatype)

    @pytest.mark.parametrize("datatype", DATATYPES)
    def test_rows_in_several_pieces_are_the_same_as_in_one(
        self, tmp_path: Path, datatype: str
    ) -> None:
        runner = self.load(self.echo_config(tmp_path, datatype))
        pieces = [{"x0": values(datatype, (count, 3), count)} for count in (1, 3, 1)]
        [outputs] = runner.start(Batch.of(pieces, MAX_BATCH)).wait()
        whole = np.concatenate([piece["x0"] for piece in pieces])
        assert_same(outputs["y0"], whole, datatype)
        whole.flags.writeable = False
        assert_same(run(runner, {"x0": whole}, MAX_BATCH)["y0"], whole, datatype)

    @pytest.mark.parametrize("length", [1, 7])
    def test_variable_dimension_takes_any_size(self, tmp_path: Path, length: int) -> None:
        runner = self.load(self.echo_config(tmp_path, "INT64", (-1, 2)))
        array = values("INT64", (2, length, 2))
        assert_same(run(runner, {"x0": array}, 2)["y0"], array, "INT64")

    @pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
    def test_model_without_batch_dimension_gets_no_extra_dimension(
        self, tmp_path: Path, datatype: str
    ) -> None:
        runner = self.load(self.echo_config(tmp_path, datatype, (2, 3), max_batch_size=0))
        array = values(datatype, (2, 3))
        assert_same(run(runner, {"x0": array}, 1)["y0"], array, datatype)

    def test_inputs_are_found_by_name_whatever_their_order(self, tmp_path: Path) -> None:
        runner = self.load(self.echo_config(tmp_path, num_tensors=2))
        inputs = {"x1": values("FP32", (2, 3), 1), "x0": values("FP32", (2, 3), 0)}
        outputs = run(runner, inputs, 2)
        assert_same(outputs["y0"], inputs["x0"], "FP32")
        assert_same(outputs["y1"], inputs["x1"], "FP32")

    @pytest.mark.parametrize("datatype", ["BOOL", "INT32", "FP16", "FP32", "BYTES"])
    @pytest.mark.parametrize("is_writeable", [True, False])
    def test_inputs_are_not_modified(
        self, tmp_path: Path, datatype: str, is_writeable: bool
    ) -> None:
        runner = self.load(self.echo_config(tmp_path, datatype))
        array = values(datatype, (2, 3)).copy()
        before = array.copy()
        array.flags.writeable = is_writeable
        run(runner, {"x0": array}, 2)
        assert_same(array, before, datatype)

    def test_input_may_be_a_view_of_some_rows_of_a_larger_buffer(self, tmp_path: Path) -> None:
        runner = self.load(self.echo_config(tmp_path))
        rows = values("FP32", (MAX_BATCH, 3))[1:3]
        assert_same(run(runner, {"x0": rows}, 2)["y0"], rows, "FP32")

    def test_answers_of_two_runs_share_no_memory(self, tmp_path: Path) -> None:
        runner = self.load(self.echo_config(tmp_path))
        arrays = [values("FP32", (MAX_BATCH, 3), seed) for seed in range(2)]
        first, second = (run(runner, {"x0": array}, MAX_BATCH)["y0"] for array in arrays)
        assert not np.shares_memory(first, second)
        assert_same(first, arrays[0], "FP32")
        assert_same(second, arrays[1], "FP32")

    def test_two_runners_of_one_model_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        config = self.echo_config(tmp_path)
        one, other = self.load(config), self.load(config)
        array = values("FP32", (2, 3))
        run(one, {"x0": array}, 2)
        one.close()
        assert_same(run(other, {"x0": array}, 2)["y0"], array, "FP32")

    def test_an_error_of_the_model_raises_and_the_next_batch_runs(self, tmp_path: Path) -> None:
        config, bad, good = self.failing_model(tmp_path)
        runner = self.load(config)
        for _ in range(2):
            with pytest.raises(Exception, match=r"\w"):
                list(runner.start(bad).wait())
            [outputs] = runner.start(good).wait()
            assert set(outputs) == {spec.name for spec in config.outputs}

    def test_batches_of_changing_size_are_answered_one_after_the_other(
        self, tmp_path: Path
    ) -> None:
        runner = self.load(self.echo_config(tmp_path))
        for seed, num_rows in enumerate([1, MAX_BATCH, 2, 1, MAX_BATCH]):
            array = values("FP32", (num_rows, 3), seed)
            assert_same(run(runner, {"x0": array}, num_rows)["y0"], array, "FP32")


class MakeFileWhenUnpickled:
    """A canary: whoever unpickles it creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.timeout(30)
class ArtifactContract:
    """For backends that load a file: whatever the file holds, load ends, and with our error."""

    backend_name: str

    def good_artifact(self, folder: Path) -> Path:
        """A small file that `artifact_config` loads."""
        raise NotImplementedError

    def artifact_config(self, artifact: Path) -> ModelConfig:
        """The configuration that fits `good_artifact`, with this file in its place."""
        raise NotImplementedError

    def refused(self, artifact: Path) -> str:
        with pytest.raises(PenstockError) as caught:
            backend(self.backend_name)(self.artifact_config(artifact))
        text = str(caught.value)
        assert artifact.name in text, f"does not say which file: {text}"
        assert len(text.splitlines()) == 1
        return text

    def test_good_artifact_loads(self, tmp_path: Path) -> None:
        artifact = self.good_artifact(tmp_path)
        backend(self.backend_name)(self.artifact_config(artifact)).close()

    def test_missing_artifact_is_refused(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nowhere.bin")

    def test_folder_in_place_of_the_artifact_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder.bin"
        folder.mkdir()
        self.refused(folder)

    def test_empty_artifact_is_refused(self, tmp_path: Path) -> None:
        artifact = tmp_path / "empty.bin"
        artifact.touch()
        self.refused(artifact)

    def test_truncated_artifact_is_refused_wherever_it_ends(self, tmp_path: Path) -> None:
        whole = self.good_artifact(tmp_path).read_bytes()
        step = max(1, len(whole) // 256)
        artifact = tmp_path / "truncated.bin"
        for size in {*range(1, len(whole), step), len(whole) - 1}:
            artifact.write_bytes(whole[:size])
            self.refused(artifact)

    @pytest.mark.parametrize(
        "content",
        [b"\0" * 4096, b"\xff" * 4096, b"not a model\n", np.random.default_rng(0).bytes(65536)],
        ids=["zeros", "ones", "text", "random"],
    )
    def test_garbage_is_refused(self, tmp_path: Path, content: bytes) -> None:
        artifact = tmp_path / "garbage.bin"
        artifact.write_bytes(content)
        self.refused(artifact)

    def test_nothing_is_ever_unpickled(self, tmp_path: Path) -> None:
        canary, artifact = tmp_path / "canary", tmp_path / "pickle.bin"
        artifact.write_bytes(pickle.dumps(MakeFileWhenUnpickled(canary)))
        self.refused(artifact)
        assert not canary.exists()

    def test_a_refused_artifact_does_not_spoil_the_next_load(self, tmp_path: Path) -> None:
        self.test_empty_artifact_is_refused(tmp_path)
        self.test_good_artifact_loads(tmp_path)
