"""What a GPU's engine would refuse is found without a GPU, and told by `penstock inspect`."""

import onnx
import pytest
from onnx import TensorProto, helper

import penstock

PARAMETER = 'parameters { key: "%s" value { string_value: "%s" } }\n'
ON_GPU = 'backend: "onnxruntime" max_batch_size: 8 instance_group { kind: KIND_GPU }\n'


def add_model(repository, text, domain="", op_type="Relu"):
    folder = repository / "m"
    (folder / "1").mkdir(parents=True)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y"))
    node = helper.make_node(op_type, ["x"], ["y"], domain=domain)
    domains = [helper.make_opsetid(name, 17) for name in dict.fromkeys(("", domain))]
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=domains, ir_version=9
    )
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"penstock.fuse": "convs"}, "parameters.penstock.fuse: 'convs' is not one of"),
        (
            {"penstock.gpu_engine": "onnxruntime", "penstock.dtype": "fp16"},
            "parameters.penstock.dtype: 'fp16': ONNX Runtime computes in the file's datatypes",
        ),
        (
            {"penstock.gpu_engine": "onnxruntime", "providers": "ROCMExecutionProvider"},
            "parameters.providers: 'ROCMExecutionProvider'; expected one that uses a GPU",
        ),
        (
            {"penstock.fuse": "on", "penstock.compile": "default"},
            "parameters.penstock.fuse: not together with penstock.compile",
        ),
        (
            {"penstock.dtype": "fp16", "penstock.keep_fp32": "nope"},
            "parameters.penstock.keep_fp32: ",
        ),
    ],
)
def test_options_are_refused(tmp_path, options, problem):
    pytest.importorskip("torch")
    text = ON_GPU + "".join(PARAMETER % pair for pair in options.items())
    found = penstock.inspect(add_model(tmp_path, text))
    assert not found.models
    assert any(problem in each for each in found.problems["m"]), found.problems


def test_providers_that_are_not_installed_are_refused_on_the_cpu_too(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    text = 'backend: "onnxruntime" max_batch_size: 8\n'
    lacking = add_model(tmp_path, text + PARAMETER % ("providers", "ROCMExecutionProvider"))
    assert "ROCMExecutionProvider" not in onnxruntime.get_available_providers()
    (problem,) = penstock.inspect(lacking).problems["m"]
    assert problem.startswith("parameters.providers: ROCMExecutionProvider not in this build of")
    usual = PARAMETER % ("providers", "CPUExecutionProvider")
    (lacking / "config.pbtxt").write_text(text + usual)
    assert not penstock.inspect(lacking).problems


def test_an_operator_that_no_engine_has_is_refused(tmp_path):
    pytest.importorskip("torch")
    found = penstock.inspect(add_model(tmp_path, ON_GPU, "acme", "Frobnicate"))
    assert "operator acme.Frobnicate" in found.problems["m"][0]


def test_a_model_that_would_load_has_no_problems(tmp_path):
    text = ON_GPU + PARAMETER % ("penstock.dtype", "fp16")
    found = penstock.inspect(add_model(tmp_path, text))
    assert not found.problems and len(found.models) == 1


def test_a_plan_on_a_cpu_is_refused(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.plan").write_bytes(b"plan")
    tensors = 'put { name: "%s" data_type: TYPE_FP32 dims: 3 }\n'
    text = f"in{tensors % 'x'}out{tensors % 'y'}instance_group {{ kind: KIND_CPU }}"
    (tmp_path / "m" / "config.pbtxt").write_text(f'platform: "tensorrt_plan"\n{text}')
    (problem,) = penstock.inspect(tmp_path / "m").problems["m"]
    kind = "instance_group[0].kind: KIND_CPU"
    assert problem == f"{kind}, but a TensorRT plan runs on a GPU; expected KIND_GPU"
