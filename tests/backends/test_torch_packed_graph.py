"""Encoders of ONNX files are packed: as exporters and ONNX Runtime's optimiser write them, compared
with ONNX Runtime row by row; what is no such encoder is refused by the node that does not match."""

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.errors import ConfigError
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from penstock.backends.pytorch import load_module  # noqa: E402

NAMES = ("input_ids", "attention_mask", "token_type_ids")
LENGTH = 32
PACKED = {"penstock.pack": "tokens"}


def export(
    path: Path,
    attention: str,
    *,
    kind: str = "Bert",
    activation: str = "gelu",
    by_dynamo: bool = False,
    has_mask: bool = True,
) -> Path:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=120, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=80, hidden_act=activation,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    module = getattr(transformers, f"{kind}Model")(config).eval()
    for weight in module.parameters():
        # So that layers matter, and a norm or bias that is forgotten shows.
        weight.data += 0.2 * torch.randn_like(weight)

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids, mask, kinds):
            given = mask if has_mask else None
            found = self.module(ids, attention_mask=given, token_type_ids=kinds).last_hidden_state
            return found if has_mask else found * mask[..., None]

    sizes = {0: "n", 1: "s"}
    how: dict[str, object] = {"dynamic_axes": {name: sizes for name in (*NAMES, "y")}}
    if by_dynamo:
        num, length = torch.export.Dim("n"), torch.export.Dim("s", max=80)
        how = {"dynamic_shapes": [{0: num, 1: length} for _ in NAMES], "verbose": False}
    ids = torch.randint(1, 120, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Tokens(), (ids, mask, torch.zeros_like(ids)), str(path), dynamo=by_dynamo,
            input_names=list(NAMES), output_names=["y"], opset_version=18 if by_dynamo else 17,
            **how,
        )  # fmt: skip
    return path


def optimised(path: Path) -> Path:
    """As ONNX Runtime's optimiser for BERT rewrites it."""
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    logging.disable(logging.WARNING)
    try:
        made = optimizer.optimize_model(
            str(path), model_type="bert", num_heads=4, hidden_size=64, opt_level=0
        )
    finally:
        logging.disable(logging.NOTSET)
    made.save_model_to_file(str(path.with_stem("optimised")))
    return path.with_stem("optimised")


def served(path: Path, **options: str) -> ModelConfig:
    return ModelConfig(
        name="encoder",
        version="1",
        backend="pytorch",
        artifact=str(path),
        inputs=tuple(TensorSpec(name, "INT64", (-1,)) for name in NAMES),
        outputs=(TensorSpec("y", "FP32", (-1, 64)),),
        max_batch_size=16,
        batching=BatchPolicy(16, is_dynamic=True),
        padding=Padding(tuple(PadAxis(name, 0) for name in NAMES), (LENGTH,)),
        options=options,
    )


def texts(*lengths: int, seed: int = 0):
    random = np.random.default_rng(seed)
    mask = (np.arange(LENGTH)[None, :] < np.array(lengths)[:, None]).astype(np.int64)
    kinds = random.integers(0, 2, mask.shape) * mask
    return dict(zip(NAMES, (random.integers(1, 120, mask.shape) * mask, mask, kinds), strict=True))


def answer(runner, inputs):
    (found,) = runner.start(Batch(inputs, len(inputs["attention_mask"]))).wait()
    return found["y"].copy()


