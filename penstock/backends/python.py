"""Models written in Python: the file `model.py`, in one of three forms.

`class TritonPythonModel`, an unchanged Triton model, sees each request of a batch by itself and
answers or fails each. Our own forms take the stacked batch as arrays by name and return such a
mapping: `class Model` with `infer(self, inputs)`, optionally `__init__(self, config)`, `load` and
`close`; or just `def infer(inputs)`. All may be `async def`. Input arrays are read-only, because a
batch may have to run again. Triton's `auto_complete_config` is not called.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from penstock import pbtxt
from penstock.backends import Batch, BatchRequest, Execution, Finished, Outputs, PerRequest
from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError, PenstockError, describe_error
from penstock.types import Array, Parameter, TensorSpec

TRITON = "TritonPythonModel"
EXPECTED = f"class {TRITON}, class Model with a method infer, or function infer"
MAX_TEXT_CHARS = 1000
log = logging.getLogger("penstock.python")
_numbers = itertools.count()


class Code:
    """A model's file as an imported module. Its folder is on sys.path until `close`, and the module
    has a package of its own, so `import other` and `from . import other` find files beside it."""

    def __init__(self, config: ModelConfig) -> None:
        self._path = Path(config.artifact)
        self._label = f"{config.version}/{config.file or self._path.name}"
        self._package = f"penstock_python_model_{next(_numbers)}"
        self._tasks: asyncio.Runner | None = None

    def load(self) -> ModuleType:
        """Run the file; raise ConfigError with the failing line."""
        if not self._path.is_file():
            what = "not a file" if self._path.exists() else "no such file"
            raise self.problem(f"{what}; expected Python code")
        folder = str(self._path.parent)
        package = ModuleType(self._package)
        package.__path__ = [folder]
        sys.modules[self._package] = package
        sys.modules["triton_python_backend_utils"] = pb_utils
        sys.path.insert(0, folder)
        name = f"{self._package}.model"
        spec = spec_from_file_location(name, self._path, loader=_Loader(name, str(self._path)))
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        with self.explained():
            spec.loader.exec_module(module)
        return module

    def result(self, value: Any) -> Any:
        """Return the value, awaited if it is awaitable, on one event loop for all calls."""
        if not inspect.isawaitable(value):
            return value
        if self._tasks is None:
            self._tasks = asyncio.Runner()

        async def wait() -> Any:
            return await value

        return self._tasks.run(wait())

    def problem(self, text: str) -> ConfigError:
        return ConfigError([f"{self._label}: {text[:MAX_TEXT_CHARS]}"])

    @contextmanager
    def explained(self, what: str = "") -> Iterator[None]:
        """Turn exceptions of the model's code during load into a ConfigError of one line."""
        try:
            yield
        except PenstockError:
            raise
        except BaseException as error:  # A model's code may raise anything, also SystemExit.
            if not isinstance(error, SyntaxError | ModuleNotFoundError):
                log.error("the model raised %s", type(error).__name__, exc_info=error)
            raise self.problem(what + self._describe(error)) from error

    def close(self) -> None:
        if self._tasks is not None:
            self._tasks.close()
        folder = str(self._path.parent)
        if folder in sys.path:
            sys.path.remove(folder)
        for name in [n for n in sys.modules if n.partition(".")[0] == self._package]:
            del sys.modules[name]

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError) and error.lineno is not None:
            file = Path(error.filename or self._path)
            where = "" if file == self._path else f"{file.name} "
            return f"{where}line {error.lineno}: {error.msg}"
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self._path)
        ]
        where = f"line {lines[-1]}: " if lines else ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.removeprefix(f"{self._package}.")
            return f"{where}needs the module '{name}', which is not installed and not beside it"
        return where + next(iter(describe_error(error).splitlines()), "")


class _Loader(SourceFileLoader):
    """Loader without bytecode cache: the repository may be read-only, and a cache stale."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class StackedRunner:
    """`class Model` or `def infer`: arrays of the whole batch in, arrays of the whole batch out."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    needs_requests = False
    keeps_rows_apart = False
    runs_ahead = False

    def __init__(self, code: Code, infer: Callable[[dict[str, Array]], Any], model: Any) -> None:
        self._code = code
        self._infer = infer
        self._model = model

    def built(self) -> Mapping[str, str]:
        return _built("infer" if self._model is None else "Model")

    def start(self, batch: Batch) -> Execution:
        outputs = self._code.result(self._infer(dict(batch.inputs)))
        if not isinstance(outputs, Mapping):
            raise BackendFailed(f"infer: expected arrays by name, got {type(outputs).__name__}")
        for name, values in outputs.items():
            if not isinstance(values, np.ndarray):
                raise BackendFailed(
                    f"output '{name}': expected a numpy array, got {type(values).__name__}"
                )
        return Finished(outputs)

    def close(self) -> None:
        _end(self._code, getattr(self._model, "close", None))


