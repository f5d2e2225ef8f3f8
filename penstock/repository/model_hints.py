"""Errors for paths that are not models: what the path is, and what to give instead.

Looks at names only. `model_source` asks here once it knows that there is no model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

MAX_NAMES = 5
ADDRESS = re.compile(r"[\w.-]+:\d+(/|$)")
FROM_TORCH = (
    "write the model with torch.export.save as model.pt2, or give package.module:factory, a "
    "function that returns the module with these weights"
)
FROM_FOLDER = "weights have no code; give the folder that holds them and config.json, or "
FROM_KERAS = "write it with model.export('model.onnx', format='onnx') and give that file"
FROM_SKLEARN = "write scikit-learn models with skl2onnx as model.onnx, or load it in a model.py"
SAVED_MODEL = (
    "convert it with python -m tf2onnx.convert --saved-model FOLDER --output model.onnx and give "
    "that file"
)
UNPACK = "unpack it and give what is in it"
# Files that hold a model, or a part of it, in a form that is not served, and what to do.
NOT_SERVED: Mapping[str, str] = {
    ".pt": f"a file of torch.save or TorchScript is a pickle, which can run any code; {FROM_TORCH}",
    ".pth": f"a state dict has no code; {FROM_TORCH}",
    ".ckpt": f"a checkpoint has no code; {FROM_TORCH}",
    ".bin": FROM_FOLDER + FROM_TORCH,
    ".safetensors": f"{FROM_FOLDER}package.module:factory, a function that returns the module with "
    "these weights",
    ".keras": f"Keras models are not served; {FROM_KERAS}",
    ".h5": f"Keras models are not served; {FROM_KERAS}",
    ".pb": f"TensorFlow graphs are not served; {SAVED_MODEL}",
    ".tflite": "TensorFlow Lite is not served; convert it with python -m tf2onnx.convert --tflite "
    "FILE --output model.onnx and give that file",
    ".pkl": f"a pickle can run any code and is not read; {FROM_SKLEARN}",
    ".pickle": f"a pickle can run any code and is not read; {FROM_SKLEARN}",
    ".joblib": f"a pickle can run any code and is not read; {FROM_SKLEARN}",
    ".plan": "TensorRT engines are not served; give the ONNX file that it was built from",
    ".engine": "TensorRT engines are not served; give the ONNX file that it was built from",
    ".pbtxt": "the configuration of a model; give the folder that holds it",
    ".zip": f"an archive; {UNPACK}",
    ".tar": f"an archive; {UNPACK}",
    ".gz": f"an archive; {UNPACK}",
    ".mar": f"an archive of TorchServe; {UNPACK}",
}
SAVED_MODEL_FILE, ADAPTER_FILE = "saved_model.pb", "adapter_config.json"


def describe_missing(path: Path, text: str) -> str:
    """Say that there is no such path, and what the user may have meant."""
    missing = "no such file or folder"
    if ADDRESS.match(text):
        return f"{missing}; did you mean http://{text}?"
    if path.is_symlink():
        return f"is a link that leads nowhere, to {path.readlink()}"
    folder = path.parent
    if not folder.is_dir():
        return missing
    similar = difflib.get_close_matches(path.name, _names(folder), n=3)
    also = f"; did you mean {' or '.join(str(folder / each) for each in similar)}?"
    return missing + (also if similar else "")


def describe_file(path: Path, expected: str) -> str:
    """Say why a file is no model."""
    return NOT_SERVED.get(path.suffix.lower(), f"not a model; expected {expected}")


def describe_folder(folder: Path, model_suffixes: Sequence[str], expected: str) -> str:
    """Say why a folder is not a model. `model_suffixes` are those of files that are a model by
    themselves."""
    names = _names(folder)
    if not names:
        return f"is an empty folder; expected {expected}"
    if SAVED_MODEL_FILE in names:
        command = SAVED_MODEL.replace("FOLDER", str(folder))
        return f"is a SavedModel of TensorFlow, which is not served; {command}"
    if ADAPTER_FILE in names:
        return (
            "is a LoRA adapter, which is a part of a model; merge it with peft's "
            "merge_and_unload(), write the result with save_pretrained and give that folder"
        )
    files = [name for name in names if (folder / name).is_file()]
    # Any folder may hold Python files; few of them are models.
    endings = tuple(suffix for suffix in model_suffixes if suffix != ".py")
    models = [name for name in files if name == "model.py" or name.lower().endswith(endings)]
    if len(models) == 1:
        return f"is no model's folder, but holds one: give {folder / models[0]}"
    if models:
        more = ", …" if models[MAX_NAMES:] else ""
        some = ", ".join(models[:MAX_NAMES]) + more
        return f"holds several models ({some}); give one of them, such as {folder / models[0]}"
    for name in files:
        if (reason := NOT_SERVED.get(Path(name).suffix.lower())) is not None:
            return f"holds no model, but {name}: {reason}"
    layout = "<model>/<version>/model.onnx, with the version a number"
    return f"holds no model; expected {layout}, or {expected}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    except OSError:
        return []
