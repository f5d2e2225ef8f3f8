"""The example of a kernel of one's own: it gives what torch gives, and is served. On a GPU for
real, on a CPU interpreted, without Triton by torch's operators."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, backend
from penstock.repository import layout

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "own_kernel"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("own_kernel_module", FOLDER / "module.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 256), (5, 100), (2, 3, 31)])
def test_the_kernel_gives_what_torch_gives(module, dtype, shape):
    if module.triton is None:
        pytest.skip("there is no Triton")
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator).to(DEVICE, dtype)
    with torch.inference_mode():
        found = module.by_kernel(x, residual.transpose(0, -1).transpose(0, -1), weight, 1e-6)
        wanted = module.by_torch(x, residual, weight, 1e-6)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_the_model_is_made_and_served(tmp_path, module):
    command = [sys.executable, str(FOLDER / "make.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (config,) = layout.read(tmp_path / "own_kernel").configs
    runner = backend("pytorch")(config)
    rows = np.random.default_rng(2).standard_normal((3, module.WIDTH)).astype(np.float32)
    (outputs,) = runner.start(Batch({"x": rows}, 3)).wait()
    torch.manual_seed(0)
    plain = module.factory()
    x = torch.from_numpy(rows)
    with torch.inference_mode():
        for layer, norm in zip(plain.layers, plain.norms, strict=True):
            x = module.by_torch(torch.nn.functional.gelu(layer(x)), x, norm.weight, norm.epsilon)
    np.testing.assert_allclose(outputs["y"], x.numpy(), atol=1e-3)
