"""Reads a folder of models in Triton's layout into resolved configurations.

    <repository>/<model>/[config.pbtxt]
    <repository>/<model>/<version>/model.onnx [config.pbtxt] [manifest.json]

The model's config.pbtxt chooses versions; a version's own applies to that version alone; without
any, the file says all. A language model needs no version: its Hugging Face folder or its GGUF file
is enough. All problems of all models are found in one pass. Links may not lead out of the
repository, and names that start with a dot are ignored. `versions` writes to repositories.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from penstock.config import LLM, ModelConfig
from penstock.errors import ConfigError, InvalidRequest, NotFound
from penstock.repository import (
    links,
    onnx_file,
    parameters,
    pbtxt,
    pbtxt_warmup,
    pretrained,
    pretrained_message,
)
from penstock.repository import manifest as manifests
from penstock.repository.pbtxt_fields import Proto

CONFIG = "config.pbtxt"
# Other configurations of a model, of which the operator chooses one by name.
CONFIGS, CONFIG_NAME = "configs", re.compile(r"[\w-][\w.-]*", re.ASCII)
# Hugging Face's configuration; weights are beside it.
TEXT_CONFIG = pretrained.CONFIG
GGUF = ".gguf"
RANDOM = "penstock.random_weights"
VERSION, MAX_VERSION = re.compile("[1-9][0-9]*"), 2**63 - 1
PICKLED = (
    "; pytorch_model.bin is a pickle, which can run any code: load the model with transformers "
    "where it is trusted and write it with save_pretrained"
)
NOT_OVERRIDDEN = (
    "'config' needs a model's folder with versions; change the files and load it without parameters"
)
FOLLOW_HINT = f"; parameters.{parameters.FOLLOW_LINKS} 'true' allows that"


@dataclass(slots=True)
class RepositoryScan:
    """The contents of a repository: loadable versions; problems and folders by model."""

    configs: list[ModelConfig] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    # Models that were not asked for, but that ensembles run.
    members: set[str] = field(default_factory=set)

    def add(self, other: RepositoryScan) -> None:
        self.configs += other.configs
        self.problems |= other.problems
        self.folders |= other.folders

    def only(self, where: object, version: str, advice: str) -> ModelConfig:
        """Return the one model, in its newest or the given version; ConfigError if any model has a
        problem, if there are several, with the advice, or none of that version."""
        if self.problems:
            raise ConfigError([f"{where}: {text}" for text in flat(self.problems)])
        configs = [config for config in self.configs if version in ("", config.version)]
        if not configs:
            there = ", ".join(config.version for config in self.configs)
            models = ", ".join(self.folders)
            raise ConfigError([f"{where}: {models} has no version {version}; there: {there}"])
        if len(names := {config.name for config in configs}) > 1:
            raise ConfigError([f"{where}: holds {listed(sorted(names))}; {advice}"])
        return configs[-1]


class ModelKind(enum.Enum):
    """The forms in which a model can be given; the values name them in messages."""

    ONNX_FILE = "an ONNX file"
    PT2_FILE = "an exported PyTorch program"
    OPENVINO_FILE = "an OpenVINO model"
    GGUF_FILE = "a GGUF file"
    PYTHON_FILE = "a Python file"
    FACTORY = "a factory of PyTorch modules"
    HUGGING_FACE = "a Hugging Face folder"
    MODEL_FOLDER = "a model's folder"
    VERSION_FOLDER = "a version of a model"
    REPOSITORY = "a model repository"
    URL = "a running server"


def folder_kind(path: Path) -> ModelKind:
    """Say what a folder, or a GGUF file, holds. `model_source.resolve` covers all other forms."""
    if _is_gguf(path):
        return ModelKind.GGUF_FILE
    root = Path(os.path.abspath(path))
    if not root.is_dir():
        raise ConfigError(f"{path}: no such folder; expected a model repository or a model")
    if _is_version(root):
        return ModelKind.VERSION_FOLDER
    if _is_text_folder(root):
        return ModelKind.HUGGING_FACE
    if _is_model(root):
        return ModelKind.MODEL_FOLDER
    is_described = (root / TEXT_CONFIG).is_file() and not holds_models(root)
    return ModelKind.HUGGING_FACE if is_described else ModelKind.REPOSITORY


def holds_models(root: Path) -> bool:
    """Whether a folder is a repository with at least one model, loadable or not."""
    return any(map(_is_model, _folders(root)))


def read(path: str | os.PathLike[str], config_name: str = "") -> RepositoryScan:
    """Read every model of a repository, or the one model or version if `path` is its folder, or the
    language model if it is a GGUF file. `configs/<config_name>.pbtxt` of a model, if it is there,
    is used instead of each config.pbtxt."""
    root = Path(os.path.abspath(path))
    match folder_kind(root):
        case ModelKind.GGUF_FILE | ModelKind.HUGGING_FACE:
            return read_hugging_face(root)
        case ModelKind.VERSION_FOLDER:
            # One version, whatever the model's version policy says.
            folder = root.parent.resolve()
            return _read_all([folder], folder, only=root.name, config_name=config_name)
        case ModelKind.MODEL_FOLDER:
            # The operator may name a link: the repository is where it leads.
            return _read_all([root], root.resolve(), config_name=config_name)
    if not holds_models(root):
        raise ConfigError(
            f"{path}: holds no model; expected <model>/<version>/model.onnx, "
            f"with the version a number, or {TEXT_CONFIG} and {pretrained.WEIGHTS[0]}"
        )
    return _read_all(_folders(root), root, config_name=config_name)


def _read_all(
    folders: Sequence[Path],
    root: Path,
    only: str = "",
    override: Proto | None = None,
    config_name: str = "",
) -> RepositoryScan:
    found = RepositoryScan()
    for folder in folders:
        name = _name(folder)
        if name in found.folders:
            problem = f"both {found.folders[name].name} and {folder.name} are called '{name}'"
            found.problems[name] = [f"{problem}; expected one of that name"]
            found.configs = [config for config in found.configs if config.name != name]
            continue
        if _is_gguf(folder) or _is_text_folder(folder):
            if override is not None:
                raise InvalidRequest(f"{name}: {NOT_OVERRIDDEN}")
            found.add(read_hugging_face(folder))
            continue
        found.folders[folder.name] = folder
        try:
            chosen_config = override or _read_named(folder, config_name, root)
            found.configs += _read_model(folder, root, only, chosen_config)
        except ConfigError as error:
            found.problems[folder.name] = list(error.problems)
        except OSError as error:
            where = os.path.relpath(error.filename or folder, folder.parent)
            found.problems[folder.name] = [f"{where}: cannot be read: {error.strerror}"]
    return found


def refuse_hard_links(found: RepositoryScan) -> RepositoryScan:
    """Refuse models whose external ONNX weights, labels, configurations, manifests, warm-up files
    or Python modules have several hard links: such a file may be any file of the file system under
    a harmless name."""
    problems = {name: list(each) for name, each in found.problems.items()}
    for config in found.configs:
        folder = found.folders[config.name]
        is_alone = not has_version_folder(folder, config)
        linked = _linked_weights(config, is_alone)
        linked += [] if is_alone else _linked_files(folder, config)
        if linked:
            known = problems.setdefault(config.name, [])
            known += [problem for problem in linked if problem not in known]
    configs = [config for config in found.configs if config.name not in problems]
    return RepositoryScan(configs, problems, found.folders)


def has_version_folder(folder: Path, config: ModelConfig) -> bool:
    """Whether the version lies in a folder of its own. A model that is a file by itself does not,
    nor a language model in a Hugging Face folder, whose files may be links into a cache."""
    version = folder / config.version
    return version.is_dir() and Path(config.artifact).is_relative_to(version.resolve())


def _linked_weights(config: ModelConfig, is_alone: bool) -> list[str]:
    if not config.artifact.endswith(".onnx"):
        return []
    try:
        names = onnx_file.find_hard_links(Path(config.artifact), is_alone=is_alone)
    except ConfigError as error:
        return [f"{config.version}/{Path(config.artifact).name}: {error}"]
    return [_hard_link(f"{config.version}/{name}") for name in names]


def _linked_files(folder: Path, config: ModelConfig) -> list[str]:
    """Return problems of hard-linked files that the server reads besides the artifact."""
    version = folder / config.version
    labels = [each.label_file for each in config.outputs if each.label_file]
    names = [CONFIG, *labels]
    files = [place / name for place in (folder, version) for name in names]
    files += [version / manifests.NAME, *links.walk(folder / pbtxt_warmup.FOLDER)]
    files += links.walk(folder / CONFIGS)
    files += [file for file in links.walk(version.resolve()) if file.suffix == ".py"]
    shared = [file for file in dict.fromkeys(files) if links.is_shared(file)]
    return [_hard_link(os.path.relpath(file, folder)) for file in shared]


def _hard_link(name: str) -> str:
    return (
        f"{name}: has further hard links and may be a file from outside the model; copy it, or "
        "allow hard links with --allow-hard-links"
    )


def read_alone(name: str, folder: Path, read: Callable[[], ModelConfig]) -> RepositoryScan:
    """Read a model that has no versions as version 1."""
    found = RepositoryScan(folders={name: folder})
    try:
        found.configs.append(replace(read(), version="1"))
    except ConfigError as error:
        found.problems[name] = list(error.problems)
    return found


def read_made_up(path: str | os.PathLike[str]) -> RepositoryScan:
    """Make a language model with the sizes in a config.json and random weights: for speed tests."""
    file = Path(os.path.abspath(path))
    if file.is_dir():
        file = file / TEXT_CONFIG
    if not file.is_file() or file.suffix != ".json":
        raise ConfigError(f"{path}: expected a model's {TEXT_CONFIG}, whose sizes it gets")
    name = file.parent.name if file.name == TEXT_CONFIG else file.stem
    message = pbtxt.parse("")
    message.backend = LLM
    message.parameters[RANDOM].string_value = "true"
    config = pbtxt.resolve(message, name, file.parent, file)
    return RepositoryScan([replace(config, version="1")], folders={name: file.parent})


def read_hugging_face(folder: Path) -> RepositoryScan:
    """Read a Hugging Face folder, as `save_pretrained` writes it, or a GGUF file; links in a folder
    may lead anywhere, as in Hugging Face's cache."""
    if _is_gguf(folder):
        return read_alone(folder.stem, folder.parent, lambda: _text_config(folder))

    def read() -> ModelConfig:
        if not pretrained.is_model(folder):
            expected = f"{pretrained.WEIGHTS[0]} or {pretrained.ONNX[-1]}"
            hint = PICKLED if any(folder.glob("pytorch_model*.bin")) else ""
            raise ConfigError(f"{TEXT_CONFIG} is there, but no weights; expected {expected}{hint}")
        described, message = pretrained.read(folder), read_message(folder)
        if described is None or message.backend == LLM:
            return _text_config(folder)
        written = pbtxt.to_text(message)
        artifact = pretrained_message.complete(message, described)
        config = pbtxt.resolve(message, folder.name, folder, artifact)
        notes = (*config.notes, *pretrained_message.notes(folder, described.head))
        return replace(config, written=written, notes=notes)

    return read_alone(folder.name, folder, read)