class TritonRunner:
    """A `TritonPythonModel`, called as Triton calls it."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    needs_requests = True
    keeps_rows_apart = False
    runs_ahead = False

    def __init__(self, config: ModelConfig, code: Code, model: Any) -> None:
        self._config = config
        self._code = code
        self._model = model
        self._datatypes = {spec.name: spec.datatype for spec in config.inputs}
        self._output_names = [spec.name for spec in config.outputs]

    def built(self) -> Mapping[str, str]:
        return _built(TRITON)

    def start(self, batch: Batch) -> Execution:
        """Run a batch. Without `batch.requests` it counts as one request with one answer."""
        parts = batch.requests or (_Anonymous(batch.num_rows),)
        responses = self._code.result(self._model.execute(self._requests(batch.inputs, parts)))
        if not isinstance(responses, Sequence) or len(responses) != len(parts):
            got = len(responses) if isinstance(responses, Sequence) else type(responses).__name__
            raise BackendFailed(
                f"execute: expected {len(parts)} responses to {len(parts)} requests, got {got}"
            )
        answers = [_answer(response) for response in responses]
        if batch.requests:
            return Finished(PerRequest(answers))
        (answer,) = answers
        if isinstance(answer, Exception):
            raise answer
        return Finished(answer)

    def close(self) -> None:
        _end(self._code, getattr(self._model, "finalize", None))

    def _requests(
        self, inputs: Mapping[str, Array], parts: Sequence[BatchRequest]
    ) -> list[pb_utils.InferenceRequest]:
        """Return each request with its rows of the stacked inputs, as views."""
        is_batched = self._config.max_batch_size > 0
        requests: list[pb_utils.InferenceRequest] = []
        row = 0
        for part in parts:
            end = row + part.num_rows
            requests.append(
                pb_utils.InferenceRequest(
                    request_id=part.id,
                    inputs=[
                        pb_utils.Tensor(
                            name, array[row:end] if is_batched else array, self._datatypes[name]
                        )
                        for name, array in inputs.items()
                    ],
                    requested_output_names=part.outputs or self._output_names,
                    model_name=self._config.name,
                    model_version=int(self._config.version),
                    parameters=part.parameters,
                )
            )
            row = end
        return requests


@dataclass(frozen=True, slots=True)
class _Anonymous:
    """The only request of a batch without `requests`."""

    num_rows: int
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    length: int = 0


def load(config: ModelConfig) -> TritonRunner | StackedRunner:
    if "EXECUTION_ENV_PATH" in config.options:
        raise ConfigError(
            [
                "parameters.EXECUTION_ENV_PATH: not supported; "
                f"models run in the server's own Python ({sys.executable})"
            ]
        )
    code = Code(config)
    try:
        module = code.load()
        if hasattr(module, TRITON):
            return _load_triton(config, code, module)
        return _load_own(config, code, module)
    except BaseException:
        code.close()
        raise


def _load_triton(config: ModelConfig, code: Code, module: ModuleType) -> TritonRunner:
    """Load a Triton model; its file's other classes and functions are ignored."""
    kind = getattr(module, TRITON)
    if not callable(getattr(kind, "execute", None)):
        raise code.problem(f"{TRITON}: no method execute(self, requests)")
    with code.explained(f"{TRITON}(): "):
        model = kind()
    if hasattr(model, "initialize"):
        with code.explained("initialize: "):
            model.initialize(_arguments(config))
    return TritonRunner(config, code, model)


def _load_own(config: ModelConfig, code: Code, module: ModuleType) -> StackedRunner:
    kind, infer = getattr(module, "Model", None), getattr(module, "infer", None)
    has_model = inspect.isclass(kind) and callable(getattr(kind, "infer", None))
    has_infer = callable(infer) and not inspect.isclass(infer)
    if has_model == has_infer:
        what = "class Model and function infer" if has_model else "no model"
        raise code.problem(f"defines {what}; expected {EXPECTED}")
    if infer is not None and has_infer:
        return StackedRunner(code, infer, None)
    with code.explained("Model(): "):
        model = _construct(kind, config)
    if hasattr(model, "load"):
        with code.explained("load: "):
            code.result(model.load())
    return StackedRunner(code, model.infer, model)


def _construct(kind: Any, config: ModelConfig) -> Any:
    """Create the model, passing the configuration if its class takes it."""
    try:
        inspect.signature(kind).bind(config)
    except TypeError:
        return kind()
    return kind(config)


def _arguments(config: ModelConfig) -> dict[str, str]:
    """Return the arguments that Triton passes to `initialize`."""
    version_folder = Path(config.artifact).parents[max(1, len(Path(config.file).parts)) - 1]
    return {
        "model_config": json.dumps(pbtxt.to_json(config)),
        "model_instance_kind": "CPU",
        "model_instance_name": f"{config.name}_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(version_folder.parent),
        "model_version": config.version,
        "model_name": config.name,
    }


def _answer(response: object) -> Outputs | Exception:
    if not isinstance(response, pb_utils.InferenceResponse):
        return BackendFailed(
            f"execute: expected an InferenceResponse, got {type(response).__name__}"
        )
    error = response.error()
    if error is not None:
        return BackendFailed(error.message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _built(form: str) -> Mapping[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "form": form}


def _end(code: Code, goodbye: Callable[[], Any] | None) -> None:
    """Close the model, which may fail, and then its module."""
    try:
        if goodbye is not None:
            code.result(goodbye())
    except BaseException:  # A model's code may raise anything; the worker exits all the same.
        log.exception("the model failed while it was closed")
    finally:
        code.close()
