"""Signatures of OpenVINO IR files, read without OpenVINO."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.repository.openvino_file import read_signature
from penstock.types import DATATYPES

WriteOnnx = Callable[..., Path]
IR = """<?xml version="1.0"?>
<net name="model" version="11">
  <layers>
    <layer id="0" name="x" type="Parameter" version="opset1">
      <data shape="?,3" element_type="f32" />
      <output>
        <port id="0" precision="FP32" names="image\\,left,alias"><dim>-1</dim><dim>3</dim></port>
      </output>
    </layer>
    <layer id="1" name="relu" type="ReLU" version="opset1">
      <input><port id="0" precision="FP32"><dim>-1</dim><dim>3</dim></port></input>
      <output>
        <port id="1" precision="FP32" names="scores"><dim>-1</dim><dim>3</dim></port>
      </output>
    </layer>
    <layer id="2" name="relu/sink_port_0" type="Result" version="opset1">
      <input><port id="0" precision="FP32"><dim>-1</dim><dim>3</dim></port></input>
    </layer>
  </layers>
  <edges>
    <edge from-layer="0" from-port="0" to-layer="1" to-port="0" />
    <edge from-layer="1" from-port="1" to-layer="2" to-port="0" />
  </edges>
</net>
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.xml"


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_signature(path)
    [problem] = caught.value.problems
    assert len(problem.splitlines()) == 1
    return problem


def test_names_come_from_the_tensors(path: Path) -> None:
    path.write_text(IR)
    signature = read_signature(path)
    assert [(s.name, s.datatype, s.shape) for s in signature.inputs] == [
        ("image,left", "FP32", (-1, 3))
    ]
    assert [(s.name, s.datatype, s.shape) for s in signature.outputs] == [
        ("scores", "FP32", (-1, 3))
    ]
    assert signature.has_batch


def test_newer_files_name_their_outputs_themselves(path: Path) -> None:
    path.write_text(IR.replace('type="Result"', 'type="Result" output_names="best"'))
    assert [spec.name for spec in read_signature(path).outputs] == ["best"]


def test_layers_stand_in_for_names_that_are_missing(path: Path) -> None:
    path.write_text(IR.replace(' names="image\\,left,alias"', "").replace(' names="scores"', ""))
    signature = read_signature(path)
    assert signature.inputs[0].name == "x"
    assert signature.outputs[0].name == "relu/sink_port_0"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("<?xml", "", "cannot be read as OpenVINO IR: "),
        ("</net>", "", "cannot be read as OpenVINO IR: no element found"),
        ('type="Result"', 'type="Relu"', "cannot be read as OpenVINO IR: it has no inputs or no"),
        ('precision="FP32"', 'precision="U4"', "'image,left': not a tensor of a datatype"),
        ("<dim>3</dim>", "<dim>x</dim>", "'image,left': cannot be read"),
        ('shape="?,3"', 'shape="..."', "'image,left': any number of dimensions"),
        (
            "<net ",
            '<!DOCTYPE net [<!ENTITY a "b">]><net ',
            "cannot be read as OpenVINO IR: it has a document type declaration",
        ),
    ],
)
def test_what_is_no_model_is_refused(path: Path, old: str, new: str, text: str) -> None:
    path.write_text(IR.replace(old, new))
    assert refused(path).startswith(text)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\xff\xfe<\0n\0", b"<net/>"])
def test_garbage_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refused(path).startswith("cannot be read as OpenVINO IR: ")


@given(start=st.integers(0, len(IR)), size=st.integers(0, 60), patch=st.text(max_size=5))
def test_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, start: int, size: int, patch: str
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "model.xml"
    path.write_text(IR[:start] + patch + IR[start + size :], encoding="utf-8")
    try:
        read_signature(path)
    except ConfigError as error:
        assert error.problems


@pytest.mark.parametrize("datatype", DATATYPES)
def test_what_openvino_writes_is_read(path: Path, write_identity: WriteOnnx, datatype: str) -> None:
    ov = pytest.importorskip("penstock.backends.openvino").ov
    source = write_identity(path.with_suffix(".onnx"), datatype, ("batch", "length", 3), 2)
    ov.save_model(ov.Core().read_model(source), path, compress_to_fp16=False)
    signature = read_signature(path)
    assert [(s.name, s.datatype, s.shape) for s in (*signature.inputs, *signature.outputs)] == [
        (name, datatype, (-1, -1, 3)) for name in ("x0", "x1", "y0", "y1")
    ]
