"""ONNX files of the networks of `models.py`: exported, and quantised with random images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from models import Tensor
from torch import nn

from penstock.optimizer import onnx_model
from penstock.optimizer.passes import int8_static
from penstock.types import DATATYPES

INT8 = "model_int8.onnx"


def exported(
    network: nn.Module, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], path: Path
) -> Path:
    """The network as torch's exporter writes it, once."""
    if not path.is_file():
        example = [
            torch.from_numpy(each.drawn(2, DATATYPES[each.datatype].numpy, seed=0))
            for each in inputs.values()
        ]
        draft = path.with_suffix(".part")
        torch.onnx.export(
            network.eval(),
            tuple(example),
            draft,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=17,
            dynamo=False,
            dynamic_axes={name: {0: "n"} for name in (*inputs, *outputs)},
        )
        draft.rename(path)
    return path


def quantised(path: Path, images: np.ndarray, name: str) -> Path:
    """The same network with Q/DQ nodes, beside the file, once."""
    target = path.with_name(INT8)
    if target.is_file():
        return target
    ready = onnx_model.prepared(onnx_model.read(path))
    scheme = int8_static.Scheme("minmax", True, False, False, is_gpu=True)
    names = onnx_model.float_tensors(ready.graph, scheme.operators)
    watched = onnx.ModelProto()
    watched.CopyFrom(ready)
    known = {each.name for each in watched.graph.output}
    watched.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(each) for each in names if each not in known
    )
    session = ort.InferenceSession(watched.SerializeToString())
    values = dict(
        zip(
            [each.name for each in session.get_outputs()],
            session.run(None, {name: images}),
            strict=True,
        )
    )
    values[name] = images
    ranges = {
        each: (float(values[each].min()), float(values[each].max()))
        for each in names
        if each in values
    }
    draft = target.with_suffix(".part")
    onnx.save(int8_static.quantised(ready, ranges, scheme), draft)
    draft.rename(target)
    return target


def quantised_version(path: Path, images: np.ndarray, name: str) -> Path:
    """The quantised file in a folder of its own, beside the version: kernels are chosen for it."""
    source = quantised(path, images, name)
    folder = path.parent.with_name("int8")
    folder.mkdir(exist_ok=True)
    artifact = folder / "model.onnx"
    if not artifact.is_file():
        draft = artifact.with_suffix(".part")
        draft.write_bytes(source.read_bytes())
        draft.rename(artifact)
    return artifact
