"""A load with parameters: a configuration, and files, that replace those of the repository.

Checks what a client sent, before anything is written or read: names that are paths of a version's
files and nothing else, and that no code is among them unless the operator allows it. Pure but for
protobuf's parser; `loaded_folders` writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from penstock.config import LLM, LoadPermissions
from penstock.errors import BackendFailed, InvalidRequest, NotAllowed
from penstock.repository import layout, pbtxt
from penstock.repository.manifest import NAME as MANIFEST
from penstock.repository.parameters import FOLLOW_LINKS
from penstock.repository.pbtxt_fields import Proto
from penstock.types import Buffer, Parameter

CONFIG, FILE = "config", "file:"
MAX_FILES, MAX_PARTS, MAX_NAME_BYTES = 256, 8, 255
# Names that are neither hidden nor special to any shell, log or file system.
PART = re.compile(r"\w[\w .+@=-]*")
MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# What these files hold is only read. Everything else counts as code.
_SUFFIXES = ".onnx .data .onnx_data .xml .bin .gguf .safetensors .json .txt .csv .npy .model"
DATA_SUFFIXES = frozenset(_SUFFIXES.split())
# Backends that run no code from a model's files.
DATA_BACKENDS = frozenset(("onnxruntime", "openvino", "null", LLM))
# Parameters that choose functions, or libraries that are loaded; with a dot, all that begin so.
CODE_KEYS = (
    "penstock.factory",
    "penstock.preprocess",
    "penstock.postprocess",
    "penstock.env",
    FOLLOW_LINKS,
    "EXECUTION_ENV_PATH",
    "providers",
    "provider_options.",
    "session.",
    "ov.",
)
# Files of a version that are not the model's.
OWN_FILES = frozenset((layout.CONFIG, MANIFEST))
NEEDS_FILES = "start the server with --allow-load-files"
NEEDS_CODE = "start the server with --allow-load-code"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What replaces the repository's copy of a model. `files` are by their path in the model's
    folder, which begins with the version."""

    config: Proto | None = None
    files: Mapping[PurePosixPath, Buffer] = field(default_factory=dict)

    def describe(self) -> str:
        """Name what was sent, for the log."""
        sizes = [f"{path} ({len(data)} bytes)" for path, data in self.files.items()]
        return ", ".join(["a configuration", *sizes])


def parse(
    parameters: Mapping[str, Parameter],
    files: Mapping[str, Buffer],
    allowed: LoadPermissions,
) -> LoadRequest:
    """Check the parameters of a load. `files` are those whose value is a file's content.
    InvalidRequest if they are malformed, NotAllowed if the operator has not allowed them,
    BackendFailed if no file system could store them."""
    _check_kinds(parameters, files)
    given = parameters.get(CONFIG)
    if given is None:
        return LoadRequest()
    if not isinstance(given, str):
        raise InvalidRequest(f"parameter '{CONFIG}': expected a configuration as JSON text")
    if files and not allowed.files:
        raise NotAllowed(f"files cannot be loaded over the API; {NEEDS_FILES}")
    if len(files) > MAX_FILES:
        raise InvalidRequest(f"{len(files)} files; at most {MAX_FILES} can be sent with a load")
    found = {_path(name): data for name, data in files.items()}
    _check_folders(found)
    config = pbtxt.parse_json(given, f"parameter '{CONFIG}'")
    if not allowed.code:
        _refuse_code(found, config)
    return LoadRequest(config, found)


def _check_kinds(parameters: Mapping[str, Parameter], files: Mapping[str, Buffer]) -> None:
    for name in parameters:
        if name.startswith(FILE):
            raise InvalidRequest(f"parameter '{name}': expected the bytes of a file")
        if name != CONFIG:
            known = f"expected '{CONFIG}' or '{FILE}<version>/<name>'"
            raise InvalidRequest(f"unrecognized load parameter '{name}'; {known}")
    for name in files:
        if not name.startswith(FILE):
            raise InvalidRequest(f"parameter '{name}': expected text, not the bytes of a file")
        _check_length(name)
    if files and CONFIG not in parameters:
        raise InvalidRequest(
            f"'{FILE}' parameters need '{CONFIG}', the configuration of the model in these files"
        )


def _check_length(name: str) -> None:
    """Triton calls a name that no file system takes a failure of its own, and clients compare the
    status and the first words."""
    if any(len(part.encode()) > MAX_NAME_BYTES for part in name.removeprefix(FILE).split("/")):
        limit = f"part of its path has more than {MAX_NAME_BYTES} bytes"
        raise BackendFailed(f"failed to poll from model repository: '{name[:40]}...': {limit}")


