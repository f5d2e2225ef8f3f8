"""The model to optimise, in any form, as a model's folder that can be served.

Every form that `model_source` knows, except running servers. With preprocessing, the folder
includes it and takes the user's inputs; with postprocessing, it returns the user's outputs.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from penstock.backends.processing import apply, apply_after, checked
from penstock.config import (
    CPU,
    EACH_GPU,
    BatchPolicy,
    ModelConfig,
    Padding,
    Postprocess,
    Preprocess,
    RecordPolicy,
)
from penstock.errors import BackendFailed, ConfigError, describe_error
from penstock.optimizer import folders, pretrained_steps, sent, torch_source, trials, user_code
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.examples import open_examples
from penstock.optimizer.facts import describe_weights
from penstock.optimizer.plan import Plan
from penstock.optimizer.sent import Row
from penstock.optimizer.simulate import variable_axes
from penstock.optimizer.user_code import UserFunction
from penstock.repository import layout, pbtxt, pt2_file
from penstock.repository import manifest as manifests
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import ModelSource, resolve
from penstock.serving.placement import place
from penstock.system import devices

# On CPUs larger batches are rarely faster, and cost warm-up time. GPUs need larger ones.
MAX_BATCH = 32
MAX_BATCH_ON_GPU = torch_source.MAX_BATCH
PREPROCESS_FILE, POSTPROCESS_FILE = "preprocess.py", "postprocess.py"
FORMS = (
    "model.onnx, model.pt2, model.xml, model.py, a Hugging Face folder, a model's folder, a "
    "version of it, or package.module:factory"
)
KINDS = {
    ModelKind.ONNX_FILE: "ONNX",
    ModelKind.PT2_FILE: "exported program",
    ModelKind.OPENVINO_FILE: "OpenVINO",
    ModelKind.PYTHON_FILE: "Python",
    ModelKind.HUGGING_FACE: "Hugging Face",
    ModelKind.FACTORY: "PyTorch module",
}
# Kind of models from a repository, before the version number.
SERVED = "served version"
# Sequence length of models and data that do not limit it.
UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Subject:
    build: Build
    # "ONNX", "PyTorch module", "exported program", "Hugging Face", "served version 3"
    kind: str
    # Digest of every byte of the model.
    digest: str
    # "ONNX, 22.7 M parameters, FP32"
    text: str
    # Largest batch that the model's author allows; None if the limit was chosen here.
    max_rows: int | None = None
    # How the original's requests are recorded; its trials are not.
    record: RecordPolicy | None = None


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """Result of `_take`, which put the model's files into the version folder."""

    kind: str
    config: ModelConfig
    # In addition to the kind: copied files, the architecture.
    note: str = ""
    max_rows: int | None = None
    record: RecordPolicy | None = None


def open_subject(plan: Plan, target: Path) -> Subject:
    """Write the original as a model's folder at `target`; ConfigError says what is wrong."""
    version = target / folders.VERSION
    version.mkdir(parents=True)
    rows = sent.read_sent(plan)
    found = pretrained_steps.find_steps(plan, rows)
    before, after = _functions(plan)
    if before and not plan.labels:
        rows = sent.without_labels(rows)
    seen = _called("preprocess", before, rows) if before else rows
    taken = _take(plan, [] if found else seen, version)
    is_served = taken.kind.startswith("served")
    config = _on_device(taken.config, plan.device, is_served=is_served)
    if found:
        seen = pretrained_steps.network_rows(config, found, rows)
        config = pretrained_steps.add_steps(_proposed(config, seen), found)
    elif not is_served:
        config = _proposed(config, seen)
    notes = [taken.note]
    if before:
        notes.append(user_code.take_along(before, version, PREPROCESS_FILE))
        config = _with_preprocessing(config, before, rows, seen)
    config = folders.write_config(target, config)
    if before:
        _check_copy(PREPROCESS_FILE, lambda: apply(config, rows[:1]), seen[0])
    if after:
        notes.append(user_code.take_along(after, version, POSTPROCESS_FILE))
        config = _postprocessed(plan, Build(Candidate(), target, config), after)
    build = Build(Candidate(), target, config)
    text = ", ".join(filter(None, (taken.kind, describe_weights(build), *notes)))
    digest = digest_of(target)
    return Subject(build, taken.kind, digest, text, taken.max_rows, taken.record)


def _functions(plan: Plan) -> tuple[UserFunction | None, UserFunction | None]:
    given = {"preprocess": plan.preprocess, "postprocess": plan.postprocess}
    problems = [
        f"{what}: needs data: what users {do} is not known from the model alone"
        for what, do in (("preprocess", "send"), ("postprocess", "get"))
        if given[what] and not plan.data
    ]
    if problems:
        raise ConfigError(problems)
    before, after = (user_code.find(each, what) if each else None for what, each in given.items())
    return before, after


