"""Write the `identity` model: one ONNX node that returns its 16 floats unchanged.

It computes nothing, so what a client measures against it is the server itself.
"""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

REPOSITORY = Path(__file__).resolve().parent / "repository"


def identity_model() -> onnx.ModelProto:
    def tensor(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 16])

    node = helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])
    graph = helper.make_graph([node], "identity", [tensor("INPUT0")], [tensor("OUTPUT0")])
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, ir_version=9, opset_imports=[opset], producer_name="penstock")


def main() -> None:
    model = identity_model()
    onnx.checker.check_model(model, full_check=True)
    path = REPOSITORY / "identity" / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
