"""Write a model or repository as Triton reads it: `penstock export triton`.

`export/triton` says what a configuration becomes; files are copied here, into a folder that is
renamed when it is complete. Python functions get a model.py that calls them.
"""

from __future__ import annotations

import ast
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

import penstock
from penstock.backends.python_form import FormReport
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.export import triton, triton_python
from penstock.optimizer import folders
from penstock.repository import layout, manifest, pbtxt_warmup, pt2_file, python_file, python_model
from penstock.repository.layout import ModelKind, RepositoryScan
from penstock.repository.model_source import ModelSource, resolve

FORM_READER = "penstock.backends.python_form"
PACKAGE = "penstock"
NOT_COPIED = (layout.CONFIG, manifest.NAME)
KINDS = {
    "onnxruntime": ModelKind.ONNX_FILE,
    "openvino": ModelKind.OPENVINO_FILE,
    "python": ModelKind.PYTHON_FILE,
    "pytorch": ModelKind.PT2_FILE,
    "tensorrt": ModelKind.PT2_FILE,
}


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """One model in the new repository, or why it is not there."""

    name: str
    # Paths in the repository.
    files: tuple[str, ...] = ()
    # What differs from how Penstock serves it.
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TritonExport:
    folder: str
    models: tuple[ExportedModel, ...]

    @property
    def problems(self) -> list[str]:
        return [f"{each.name}: {text}" for each in self.models for text in each.problems]


def export_triton(model: str, out: str) -> TritonExport:
    """Write every model that Triton can serve. ConfigError if MODEL is none, or if the folder holds
    a model that was not exported."""
    found = resolve(model).read()
    target = Path(out)
    names = sorted(found.folders)
    _check_target(target, names)
    models = [_export(found, name, target) for name in names]
    return TritonExport(out, tuple(models))


def _check_target(target: Path, names: Sequence[str]) -> None:
    problems = [
        f"{target / name}: not written by penstock export triton; move it or choose another folder"
        for name in names
        if (target / name).exists() and not _is_ours(target / name)
    ]
    if problems:
        raise ConfigError(problems)


def _is_ours(folder: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError), (folder / layout.CONFIG).open() as file:
        return file.readline().startswith(triton.FILE_MARK)
    return False


def _export(found: RepositoryScan, name: str, target: Path) -> ExportedModel:
    if name in found.problems:
        return ExportedModel(name, problems=tuple(found.problems[name]))
    configs = [config for config in found.configs if config.name == name]
    if problem := triton.problem(configs[-1]):
        return ExportedModel(name, problems=(f"is {problem}",))
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=target) as made:
            notes = _write(found.folders[name], configs, Path(made) / name)
            if (target / name).exists():
                shutil.rmtree(target / name)
            os.rename(Path(made) / name, target / name)
    except ConfigError as error:
        return ExportedModel(name, problems=error.problems)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from None
    files = sorted(each for each in (target / name).rglob("*") if each.is_file())
    paths = tuple(each.relative_to(target).as_posix() for each in files)
    return ExportedModel(name, paths, notes)


def _write(folder: Path, configs: Sequence[ModelConfig], target: Path) -> tuple[str, ...]:
    """Write a model's folder; return the notes."""
    target.mkdir()
    newest, notes = configs[-1], list[str]()
    wanted = triton.configure(newest).text
    for config in configs:
        if triton.configure(config).text != wanted:
            why = "its configuration differs, and Triton has one for all versions of a model"
            notes.append(f"version {config.version} is not exported: {why}")
            continue
        version = target / config.version
        version.mkdir()
        notes += [note for note in _write_files(folder, config, version) if note not in notes]
    _write_shared(folder, newest, target)
    made = triton.configure(newest, tuple(notes))
    (target / layout.CONFIG).write_text(made.text, encoding="utf-8")
    return made.notes