def _path(name: str) -> PurePosixPath:
    """Return the path of a `file:` parameter in the model's folder."""
    text = name.removeprefix(FILE)
    parts = text.split("/")
    problem = ""
    if layout.VERSION.fullmatch(parts[0]) is None or int(parts[0]) > layout.MAX_VERSION:
        problem = f"'{parts[0]}' is no version number"
    elif len(parts) < 2:
        problem = "no file is named"
    elif len(parts) > MAX_PARTS:
        problem = f"more than {MAX_PARTS} folders"
    elif wrong := [part for part in parts[1:] if PART.fullmatch(part) is None]:
        problem = f"'{wrong[0]}' is not allowed in a path"
    elif len(parts) == 2 and parts[1] in OWN_FILES:
        problem = f"'{parts[1]}' cannot be sent; '{CONFIG}' is the configuration"
    if problem:
        raise InvalidRequest(
            f"parameter '{name}': {problem}; expected '{FILE}<version>/<name>', such as "
            f"'{FILE}1/model.onnx'"
        )
    return PurePosixPath(text)


def _check_folders(found: Mapping[PurePosixPath, Buffer]) -> None:
    for path in found:
        for parent in path.parents:
            if parent in found:
                raise InvalidRequest(
                    f"'{FILE}{parent}' and '{FILE}{path}' are both given: the first cannot be a "
                    "file and a folder"
                )


def check_name(name: str) -> None:
    """Raise InvalidRequest unless a model that comes with its files may have this name."""
    if MODEL_NAME.fullmatch(name) is None or len(name) > MAX_NAME_BYTES:
        expected = "expected letters, digits, _ . and -, not beginning with . or -"
        raise InvalidRequest(f"'{name[:MAX_NAME_BYTES]}' cannot be the name of a model; {expected}")


def _refuse_code(found: Mapping[PurePosixPath, Buffer], config: Proto) -> None:
    """Raise NotAllowed if there is code among the files, or a backend that would run them."""
    for path in found:
        if path.suffix.lower() not in DATA_SUFFIXES:
            what = f"'{FILE}{path}' may hold code, which cannot be loaded over the API"
            raise NotAllowed(f"{what}; {NEEDS_CODE}")
    backend = pbtxt.named_backend(config)
    if found and backend not in ("", *DATA_BACKENDS):
        what = f"backend '{backend}' runs code from a model's files"
        raise NotAllowed(f"{what}, which cannot be loaded over the API; {NEEDS_CODE}")
    if found:
        check_settings(config, None)


def check_settings(config: Proto, own: Proto | None) -> None:
    """Raise NotAllowed if a configuration chooses code that the model's own in the repository does
    not: a file to run, or a setting that can load libraries or run functions."""
    for what in (*_other_files(config, own), *_other_options(config, own)):
        raise NotAllowed(f"{what}, and the repository does not say so; {NEEDS_CODE}")


def _other_files(config: Proto, own: Proto | None) -> Iterator[str]:
    backend = pbtxt.named_backend(config)
    if config.HasField("model_operations") and (
        own is None or config.model_operations != own.model_operations
    ):
        yield "model_operations: these libraries would be loaded"
    if backend in DATA_BACKENDS:
        return
    # Without a backend, the files that are there decide.
    usual = pbtxt.FILES.get(backend, ()) if backend else sum(pbtxt.FILES.values(), ())
    known = {"", *usual, *(() if own is None else _named_files(own))}
    runner = f"backend '{backend}'" if backend else "a backend that is not named"
    for file in _named_files(config):
        if file not in known:
            yield f"default_model_filename: '{file}' may be run as code by {runner}"


def _named_files(config: Proto) -> list[str]:
    return [config.default_model_filename, *config.cc_model_filenames.values()]


def _other_options(config: Proto, own: Proto | None) -> Iterator[str]:
    given = config.optimization.execution_accelerators
    has_parameters = any(each.parameters for each in given.gpu_execution_accelerator)
    known = None if own is None else own.optimization.execution_accelerators
    if has_parameters and given != known:
        yield "optimization.execution_accelerators: its parameters may load code"
    for key, value in config.parameters.items():
        is_risky = any(
            key == each or (each.endswith(".") and key.startswith(each)) for each in CODE_KEYS
        )
        text = "" if own is None or key not in own.parameters else own.parameters[key].string_value
        if is_risky and value.string_value != text:
            yield f"parameters.{key}: '{value.string_value}' may load code"
