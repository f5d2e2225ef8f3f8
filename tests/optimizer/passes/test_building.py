"""An ONNX file in place of the parent's."""

from dataclasses import replace
from pathlib import Path

import onnx
from suites.onnx_models import answers, batch, build_of, cnn, drawn_rows, opened, stack

from penstock.optimizer.passes.building import (
    LEFT_OUT,
    is_onnx,
    without_slow_fusion,
    write_onnx,
)


def test_everything_but_the_graph_is_taken_over(tmp_path: Path) -> None:
    config = 'max_batch_size: 4 output { name: "y" data_type: TYPE_FP32 dims: 32 '
    config += 'label_filename: "labels.txt" } input { name: "x" data_type: TYPE_FP32 dims: 32 }'
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "labels.txt").write_text("\n".join(map(str, range(32))))
    parent = build_of(stack(2), tmp_path / "m", config)
    (parent.version_folder / "vocabulary.txt").write_text("a b c")
    write_onnx(parent, stack(3), tmp_path / "next" / "m")
    made = opened(tmp_path / "next" / "m")
    assert made.config.outputs == parent.config.outputs and made.config.max_batch_size == 4
    assert (made.version_folder / "vocabulary.txt").read_text() == "a b c"
    kinds = [node.op_type for node in onnx.load(str(made.artifact)).graph.node]
    assert kinds.count("MatMul") == 3


def test_weights_in_a_file_of_their_own_are_not_left_behind(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m")
    model = onnx.load(str(parent.artifact))
    onnx.save_model(
        model,
        str(parent.artifact),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    feeds = batch(drawn_rows(parent, 2))
    write_onnx(parent, onnx.load(str(parent.artifact)), tmp_path / "next" / "m")
    made = opened(tmp_path / "next" / "m")
    assert [path.name for path in made.version_folder.iterdir()] == ["model.onnx"]
    assert (answers(made.artifact, feeds) == answers(parent.artifact, feeds)).all()


def test_so_are_weights_below_a_folder(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m")
    (parent.version_folder / "weights").mkdir()
    model = onnx.load(str(parent.artifact))
    options = {"save_as_external_data": True, "size_threshold": 0}
    onnx.save_model(model, str(parent.artifact), location="weights/all.bin", **options)
    write_onnx(parent, onnx.load(str(parent.artifact)), tmp_path / "next" / "m")
    made = opened(tmp_path / "next" / "m")
    assert [path.name for path in made.version_folder.rglob("*")] == ["model.onnx"]


def test_only_onnx_files_are_onnx(tmp_path: Path) -> None:
    build = build_of(cnn(), tmp_path / "m")
    assert is_onnx(build)
    assert not is_onnx(replace(build, config=replace(build.config, backend="pytorch")))


def test_a_fusion_is_left_out_only_where_onnx_runtime_is_on_the_processor(tmp_path: Path) -> None:
    config = build_of(stack(), tmp_path / "m").config
    assert without_slow_fusion(config).options[LEFT_OUT] == "SkipLayerNormFusion"
    chosen = replace(config, options={LEFT_OUT: "GeluFusion"})
    assert without_slow_fusion(chosen) == chosen
    for other in (
        replace(config, backend="openvino"),
        replace(config, options={"providers": "CUDAExecutionProvider,CPUExecutionProvider"}),
    ):
        assert without_slow_fusion(other) == other