def _write_shared(folder: Path, config: ModelConfig, target: Path) -> None:
    """Write labels, for all versions, and the data of warm-ups."""
    for spec in config.outputs:
        if spec.label_file and spec.labels:
            path = target / spec.label_file
            if not path.resolve().is_relative_to(target.resolve()):
                raise ConfigError(f"label_filename '{spec.label_file}' leaves the model's folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{label}\n" for label in spec.labels), encoding="utf-8")
    if any(tensor.file for each in config.warmups for tensor in each.inputs):
        warmups = pbtxt_warmup.FOLDER
        shutil.copytree(folder / warmups, target / warmups)


def _write_files(folder: Path, config: ModelConfig, version: Path) -> list[str]:
    """Write the files of a version under Triton's names; return notes."""
    artifact = Path(config.artifact)
    if config.backend == "pytorch" and artifact.suffix == ".pt2":
        _check_compiled(artifact)
    if config.backend != "python":
        source = ModelSource(KINDS[config.backend], artifact, config.name)
        folders.take_file(source, version, shutil.copyfile)
        written = version / f"model{artifact.suffix.lower()}"
        written.rename(version / triton.file_name(config))
        return []
    if layout.has_version_folder(folder, config):
        own = folder / config.version
        folders.take_files(own, version, shutil.copyfile, NOT_COPIED)
        if artifact.name != "model.py":
            (version / artifact.name).rename(version / "model.py")
    else:
        source = ModelSource(ModelKind.PYTHON_FILE, artifact, config.name)
        folders.take_file(source, version, shutil.copyfile)
    return _wrap(config, version)


def _check_compiled(artifact: Path) -> None:
    if not pt2_file.is_compiled(artifact):
        raise ConfigError(
            f"{artifact.name}: Triton runs AOTInductor packages, not programs of torch.export.save;"
            " write one with torch._inductor.aoti_compile_and_package, or an ONNX file"
        )


def _wrap(config: ModelConfig, version: Path) -> list[str]:
    """Put a model.py that calls the function in the place of the user's file, which stays beside
    it; nothing for a TritonPythonModel. Return notes."""
    answer = python_file.run_code(FORM_READER, config.artifact)
    found = msgspec.json.decode(answer, type=FormReport)
    if found.form is None:
        raise ConfigError(list(found.problems))
    form = found.form
    notes = _package_notes(version)
    if not form.entry:
        return notes
    os.rename(version / "model.py", version / triton_python.ORIGINAL)
    tensors = {
        "inputs": {each.name: asdict(each) for each in form.inputs},
        "outputs": {each.name: asdict(each) for each in form.outputs},
    }
    mark = f"Written by penstock export triton {penstock.__version__}."
    text = triton_python.write_wrapper(mark, {**asdict(replace(form)), **tensors})
    (version / "model.py").write_text(text, encoding="utf-8")
    return notes


def _package_notes(version: Path) -> list[str]:
    """Put the declarations of Penstock beside code that uses nothing else of it; otherwise note
    that Triton's Python needs it."""
    used: set[str] = set()
    for path in version.glob("*.py"):
        used |= _used_of_package(ast.parse(path.read_bytes()))
    if not used:
        return []
    if used <= {"model", "Tensor", "TensorType"}:
        source = Path(python_model.__file__).read_text(encoding="utf-8")
        (version / triton_python.SHIM).write_text(source + triton_python.SHIM_TAIL, "utf-8")
        return []
    return [f"its code imports penstock ({', '.join(sorted(used))}): install it in Triton's Python"]


def _used_of_package(tree: ast.AST) -> set[str]:
    """Return what a file uses of the package."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            is_plain = node.module == PACKAGE and not node.level
            used |= {each.name for each in node.names} if is_plain else {str(node.module)}
        elif isinstance(node, ast.Import):
            used |= {each.name for each in node.names if each.name.startswith(f"{PACKAGE}.")}
            used |= {each.asname for each in node.names if each.name == PACKAGE and each.asname}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used |= {node.attr} if node.value.id == PACKAGE else set()
    return used
