"""What changes for a Triton repository: one line each, only where it does."""

from pathlib import Path

from penstock.config import ModelConfig
from penstock.export import from_triton
from penstock.repository import pbtxt

TENSORS = """
max_batch_size: 8
input { name: "x" data_type: TYPE_%s dims: %s }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


def resolve(text: str, root: Path, datatype: str = "FP32", dims: str = "4") -> ModelConfig:
    version = root / "net" / "1"
    version.mkdir(parents=True, exist_ok=True)
    for name in ("model.onnx", "model.py"):
        (version / name).write_bytes(b"")
    text += TENSORS % (datatype, dims) + " instance_group { kind: KIND_CPU count: 2 }"
    return pbtxt.resolve(pbtxt.parse(text), "net", version)


def told(config: ModelConfig) -> str:
    return "; ".join(from_triton.differences(config))


def test_a_plain_model_has_no_differences(tmp_path: Path):
    config = resolve('backend: "onnxruntime"', tmp_path)
    assert told(config) == ""
    assert from_triton.describe(config) == ("onnxruntime; instances: 2 on cpu; each request alone")


def test_batches_wait_for_a_limited_time_and_shapes_apart(tmp_path: Path):
    config = resolve('backend: "onnxruntime" dynamic_batching { }', tmp_path, dims="-1")
    assert "parameters.penstock.max_wait_ms 0 restores Triton's unbounded queue" in told(config)
    assert from_triton.ALONE in told(config)
    assert from_triton.describe(config).endswith("batches of up to 8")
    limit = 'parameters { key: "penstock.max_wait_ms" value { string_value: "0" } }'
    assert "max_wait_ms" not in told(
        resolve('backend: "onnxruntime" dynamic_batching { }' + limit, tmp_path)
    )


def test_texts_and_python_models_have_their_own(tmp_path: Path):
    config = resolve('backend: "onnxruntime"', tmp_path, datatype="STRING")
    assert "texts that are not UTF-8 are refused" in told(config)
    assert "an instance that crashes is started again" in told(
        resolve('backend: "python"', tmp_path)
    )


def test_environments_of_their_own_are_refused_before_the_load(tmp_path: Path):
    key = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "env.tar.gz" } }'
    assert from_triton.refusals(resolve('backend: "python"', tmp_path)) == []
    [refused] = from_triton.refusals(resolve('backend: "python"' + key, tmp_path))
    assert refused.startswith("parameters.EXECUTION_ENV_PATH: ")
