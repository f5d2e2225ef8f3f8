"""Models in TensorFlow's formats, which Triton's repositories hold: how to convert them to ONNX.

They are refused with the command for their files and their tensors; the command keeps the names of
tensors, so that config.pbtxt only needs another platform.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

# Files and folders of Triton's TensorFlow backend in a version folder.
SAVED_MODEL, GRAPHDEF = "model.savedmodel", "model.graphdef"
FILES = {"tensorflow_savedmodel": SAVED_MODEL, "tensorflow_graphdef": GRAPHDEF}
BACKEND = "tensorflow"
CONVERT = "python -m tf2onnx.convert"


def problem(
    version: Path, platform: str, backend: str, inputs: Sequence[str], outputs: Sequence[str]
) -> str:
    """Return why a version is not served and the command that converts it; empty unless the
    platform, the backend or the files are TensorFlow's. `inputs` and `outputs` are the names in
    config.pbtxt."""
    if platform in FILES:
        name = FILES[platform]
    elif backend == BACKEND or not (platform or backend):
        name = next((each for each in FILES.values() if (version / each).exists()), "")
        if not name and backend != BACKEND:
            return ""
    else:
        return ""
    is_graph = name == GRAPHDEF
    what = "a frozen graph" if is_graph else "a SavedModel"
    command = convert(version / (name or SAVED_MODEL), inputs, outputs)
    then = 'then set platform: "onnxruntime_onnx"'
    return f"{what} of TensorFlow is not served; convert it with {command} and {then}"


def convert(path: Path, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> str:
    """Return the tf2onnx command for a SavedModel or, with the names of its tensors, a graph."""
    flag = "--saved-model" if path.name == SAVED_MODEL else "--graphdef"
    words = [flag, str(path), "--output", str(path.parent / "model.onnx")]
    if flag == "--graphdef":
        words += _tensors("inputs", inputs or ["INPUT"])
        words += _tensors("outputs", outputs or ["OUTPUT"])
    return f"{CONVERT} {shlex.join(words)}"


def _tensors(kind: str, names: Sequence[str]) -> list[str]:
    """Return the flags that name tensors of a graph, and keep the names of config.pbtxt."""
    places = [name if ":" in name else f"{name}:0" for name in names]
    return [f"--{kind}", ",".join(places), f"--rename-{kind}", ",".join(names)]