def by_onnx_runtime(path: Path, inputs):
    """Each row by itself, without its padding."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rows = []
    for row in range(len(inputs["attention_mask"])):
        length = int(inputs["attention_mask"][row].sum())
        given = {name: array[row : row + 1, :length] for name, array in inputs.items()}
        rows.append(session.run(None, given)[0][0])
    return rows


def check(path: Path, original: Path) -> None:
    runner = backend("pytorch")(served(path, **PACKED))
    assert runner.built()["pack"] == "tokens: 3 layers"
    for lengths in ((32, 1, 7, 20), (5,), (32, 32)):
        inputs = texts(*lengths, seed=len(lengths))
        found = answer(runner, inputs)
        for row, wanted in enumerate(by_onnx_runtime(original, inputs)):
            np.testing.assert_allclose(found[row, : len(wanted)], wanted, atol=1e-4)
            assert not found[row, len(wanted) :].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_exported_encoders_are_packed(tmp_path: Path, attention, activation) -> None:
    path = export(tmp_path / "model.onnx", attention, activation=activation)
    check(path, path)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_encoders_of_the_newer_exporter_are_packed(tmp_path: Path, attention) -> None:
    """It transposes keys as a batch of matrices."""
    pytest.importorskip("onnxscript")
    path = export(
        tmp_path / "model.onnx", attention, activation="gelu_pytorch_tanh", by_dynamo=True
    )
    check(path, path)


def test_attention_without_a_mask_is_known_and_refused(tmp_path: Path) -> None:
    """Padded tokens take part in it, which packed ones cannot."""
    path = export(tmp_path / "model.onnx", "eager", has_mask=False)
    functions = [node.target for node in load_module(served(path)).module.graph.nodes]
    assert functions.count(torch.nn.functional.scaled_dot_product_attention) == 3
    with pytest.raises(ConfigError, match="packed answers differ from padded ones"):
        backend("pytorch")(served(path, **PACKED))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_encoders_of_onnx_runtimes_optimiser_are_packed(tmp_path: Path, attention) -> None:
    path = export(tmp_path / "model.onnx", attention)
    made = optimised(path)
    kinds = {node.op_type for node in onnx.load(made).graph.node}
    assert {"SkipLayerNormalization", "BiasGelu"} <= kinds
    assert ("Attention" in kinds) == (attention == "eager")
    check(made, path)


def test_packed_in_16_bits(tmp_path: Path) -> None:
    path = export(tmp_path / "model.onnx", "eager")
    inputs = texts(32, 1, 7, 20)
    runner = backend("pytorch")(served(path, **PACKED, **{"penstock.dtype": "bf16"}))
    assert runner.built()["dtype"] == "bfloat16"
    found = answer(runner, inputs)
    for row, wanted in enumerate(by_onnx_runtime(path, inputs)):
        gap = np.linalg.norm(found[row, : len(wanted)] - wanted) / np.linalg.norm(wanted)
        assert 0 < gap < 0.05


def test_calibrated_for_fp8(tmp_path: Path) -> None:
    from penstock.optimizer.passes.fp8 import packed_ranges

    path = export(tmp_path / "model.onnx", "eager")
    rows = [
        {name: array[0, :length] for name, array in texts(length, seed=length).items()}
        for length in (32, 3, 17)
    ]
    ranges = packed_ranges(served(path, **PACKED), rows)
    assert list(ranges)[:4] == ["0.qkv", "0.out", "0.inner", "0.outer"] and len(ranges) == 12
    assert all(each > 0 for each in ranges.values())


def test_the_node_that_does_not_match_is_named(tmp_path: Path) -> None:
    path = export(tmp_path / "model.onnx", "eager", activation="silu")
    with pytest.raises(ConfigError, match=r"node '\w+' \(\w+\): expected GELU or ReLU between"):
        backend("pytorch")(served(path, **PACKED))


def test_a_result_in_between_that_others_read_is_named(tmp_path: Path) -> None:
    path = export(tmp_path / "model.onnx", "eager")
    model = onnx.load(path)
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    # The norm at the end of the second layer, read a second time at the end.
    (last,) = (node for node in model.graph.node if node.output[0] == "y")
    last.output[0] = "before"
    node = onnx.helper.make_node("Add", ["before", norms[4].output[0]], ["y"], "again")
    model.graph.node.append(node)
    onnx.save(model, path)
    with pytest.raises(ConfigError, match="reads the result of a layer in between"):
        backend("pytorch")(served(path, **PACKED))


def test_other_answers_are_refused(tmp_path: Path) -> None:
    """Attention whose products have another scale looks the same in the graph."""
    path = export(tmp_path / "model.onnx", "eager")
    model = onnx.load(path)
    scales = [node for node in model.graph.node if node.op_type in ("Mul", "Div")]
    softmax = {node.input[0] for node in model.graph.node if node.op_type == "Softmax"}
    adds = {name for node in model.graph.node if node.output[0] in softmax for name in node.input}
    chosen = [node for node in scales if node.output[0] in adds]
    assert len(chosen) == 3
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    for node in chosen:
        constant = constants[node.input[1]].attribute[0].t
        value = onnx.numpy_helper.to_array(constant)
        constant.CopyFrom(onnx.numpy_helper.from_array(np.array(value * 3, value.dtype)))
    onnx.save(model, path)
    with pytest.raises(ConfigError, match="packed answers differ from padded ones"):
        backend("pytorch")(served(path, **PACKED))


def test_models_without_layer_norms_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    value, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.INT64
    inputs = [value(name, kind, ["n", "s"]) for name in NAMES]
    output = value("y", onnx.TensorProto.FLOAT, ["n", "s"])
    nodes = [
        onnx.helper.make_node("Add", [NAMES[0], NAMES[1]], ["a"]),
        onnx.helper.make_node("Add", ["a", NAMES[2]], ["b"]),
        onnx.helper.make_node("Cast", ["b"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    graph = onnx.helper.make_graph(nodes, "sum", inputs, [output])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    config = replace(served(path, **PACKED), outputs=(TensorSpec("y", "FP32", (-1,)),))
    with pytest.raises(ConfigError, match="found no encoder layer: it has no layer norm"):
        backend("pytorch")(config)
