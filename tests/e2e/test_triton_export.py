"""Exported Python models in a real Triton 2.51: loaded, and answered like the originals here.

Missing tools fail: `make verify-triton` is there to see that it works.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from exported_models import MODELS, add_models, inputs_of, triton_inputs_of
from real_triton import Oracle, triton

import penstock
from penstock.api.export_triton import export_triton

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"
TYPES = {np.dtype(np.float32): "FP32", np.dtype(np.float64): "FP64", np.dtype(np.int64): "INT64"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals") / "models"
    add_models(root)
    shutil.copytree(EXAMPLES / "text_length", root / "text_length")
    return root


@pytest.fixture(scope="module")
def oracle(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    out = tmp_path_factory.mktemp("exported") / "models"
    assert export_triton(str(originals), str(out)).problems == []
    # Its stub has numpy of the interpreter, and nothing of Penstock.
    with triton(out, tmp_path_factory.mktemp("triton"), is_required=True) as running:
        yield running


def ask(oracle: Oracle, name: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = []
    for key, array in inputs.items():
        tensor = httpclient.InferInput(key, list(array.shape), TYPES.get(array.dtype, "BYTES"))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    with httpclient.InferenceServerClient(f"127.0.0.1:{oracle.port}") as client:
        answer = client.infer(name, tensors)
        return {
            each["name"]: answer.as_numpy(each["name"]) for each in answer.get_response()["outputs"]
        }


@pytest.mark.parametrize("name", MODELS)
def test_triton_answers_like_penstock(oracle: Oracle, originals: Path, name: str) -> None:
    inputs = inputs_of(name)
    with penstock.load(str(originals / name)) as model:
        expected = model.infer(inputs)
    found = ask(oracle, name, triton_inputs_of(name))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].ravel().tolist() == values.ravel().tolist()


def test_requests_together_get_their_own_answers(oracle: Oracle) -> None:
    with httpclient.InferenceServerClient(f"127.0.0.1:{oracle.port}", concurrency=8) as client:
        pending = []
        for number in range(16):
            x = np.full((1, 3), number, np.float32)
            tensor = httpclient.InferInput("x", [1, 3], "FP32")
            tensor.set_data_from_numpy(x)
            pending.append(client.async_infer("arrays", [tensor]))
        answers = [each.get_result().as_numpy("y").tolist() for each in pending]
    assert answers == [[[3.0 * number] * 3] for number in range(16)]
