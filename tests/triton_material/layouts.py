"""Lay models of the checkouts out as model repositories, renamed and changed as QA's scripts do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx

from triton_material.checkouts import Checkouts
from triton_material.stand_ins import IR_VERSION, OPSET

# Scripts give models of several files, or none, a version folder with all of them.
CONFIG = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class QaModel:
    """`source` is below qa/python_models. `replace` are regular expressions of the configuration,
    by line, and what stands there instead; `more` is added at its end. `file` is the model's."""

    source: str
    name: str = ""
    replace: tuple[tuple[str, str], ...] = ()
    more: str = ""
    file: str = "model.py"
    config_of: str = ""

    @property
    def served_name(self) -> str:
        return self.name or self.source.rpartition("/")[2]


# The models that QA's generators make, once for a run.
GENERATED = tempfile.TemporaryDirectory(prefix="triton-generated-")
GENERATORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "identity": ("gen_qa_identity_models.py", ("--onnx",)),
    "onnx": ("gen_qa_models.py", ("--onnx",)),
    "libtorch": ("gen_qa_models.py", ("--libtorch",)),
    "sequence": ("gen_qa_sequence_models.py", ("--onnx",)),
    "dyna_sequence": ("gen_qa_dyna_sequence_models.py", ("--onnx",)),
    "implicit": ("gen_qa_implicit_models.py", ("--onnx",)),
    "ragged": ("gen_qa_ragged_models.py", ("--onnx",)),
    "reshape": ("gen_qa_reshape_models.py", ("--onnx",)),
    "scalar": ("gen_qa_ort_scalar_models.py", ()),
}
Edits = Sequence[tuple[str, str]]


@cache
def generate(checkouts: Checkouts, kind: str) -> Path:
    """Run one of QA's generators of models; return the folder of what it made."""
    script, flags = GENERATORS[kind]
    folder = Path(GENERATED.name) / kind
    folder.mkdir()
    command = [sys.executable, "-B", script, *flags, "--models_dir", str(folder)]
    where = checkouts.qa / "common"
    done = subprocess.run(command, cwd=where, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{script}: {done.stderr[-500:]}")
    for path in folder.glob("*/*/model.onnx"):
        model = onnx.load(path)
        # The generators write what the newest onnx has, which ONNX Runtime may not read yet.
        model.ir_version = min(model.ir_version, IR_VERSION)
        for opset in model.opset_import:
            opset.version = min(opset.version, OPSET) if not opset.domain else opset.version
        onnx.save(model, path)
    return folder


def add_generated(
    root: Path,
    checkouts: Checkouts,
    kind: str,
    model: str,
    name: str = "",
    edits: Edits = (),
    more: str = "",
) -> None:
    """Add a model that QA's generator of this kind makes, under another name if one is given."""
    target = root / (name or model)
    shutil.copytree(generate(checkouts, kind) / model, target)
    edit_config(target, (("^name:.*$", f'name: "{target.name}"'), *edits), more)


def edit_config(folder: Path, edits: Edits, more: str = "") -> None:
    text = (folder / CONFIG).read_text()
    for pattern, replacement in edits:
        text = re.sub(pattern, replacement, text, flags=re.M)
    (folder / CONFIG).write_text(f"{text}\n{more}\n")


def add_qa_model(root: Path, checkouts: Checkouts, model: QaModel) -> None:
    models = checkouts.qa / "python_models"
    source, target = models / model.source, root / model.served_name
    (target / "1").mkdir(parents=True)
    versions = [path for path in (source / "1").glob("*") if path.is_file()]
    for path in versions or source.glob("*.py"):
        shutil.copy(path, target / "1" / path.name)
    if model.file != "model.py":
        shutil.copy(source / model.file, target / "1" / "model.py")
    config = models / (model.config_of or model.source) / CONFIG
    if config.exists():
        shutil.copy(config, target)
        name = ("^name:.*$", f'name: "{target.name}"')
        edit_config(target, (name, *model.replace), model.more)


def add_qa_models(root: Path, checkouts: Checkouts, *models: QaModel | str) -> None:
    for model in models:
        add_qa_model(root, checkouts, QaModel(model) if isinstance(model, str) else model)


def add_python_example(
    root: Path, checkouts: Checkouts, example: str, name: str = "", prefix: str = ""
) -> None:
    """Lay an example of the Python backend out as the model `name`."""
    source, target = checkouts.python_backend / "examples" / example, root / (name or example)
    (target / "1").mkdir(parents=True)
    shutil.copy(source / f"{prefix}model.py", target / "1" / "model.py")
    if (source / f"{prefix}{CONFIG}").exists():
        shutil.copy(source / f"{prefix}{CONFIG}", target / CONFIG)