def architectures(folder: Path) -> list[str]:
    """Return the architectures in config.json; empty without such a file."""
    path = folder / TEXT_CONFIG
    if not path.is_file():
        return []
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    names = found.get("architectures") if isinstance(found, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _text_config(path: Path) -> ModelConfig:
    """Return the configuration of a language model in a GGUF file or a folder by itself."""
    if not _is_gguf(path):
        message = read_message(path)
        message.backend = message.backend or LLM
        return pbtxt.resolve(message, path.name, path, path / TEXT_CONFIG)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(f"{path.name}: not a GGUF file: it does not begin with 'GGUF'")
    # Files beside it do not belong to it.
    message = pbtxt.parse("")
    message.backend = LLM
    return pbtxt.resolve(message, path.stem, path.parent, path)


def _is_gguf(path: Path) -> bool:
    return path.suffix == GGUF and path.is_file()


def _name(entry: Path) -> str:
    return entry.stem if _is_gguf(entry) else entry.name


def _is_text_folder(folder: Path) -> bool:
    try:
        return pretrained.is_model(folder) and not version_folders(folder)
    except OSError:
        return False


def names(path: str | os.PathLike[str]) -> list[str]:
    """Return the models of a repository by name, loadable or not."""
    root = Path(os.path.abspath(path))
    match folder_kind(root):
        case ModelKind.REPOSITORY:
            return [_name(folder) for folder in _folders(root)]
        case ModelKind.VERSION_FOLDER:
            return [root.resolve().parent.name]
    return [_name(root)]


def read_one(
    path: str | os.PathLike[str],
    name: str,
    version: str = "",
    override: Proto | None = None,
    config_name: str = "",
) -> RepositoryScan:
    """Read one model of a repository: the versions that its policy selects, or only the given one.
    `override` is used instead of each config.pbtxt there. The names are compared, never used as
    paths."""
    root = Path(os.path.abspath(path))
    there = names(root)
    if name not in there:
        raise NotFound(
            f"no such model: '{name}' is not in the model repository; there: {listed(there)}"
        )
    if (kind := folder_kind(root)) is not ModelKind.REPOSITORY:
        if override is None:
            return read(root, config_name)
        if kind is not ModelKind.MODEL_FOLDER:
            raise InvalidRequest(f"{name}: {NOT_OVERRIDDEN}")
        return _read_all([root], root.resolve(), override=override)
    folders = [folder for folder in _folders(root) if _name(folder) == name]
    if version and not any(version in version_folders(each) for each in folders if each.is_dir()):
        raise NotFound(f"{name}: no such version: '{version}'")
    return _read_all(folders, root, version, override, config_name)


def flat(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the problems of models, each with its model's name."""
    return [f"{name}: {text}" for name, texts in problems.items() for text in texts]


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first `most` names as a list for a message, and how many more there are."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text or "none"


def _folders(root: Path) -> list[Path]:
    """List what may be a model: folders, and GGUF files."""
    try:
        entries = [entry for entry in root.iterdir() if not entry.name.startswith(".")]
        return sorted(entry for entry in entries if entry.is_dir() or _is_gguf(entry))
    except OSError as error:
        raise ConfigError(f"{root}: cannot be read: {error.strerror}") from None


def _read_model(
    folder: Path, root: Path, only: str, override: Proto | None = None
) -> list[ModelConfig]:
    """Read the versions of one model that its version policy selects, or `only` that one."""
    if not folder.resolve().is_relative_to(root.resolve()):
        raise ConfigError("folder: a link that leads out of the repository")
    _check_links(folder, root, sorted(each for each in folder.iterdir() if not each.is_dir()))
    _check_links(folder, root, [folder / pbtxt_warmup.FOLDER])
    message = read_message(folder) if override is None else override
    problems: list[str] = []
    versions = [only] if only else chosen(folder, message, problems)
    configs: list[ModelConfig] = []
    for version in versions:
        try:
            if not parameters.follows_links(message):
                hint = FOLLOW_HINT if message.backend == LLM else ""
                _check_links(folder, root, _of_version(folder, version, root), hint)
            config = read_version(folder, version, message, override is not None)
            pbtxt_warmup.check_files(config.warmups)
            configs.append(config)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return configs


def _check_links(folder: Path, root: Path, paths: Sequence[Path], hint: str = "") -> None:
    outward = [os.path.relpath(path, folder) for path in links.find_outward(paths, root)]
    if outward:
        problem = f"a link that leads out of the repository{hint}"
        raise ConfigError([f"{name}: {problem}" for name in outward])


def _of_version(folder: Path, version: str, root: Path) -> list[Path]:
    """Return the paths whose links may not lead out of the repository: the whole version, or only
    its configuration if that allows other links to."""
    own = folder / version / CONFIG
    if not own.is_file() or links.leads_out(own, root):
        return [folder / version]
    return [own] if parameters.follows_links(read_message(folder, version)) else [folder / version]


def read_message(folder: Path, version: str = "") -> Proto:
    """Read the config.pbtxt of a model, or of one of its versions; an empty message without one."""
    where = f"{version}/{CONFIG}" if version else CONFIG
    return _parse_file(folder / where, where)


def _parse_file(path: Path, where: str) -> Proto:
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from None
    return pbtxt.parse(text, where)


def read_own_message(path: str | os.PathLike[str], name: str, config_name: str = "") -> Proto:
    """Read the configuration of one model of a repository; an empty message without one."""
    root = Path(os.path.abspath(path))
    is_repository = name in names(root) and folder_kind(root) is ModelKind.REPOSITORY
    folder = root / name if is_repository else root
    return _read_named(folder, config_name, root) or read_message(folder)


def _read_named(folder: Path, config_name: str, root: Path) -> Proto | None:
    """Read the configuration that the operator has chosen by name, if the model has it."""
    path = folder / CONFIGS / f"{config_name}.pbtxt"
    if not config_name or not path.is_file():
        return None
    _check_links(folder, root, [path.parent])
    return _parse_file(path, f"{CONFIGS}/{path.name}")


def has_own_config(folder: Path, version: str) -> bool:
    return (folder / version / CONFIG).is_file()


def read_version(
    folder: Path, version: str, message: Proto, is_override: bool = False
) -> ModelConfig:
    """Read one version, by its own config.pbtxt or else by `message`, the model's, or by `message`
    alone if that is an override. An incomplete version is refused unread. The evidence's SLO
    applies if the configuration has none."""
    path = folder / version
    manifest = manifests.read(path)
    if manifest is None:
        return _resolve(folder, version, message, is_override)
    if problems := manifests.check_files(manifest, path):
        raise ConfigError(problems)
    try:
        promised = manifests.promised(manifest.evidence)
    except ConfigError as error:
        promised = None
        problems += [f"{version}/{manifests.NAME}: {problem}" for problem in error.problems]
    try:
        config = _resolve(folder, version, message, is_override)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    price = manifests.price_per_hour(manifest.evidence)
    config = replace(config, manifest=str(path / manifests.NAME), price_per_hour=price)
    if promised is None or config.slo:
        return config
    if unkept := manifests.unkept(manifest.evidence):
        # Enforcing it would refuse requests in vain.
        return replace(config, unkept_slo=f"{promised} ({unkept})")
    batching = replace(config.batching, slo_latency_s=promised.latency_s)
    return replace(config, slo=str(promised), is_slo_from_evidence=True, batching=batching)


def _resolve(folder: Path, version: str, message: Proto, is_override: bool) -> ModelConfig:
    if is_override or not has_own_config(folder, version):
        return pbtxt.resolve(message, folder.name, folder / version)
    policy = message.version_policy if message.HasField("version_policy") else None
    message = read_message(folder, version)
    ignored = message.HasField("version_policy")
    # The model's policy applies.
    message.ClearField("version_policy")
    if policy is not None:
        message.version_policy.CopyFrom(policy)
    where = f"{version}/{CONFIG}"
    try:
        config = pbtxt.resolve(message, folder.name, folder / version)
    except ConfigError as error:
        raise ConfigError(
            [
                # Problems of other files already begin with their path.
                text if text.startswith(f"{version}/") else f"{where}: {text}"
                for text in error.problems
            ]
        ) from None
    if not ignored:
        return config
    why = f"has no effect; {CONFIG} of the model chooses versions"
    return replace(config, warnings=(*config.warnings, f"{where}: version_policy: {why}"))


def about(folder: Path, config: ModelConfig) -> list[str]:
    """Return the lines that `penstock inspect` prints about a version besides its configuration."""
    notes = [f"note: {note}" for note in config.notes]
    notes += [f"warning: {warning}" for warning in config.warnings]
    if not has_version_folder(folder, config):
        # A Hugging Face folder may have a configuration; files beside a single file are not its.
        is_folder = Path(config.artifact).name == TEXT_CONFIG and (folder / CONFIG).is_file()
        return [f"configuration: {CONFIG if is_folder else 'worked out from the file'}", *notes]
    version = config.version
    where = f"{version}/{CONFIG}" if has_own_config(folder, version) else CONFIG
    source = where if (folder / where).is_file() else "worked out from the file"
    lines = [f"versions: {', '.join(version_folders(folder))}", f"configuration: {source}"]
    manifest = manifests.read(folder / version)
    if manifest is None:
        lines.append("manifest: none, the files are taken as they are")
    else:
        count = len(manifest.files)
        lines.append(
            f"manifest: {count} file{'s' * (count > 1)}, {manifest.num_bytes} bytes, committed "
            f"{manifest.created}; sizes agree, digests are checked at load"
        )
    if config.slo:
        source = f"{version}/{manifests.NAME}: evidence.slo"
        lines.append(f"slo: {config.slo}, from {source if config.is_slo_from_evidence else where}")
    elif note := config.unkept_note:
        lines.append(f"slo: none; {note}")
    return lines + notes


def _is_model(folder: Path) -> bool:
    """Whether it is a model; an unreadable folder counts, so that reading it reports why."""
    try:
        if not folder.is_dir():
            return _is_gguf(folder)
        has_config = (folder / CONFIG).is_file() or bool(version_folders(folder))
        return has_config or _is_text_folder(folder)
    except PermissionError:
        return True


def _is_version(folder: Path) -> bool:
    """Whether it is a folder named by a number that holds neither versions nor models, which may be
    named by numbers too."""
    if not folder.name.isdigit() or folder.name not in version_folders(folder.parent):
        return False
    return not version_folders(folder) and not holds_models(folder)


def version_folders(folder: Path) -> list[str]:
    """Return the names that are version numbers: digits without a leading zero, within 64 bits."""
    numbers = [each.name for each in folder.iterdir() if VERSION.fullmatch(each.name)]
    found = [each for each in numbers if int(each) <= MAX_VERSION and (folder / each).is_dir()]
    return sorted(found, key=int)


def chosen(folder: Path, message: Proto, problems: list[str]) -> list[str]:
    """Return the versions that the policy selects, without those that are missing."""
    available = version_folders(folder)
    if not available:
        raise ConfigError(
            "no version folder; expected one named by a number, such as 1/ with the model's file"
        )
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return available
        case "specific":
            wanted = {str(number) for number in policy.specific.versions}
            missing = sorted(wanted - set(available))
            if missing or not wanted:
                problem = f"no version {', '.join(missing) or 'named'}"
                there = ", ".join(available)
                problems.append(f"version_policy.specific: {problem}; there are {there}")
            return [version for version in available if version in wanted] or available[-1:]
        case _:
            return available[-max(1, policy.latest.num_versions) :]
