"""Open a language model of any supported form and write it as a servable model folder. Files are
linked where the file system allows, because weights take gigabytes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.config import EACH_GPU, LLM, ModelConfig
from penstock.errors import ConfigError
from penstock.llm.settings import PREFIX, settings_of
from penstock.optimizer import folders, workspace
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.subject import SERVED, Subject, digest_of, placed
from penstock.repository import layout, pretrained
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import ModelSource, resolve

if TYPE_CHECKING:
    from penstock.llm.models.shape import DecoderShape

# Files beside the weights: configurations, tokenizers and templates.
BESIDE = (".json", ".jinja", ".txt", ".model")
WHOLE, INDEX = pretrained.WEIGHTS


@dataclass(frozen=True, slots=True)
class TextSubject(Subject):
    """A language model: "Hugging Face, 135 M parameters, float32"."""

    num_parameters: int = 0
    # Context length that it is served with: prompt and answer, in tokens.
    max_length: int = 0


def open_text_subject(model: str, device: str, target: Path) -> TextSubject:
    """Write the original to `target`. ConfigError says what is wrong and what is supported."""
    path = Path(model)
    (target / folders.VERSION).mkdir(parents=True)
    config, kind, files = _found(path)
    for name, file in files.items():
        folders.link(file, target / folders.VERSION / name)
    config = folders.write_config(target, _with_dtype(_on_device(config, device)))
    settings = settings_of(config)
    shape = _shape(settings.path)
    size = f"{shape.num_parameters / 1e6:,.0f} M parameters"
    return TextSubject(
        Build(Candidate(), target, config),
        kind,
        digest_of(target),
        f"{kind}, {size}, {settings.dtype}",
        num_parameters=shape.num_parameters,
        max_length=min(settings.max_length, shape.max_length),
    )


def _with_dtype(config: ModelConfig) -> ModelConfig:
    """Fix the datatype of a GGUF model: the engine's own choice could change the baseline."""
    settings = settings_of(config)
    if not settings.is_dtype_free or Path(settings.path).suffix != layout.GGUF:
        return config
    return replace(config, options={**config.options, f"{PREFIX}dtype": settings.dtype})


def _found(path: Path) -> tuple[ModelConfig, str, dict[str, Path]]:
    """Return its configuration, its kind, and its files by the names they get in the folder."""
    source = resolve(path)
    config = _read(source)
    if source.kind is ModelKind.GGUF_FILE:
        return config, "GGUF", {f"model{layout.GGUF}": path}
    if source.kind is ModelKind.HUGGING_FACE:
        return config, "Hugging Face", _folder_files(path)
    is_version = source.kind is ModelKind.VERSION_FOLDER
    folder = source.path if is_version else source.path / config.version
    files = {each.name: each for each in folder.iterdir() if each.is_file()}
    kept = {name: each for name, each in files.items() if name not in folders.OF_A_COMMIT}
    # The SLO of the old version does not apply to the new one.
    config = replace(config, slo="", is_slo_from_evidence=False, unkept_slo="")
    return config, f"{SERVED} {config.version}", kept


def _read(source: ModelSource) -> ModelConfig:
    path = source.path
    found = source.read()
    for problems in found.problems.values():
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    config = found.configs[-1]
    if config.backend != LLM:
        raise ConfigError([f"{path}: backend is '{config.backend}'; expected '{LLM}'"])
    return config


def _folder_files(folder: Path) -> dict[str, Path]:
    """Return the weights and the files that belong to them, not the folder's other formats."""
    shards = [WHOLE]
    if (folder / INDEX).is_file():
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=dict[str, object])
        named = index.get("weight_map")
        shards = sorted(set(named.values())) if isinstance(named, dict) else shards
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ConfigError([f"{folder}: {', '.join(missing)} is not there"])
    beside = [each.name for each in folder.iterdir() if each.suffix in BESIDE and each.is_file()]
    return {name: folder / name for name in (*shards, *beside) if not name.startswith(".")}


def _on_device(config: ModelConfig, device: str) -> ModelConfig:
    """Use the plan's device, else the one of `penstock serve`. An engine runs on one GPU."""
    if device != "auto":
        config = config.on([f"{EACH_GPU}:0" if device == EACH_GPU else device])
    return placed(config, device)


def _shape(path: str) -> DecoderShape:
    """Return the model's shape; ConfigError if its family is not supported."""
    from penstock.llm.checkpoint import open_checkpoint

    with closing(open_checkpoint(Path(path))) as checkpoint:
        return checkpoint.shape


def build_of(original: Build, candidate: Candidate, target: Path) -> Build:
    """Return the original with the candidate's settings, built once."""
    config = with_steps(original.config, candidate)
    return workspace.place(replace(original, candidate=candidate, config=config), target)


def with_steps(config: ModelConfig, candidate: Candidate) -> ModelConfig:
    """Add the settings of the steps; later steps override earlier ones."""
    options = dict(config.options)
    for step in candidate.steps:
        options |= {f"{PREFIX}{name}": value for name, value in step.settings.items()}
    return replace(config, options=options)