def _take(plan: Plan, rows: Sequence[Row], version: Path) -> ImportedModel:
    source = resolve(plan.model)
    match source.kind:
        case ModelKind.ONNX_FILE | ModelKind.OPENVINO_FILE | ModelKind.PYTHON_FILE:
            return _take_file(source, version)
        case ModelKind.PT2_FILE:
            taken = _take_file(source, version)
            config = taken.config
            if config.max_batch_size:
                # The batch size that the program was exported for.
                limit = pt2_file.read_program(Path(config.artifact)).signature.max_batch
                limit = min(MAX_BATCH_ON_GPU, limit or MAX_BATCH_ON_GPU)
                config = replace(config, max_batch_size=limit)
            return replace(taken, config=config)
        case ModelKind.HUGGING_FACE if exported := pretrained_steps.exported_network(source.path):
            taken = _take_file(resolve(exported), version)
            pretrained_steps.copy_files(source.path, version)
            return replace(taken, kind=KINDS[source.kind], note=exported.name)
        case ModelKind.HUGGING_FACE:
            config, name = torch_source.take_hugging_face(source.path, rows, version)
            return ImportedModel(KINDS[source.kind], config, name)
        case ModelKind.FACTORY:
            config, note = torch_source.take_factory(str(source.location), rows, version)
            return ImportedModel(KINDS[source.kind], config, note)
        case ModelKind.MODEL_FOLDER | ModelKind.VERSION_FOLDER | ModelKind.REPOSITORY:
            return _take_served(source, version)
    raise ConfigError([f"{plan.model}: is {source.kind.value}; expected {FORMS}"])


def _take_file(source: ModelSource, version: Path) -> ImportedModel:
    folders.take_file(source, version, shutil.copyfile)
    try:
        config = folders.read_config(version.parent)
    except ConfigError as error:
        problems = [each.removeprefix(f"{folders.VERSION}/") for each in error.problems]
        raise ConfigError([f"{source.path}: {problem}" for problem in problems]) from None
    return ImportedModel(KINDS[source.kind], config)


def _take_served(model: ModelSource, version: Path) -> ImportedModel:
    """Take a version of a repository with its own configuration, but without its SLO."""
    found = model.read()
    config = found.only(model.path, "", "name the folder of one")
    folder = found.folders[config.name]
    without = (layout.CONFIG, manifests.NAME)
    folders.take_files(folder / config.version, version, shutil.copyfile, without)
    for spec in config.outputs:
        shared = folder / spec.label_file
        if spec.label_file and not (version / spec.label_file).exists() and shared.is_file():
            shutil.copyfile(shared, version / spec.label_file)
    batching = replace(config.batching, slo_latency_s=None)
    limit = _author_limit(folder, config)
    record = config.record
    config = replace(config, slo="", is_slo_from_evidence=False, unkept_slo="", batching=batching)
    config = replace(config, record=None)
    return ImportedModel(f"{SERVED} {config.version}", config, max_rows=limit, record=record)


def _author_limit(folder: Path, config: ModelConfig) -> int | None:
    """Return the `max_batch_size` that the author configured, if any: Python code and compiled
    plans may fail or be wrong above it. A limit that an earlier optimisation of a plain file chose,
    or that was inferred from the file, does not count."""
    manifest = manifests.read(folder / config.version)
    lineage = manifest.evidence.get("lineage") if manifest is not None else None
    if isinstance(lineage, dict) and not str(lineage.get("source", "")).startswith(SERVED):
        return None
    own = config.version if layout.has_own_config(folder, config.version) else ""
    written: int = layout.read_message(folder, own).max_batch_size
    return written or None


