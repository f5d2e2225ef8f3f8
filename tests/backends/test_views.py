"""A model behind `reshape` and ragged inputs, with ONNX Runtime inside."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from penstock.backends import Batch, PerRequest, Runner, backend
from penstock.backends.views import fill_shape
from penstock.config import BatchInput, BatchOutput, BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.repository import onnx_file
from penstock.serving.proof import prove
from penstock.types import TensorSpec

ROWS = """
<ir_version: 8, opset_import: ["" : 17]>
rows (float[N, 2, 3] x, float[N] scale) => (float[N, 6] y, float[N] total)
<int64[2] flat = {-1, 6}, int64[2] column = {-1, 1}, int64[1] last = {1}>
{
    flattened = Reshape (x, flat)
    factor = Reshape (scale, column)
    y = Mul (flattened, factor)
    total = ReduceSum <keepdims = 0> (y, last)
}
"""
RAGGED = """
<ir_version: 8, opset_import: ["" : 17]>
ragged (float[M] x, int32[K] counts, float[N, 2] w) => (float[M] doubled, float[N, 2] same)
{
    doubled = Add (x, x)
    wide = Cast <to = 1> (counts)
    most = ReduceMax <keepdims = 0> (wide)
    same = Mul (w, most)
}
"""


def model(folder: Path, text: str, **changes: object) -> ModelConfig:
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    config = ModelConfig(
        name="model",
        version="1",
        backend="onnxruntime",
        artifact=str(path),
        inputs=(),
        outputs=(),
        max_batch_size=8,
        batching=BatchPolicy(8, is_dynamic=True),
    )
    return replace(config, **changes)


@pytest.fixture
def rows(tmp_path: Path) -> ModelConfig:
    return model(
        tmp_path,
        ROWS,
        inputs=(
            TensorSpec("x", "FP32", (6,), reshape=(2, 3)),
            TensorSpec("scale", "FP32", (1,), reshape=()),
        ),
        outputs=(
            TensorSpec("y", "FP32", (3, 2), reshape=(6,)),
            TensorSpec("total", "FP32", (1, 1), reshape=()),
        ),
    )


@pytest.fixture
def ragged(tmp_path: Path) -> ModelConfig:
    return model(
        tmp_path,
        RAGGED,
        inputs=(
            TensorSpec("x", "FP32", (-1,), is_ragged=True),
            TensorSpec("w", "FP32", (2,)),
        ),
        outputs=(TensorSpec("doubled", "FP32", (-1,)), TensorSpec("same", "FP32", (2,))),
        batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("counts",), "INT32", "x"),),
        batch_outputs=(BatchOutput(("doubled",), "x"),),
    )


def run(runner: Runner, pieces: list[dict[str, np.ndarray]]) -> object:
    num_rows = sum(len(next(iter(piece.values()))) for piece in pieces)
    [answer] = runner.start(Batch.of(pieces, num_rows)).wait()
    return answer


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def test_the_model_sees_its_own_shapes_and_the_client_the_dims(rows: ModelConfig):
    runner = backend("onnxruntime")(rows)
    x, scale = floats(4, 6), floats(4, 1)
    for cut in (4, 1):
        pieces = [{"x": x[:cut], "scale": scale[:cut]}, {"x": x[cut:], "scale": scale[cut:]}]
        answer = run(runner, [piece for piece in pieces if len(piece["x"])])
        assert np.array_equal(answer["y"], (x * scale).reshape(4, 3, 2))
        assert np.array_equal(answer["total"], (x * scale).sum(1).reshape(4, 1, 1))


def test_a_model_with_other_shapes_is_proved_to_be_batched(rows: ModelConfig):
    proof = prove(rows, backend("onnxruntime")(rows))
    assert (proof.unbatched, proof.notes) == ("", ())


def test_a_file_that_does_not_fit_the_reshape_is_refused(rows: ModelConfig):
    inputs = (replace(rows.inputs[0], reshape=(3, 2)), rows.inputs[1])
    with pytest.raises(ConfigError, match=r"input 'x': configured as \[-1, 3, 2\]"):
        backend("onnxruntime")(replace(rows, inputs=inputs))


def test_ragged_requests_are_one_for_the_model(ragged: ModelConfig):
    runner = backend("onnxruntime")(ragged)
    pieces = [{"x": floats(1, 2), "w": floats(1, 2)}, {"x": floats(2, 3), "w": floats(2, 2)}]
    answer = run(runner, pieces)
    assert isinstance(answer, PerRequest)
    for piece, found in zip(pieces, answer.answers, strict=True):
        assert np.array_equal(found["doubled"], 2 * piece["x"])
        # The largest count is that of the second request, with all its rows.
        assert np.array_equal(found["same"], 6 * piece["w"])


def test_rows_of_ragged_requests_are_not_tried_apart(ragged: ModelConfig):
    proof = prove(ragged, backend("onnxruntime")(ragged))
    assert proof.unbatched == ""
    assert "it gets the requests of a batch as one" in proof.notes[0]


def test_variable_dimensions_keep_their_order():
    assert fill_shape((8, -1, 1, -1), (2, 4, -1, -1), (2, 4, 5, 6)) == (8, 5, 1, 6)
    assert fill_shape((), (1,), (1,)) == ()


SCALARS = """
<ir_version: 8, opset_import: ["" : 17]>
scalars (float x, float[1] one) => (float y, float[1] both)
{
    y = Identity (x)
    both = Add (x, one)
}
"""


@pytest.mark.parametrize("dims", [(1,), (1, 1)])
def test_dims_of_ones_are_what_the_file_has_without_dimensions(
    tmp_path: Path, dims: tuple[int, ...]
):
    inputs = TensorSpec("x", "FP32", dims), TensorSpec("one", "FP32", (1,))
    outputs = TensorSpec("y", "FP32", dims), TensorSpec("both", "FP32", (1,))
    config = model(tmp_path, SCALARS, inputs=inputs, outputs=outputs, max_batch_size=0)
    runner = backend(config.backend)(config)
    given = {"x": np.full(dims, 7, np.float32), "one": np.array([3], np.float32)}
    (answer,) = runner.start(Batch(given, 1)).wait()
    assert answer["y"].shape == dims and answer["y"].item() == 7
    assert answer["both"].shape == (1,) and answer["both"].item() == 10


def test_other_dims_than_ones_are_refused_for_a_scalar(tmp_path: Path):
    specs = TensorSpec("one", "FP32", (1,)), TensorSpec("both", "FP32", (1,))
    for inputs, outputs in (
        ((TensorSpec("x", "FP32", (2,)), specs[0]), (specs[1],)),
        ((TensorSpec("x", "FP32", (-1,)), specs[0]), (specs[1],)),
    ):
        config = model(tmp_path, SCALARS, inputs=inputs, outputs=outputs, max_batch_size=0)
        with pytest.raises(ConfigError, match="input 'x': configured as"):
            backend(config.backend)(config)


def test_a_scalar_has_no_rows(tmp_path: Path):
    inputs = TensorSpec("x", "FP32", (1,)), TensorSpec("one", "FP32", (1,))
    config = model(tmp_path, SCALARS, inputs=inputs, outputs=(TensorSpec("y", "FP32", (1,)),))
    with pytest.raises(ConfigError, match="input 'x': configured as"):
        backend(config.backend)(config)


def test_a_tensor_without_a_declared_shape_is_no_scalar(tmp_path: Path):
    path = tmp_path / "model.onnx"
    parsed = onnx.parser.parse_model(SCALARS)
    parsed.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(parsed, path)
    assert onnx_file.find_scalars(path) == {"x"}
