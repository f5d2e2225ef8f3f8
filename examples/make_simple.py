"""Write the `simple` model: the sum and the difference of two vectors of 16 integers.

It has the tensors of the model that Triton's own client examples ask, so those run against it.
"""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

REPOSITORY = Path(__file__).resolve().parent / "repository"


def simple_model() -> onnx.ModelProto:
    def tensors(*names: str) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, TensorProto.INT32, ["batch", 16]) for name in names
        ]

    inputs = ["INPUT0", "INPUT1"]
    nodes = [
        helper.make_node("Add", inputs, ["OUTPUT0"]),
        helper.make_node("Sub", inputs, ["OUTPUT1"]),
    ]
    graph = helper.make_graph(nodes, "simple", tensors(*inputs), tensors("OUTPUT0", "OUTPUT1"))
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, ir_version=9, opset_imports=[opset], producer_name="penstock")


def main() -> None:
    model = simple_model()
    onnx.checker.check_model(model, full_check=True)
    path = REPOSITORY / "simple" / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