def _on_device(config: ModelConfig, device: str, *, is_served: bool) -> ModelConfig:
    """Place the model on the plan's device. By default a PyTorch model is placed on the GPUs, as in
    `penstock serve`, and a version of a repository stays where it was."""
    if device == "auto" and not is_served:
        is_auto = pbtxt.may_use_gpu(config.backend) and bool(devices.read_gpus())
        device = EACH_GPU if is_auto else CPU
    if device not in ("auto", CPU) and config.backend not in pbtxt.GPU_BACKENDS:
        reason = f"backend '{config.backend}' computes on the CPU"
        raise ConfigError([f"device: {device}: {reason}; expected auto or cpu"])
    if device != "auto":
        # Keep the number of instances per device.
        count = max(1, config.num_instances // len(set(config.devices)))
        config = replace(config.on([device] * count), is_gpu_optional=False)
    return placed(config, device)


def placed(config: ModelConfig, device: str) -> ModelConfig:
    """Return the configuration; ConfigError if its GPU does not exist."""
    try:
        place(config, devices.read_gpus())
    except ConfigError as error:
        raise ConfigError([f"device: {device}: {problem}" for problem in error.problems]) from None
    return config


def _proposed(config: ModelConfig, rows: Sequence[Row]) -> ModelConfig:
    """Return the default configuration of the original: batched, and padded if it has tokens and a
    mask. Whether that changes answers is checked at load."""
    most = MAX_BATCH_ON_GPU if config.uses_gpu else MAX_BATCH
    max_batch = min(most, config.max_batch_size)
    batching = BatchPolicy(max(1, max_batch), is_dynamic=max_batch > 0)
    padding = _padding(config, rows) if max_batch else None
    return replace(config, max_batch_size=max_batch, batching=batching, padding=padding)


def _padding(config: ModelConfig, rows: Sequence[Row]) -> Padding | None:
    has_mask = any("mask" in spec.name.lower() for spec in config.inputs)
    kinds = {(spec.shape, spec.datatype) for spec in config.inputs}
    if not has_mask or not kinds <= {((-1,), "INT64"), ((-1,), "INT32")}:
        return None
    axes = variable_axes(config)
    name = config.inputs[0].name
    lengths = [len(row[name]) for row in rows if name in row and row[name].ndim == 1]
    limit = max(lengths, default=UNLIMITED)
    buckets = Padding(axes).buckets
    # Up to the bucket that holds the longest row.
    kept = [size for size in buckets if size < limit]
    kept += [size for size in buckets if size >= limit][:1]
    # The model's maximum sequence length, from the config.json beside it if there is one.
    path = Path(config.artifact).parent / "config.json"
    described = msgspec.json.decode(path.read_bytes()) if path.is_file() else None
    most = described.get("max_position_embeddings") if isinstance(described, dict) else None
    most = most if isinstance(most, int) and most > 0 else UNLIMITED
    return Padding(axes, tuple(size for size in kept if size <= most) or (most,))


def _called(what: str, function: UserFunction, rows: Sequence[Row]) -> list[Row]:
    if not rows:
        raise ConfigError([f"{what}: needs data, and there is not one example"])
    try:
        made = [function.call(dict(row)) for row in rows]
    except Exception as error:  # Users' code may raise anything.
        reason = describe_error(error)
        raise ConfigError([f"{what}: {function.name} fails on the data: {reason}"]) from error
    for each in made:
        if not isinstance(each, Mapping):
            got = type(each).__name__
            raise ConfigError([f"{what}: {function.name}: expected arrays by name, got {got}"])
    return [{name: np.asarray(value) for name, value in each.items()} for each in made]


def _with_preprocessing(
    config: ModelConfig, function: UserFunction, rows: Sequence[Row], seen: Sequence[Row]
) -> ModelConfig:
    name = f"{PREPROCESS_FILE}:{function.name}"
    if config.preprocess is not None:
        raise ConfigError([f"preprocess: the model has one already, {config.preprocess.function}"])
    try:
        for row in seen:
            checked(name, row, config.inputs)
    except BackendFailed as error:
        raise ConfigError([f"preprocess: {error}"]) from None
    preprocess = Preprocess(name, config.inputs, config.padding)
    return replace(config, inputs=sent.specs_of(rows), padding=None, preprocess=preprocess)


def _postprocessed(plan: Plan, build: Build, function: UserFunction) -> ModelConfig:
    """Add the postprocessing function; its results on the examples give the output signature."""
    config = build.config
    if (known := config.postprocess) is not None:
        raise ConfigError([f"postprocess: the model has one already, {known.function}"])
    rows = open_examples(plan, config.inputs, config.max_batch_size > 0).rows[: sent.MAX_ROWS]
    try:
        answers = trials.answers(build, rows)
    except BackendFailed as error:
        raise ConfigError([f"postprocess: the model fails on the data: {error}"]) from error
    # Strings as objects, so that their length may vary.
    given = [
        {
            name: value.astype(object) if value.dtype.kind in "SU" else value
            for name, value in each.items()
        }
        for each in _called("postprocess", function, answers)
    ]
    try:
        outputs = sent.specs_of(given, "output")
    except ConfigError as error:
        raise ConfigError([f"postprocess: {problem}" for problem in error.problems]) from None
    name = f"{POSTPROCESS_FILE}:{function.name}"
    postprocess = Postprocess(name, config.outputs)
    config = replace(config, outputs=outputs, postprocess=postprocess)
    config = folders.write_config(build.folder, config)
    _check_copy(POSTPROCESS_FILE, lambda: apply_after(config, answers[:1]), given[0])
    return config


def _check_copy(file: str, call: Callable[[], list[Row]], expected: Row) -> None:
    """Check that the copied code works without the files that were not copied."""
    what = file.removesuffix(".py")
    where = f"{what}: {folders.VERSION}/{file}, the copy that is served,"
    try:
        (made,) = call()
    except Exception as error:  # Users' code may raise anything.
        advice = f"name files beside it that it reads in {user_code.FILES}"
        raise ConfigError([f"{where} fails: {describe_error(error)}; {advice}"]) from error
    if not all(
        np.array_equal(value, expected[name], equal_nan=value.dtype.kind == "f")
        for name, value in made.items()
    ):
        raise ConfigError([f"{where} gives something else than the original"])


def digest_of(folder: Path) -> str:
    """Return a digest of all files and their names, without compiled Python."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if "__pycache__" in path.parts:
            continue
        with path.open("rb") as file:
            part = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()} {part}\n".encode())
    return whole.hexdigest()
