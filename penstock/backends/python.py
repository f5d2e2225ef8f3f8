"""Models written in Python: the file `model.py`, in one of three forms (docs/python-models.md).

An unchanged `TritonPythonModel` sees each request of a batch by itself and answers or fails each.
`class Model` or a function takes the stacked batch as a mapping of arrays, or its inputs by name,
then either the whole batch or one row (`python_signature`). All may be `async def`. Input arrays
are read-only, because a batch may have to run again.
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
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Protocol

import numpy as np

from penstock.backends import Batch, BatchRequest, Execution, Outputs, Runner
from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.backends.finished import Finished, finish
from penstock.backends.python_signature import TRITON, CallForm, find_entry, read_form
from penstock.backends.stateful import END, ID, START
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError, PenstockError, describe_error
from penstock.repository import pbtxt
from penstock.types import Array, Parameter
from penstock.wire.frames import RequestPart

MAX_TEXT_CHARS = 1000
log = logging.getLogger("penstock.python")
_numbers = itertools.count()


class Code:
    """A model's file as an imported module. Its folder is on sys.path until `close`, and the module
    has a package of its own, so `import other` and `from . import other` find files beside it."""

    def __init__(self, config: ModelConfig) -> None:
        self._path = Path(config.artifact)
        self._label = config.label
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
        pb_utils.MODEL_DIR.set(folder)
        name = f"{self._package}.model"
        spec = spec_from_file_location(name, self._path, loader=_Loader(name, str(self._path)))
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        with self.explained():
            spec.loader.exec_module(module)
        return module

    def result(self, value: object) -> object:
        """Return the value, awaited if it is awaitable, on one event loop for all calls."""
        if not inspect.isawaitable(value):
            return value
        if self._tasks is None:
            self._tasks = asyncio.Runner()

        async def wait() -> object:
            return await value

        return self._tasks.run(wait())

    def problem(self, text: str) -> ConfigError:
        return ConfigError(f"{self._label}: {text[:MAX_TEXT_CHARS]}")

    @contextmanager
    def explained(self, what: str = "") -> Iterator[None]:
        """Turn exceptions of the model's code during load into a ConfigError of one line."""
        try:
            yield
        except PenstockError:
            raise
        except BaseException as error:  # A model's code may raise anything, also SystemExit.
            if not self._says_all(error):
                log.error("the model raised %s", type(error).__name__, exc_info=error)
            raise self.problem(what + self._describe(error)) from error

    def close(self) -> None:
        if self._tasks is not None:
            self._tasks.close()
        folder = str(self._path.parent)
        if folder in sys.path:
            sys.path.remove(folder)
        for name in [n for n in list(sys.modules) if n.partition(".")[0] == self._package]:
            del sys.modules[name]

    def _says_all(self, error: BaseException) -> bool:
        """Whether one line says all; other errors are logged with their traceback."""
        if isinstance(error, OSError):
            return bool(error.filename == str(self._path))  # The file itself cannot be read.
        return isinstance(error, SyntaxError | ModuleNotFoundError | SystemExit)

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError) and error.lineno is not None:
            file = Path(error.filename or self._path)
            where = "" if file == self._path else f"{file.name} "
            return f"{where}line {error.lineno}: {error.msg}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._path)]
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


class FunctionRunner(Runner):
    """`class Model` or a function: called with the arrays of the whole batch, or, by its form, for
    one row at a time. Then it sees only clients' rows, and an error fails only its request."""

    def __init__(
        self, code: Code, infer: Callable[..., object], model: object, form: CallForm | None
    ) -> None:
        """Without a form, `infer` takes and returns arrays by name."""
        self._code = code
        self._infer = infer
        self._model = model
        self._form = form
        self.needs_requests = self.keeps_rows_apart = form is not None and not form.is_batched

    def built(self) -> Mapping[str, str]:
        if self.needs_requests:
            return _built("rows")
        return _built("infer" if self._model is None else "Model")

    def start(self, batch: Batch) -> Execution:
        if not self.needs_requests:
            return Finished(self._call(batch.inputs))
        inputs = batch.inputs.items()
        rows = [{name: array[row] for name, array in inputs} for row in range(batch.num_rows)]
        return finish(batch, [self._answer(some) for some in batch.by_request(rows)])

    def _answer(self, rows: Sequence[Mapping[str, Array]]) -> Outputs | Exception:
        """Call the function for the rows of one request and stack the results."""
        try:
            results = [self._call(row) for row in rows]
            return {name: _stacked(name, [each[name] for each in results]) for name in results[0]}
        except Exception as error:  # A model's code may raise anything.
            return error

    def _call(self, inputs: Mapping[str, Array]) -> Outputs:
        if self._form is not None:
            return self._form.named(self._code.result(self._form.call(self._infer, inputs)))
        outputs = self._code.result(self._infer(dict(inputs)))
        if not isinstance(outputs, Mapping):
            raise BackendFailed(f"infer: expected arrays by name, got {type(outputs).__name__}")
        for name, values in outputs.items():
            if not isinstance(values, np.ndarray):
                got = type(values).__name__
                raise BackendFailed(f"output '{name}': expected a numpy array, got {got}")
        return outputs

    def close(self) -> None:
        _end(self._code, getattr(self._model, "close", None))


class TritonModel(Protocol):
    def execute(self, requests: list[pb_utils.InferenceRequest], /) -> object: ...


class TritonRunner(Runner):
    """A `TritonPythonModel`, called as Triton calls it."""

    needs_requests = True

    def __init__(self, config: ModelConfig, code: Code, model: TritonModel) -> None:
        self._config = config
        self._code = code
        self._model = model
        self._datatypes = {spec.name: spec.datatype for spec in config.inputs}
        self._output_names = [spec.name for spec in config.outputs]

    def built(self) -> Mapping[str, str]:
        return _built(TRITON)

    def start(self, batch: Batch) -> Execution:
        """Run a batch. Without `batch.requests` it counts as one request with one answer."""
        parts = batch.requests or (RequestPart("", batch.num_rows),)
        responses = self._code.result(self._model.execute(self._requests(batch, parts)))
        if not isinstance(responses, Sequence) or len(responses) != len(parts):
            got = len(responses) if isinstance(responses, Sequence) else type(responses).__name__
            raise BackendFailed(
                f"execute: expected {len(parts)} responses to {len(parts)} requests, got {got}"
            )
        return finish(batch, [_answer(response) for response in responses])

    def close(self) -> None:
        _end(self._code, getattr(self._model, "finalize", None))

    def _requests(
        self, batch: Batch, parts: Sequence[BatchRequest]
    ) -> list[pb_utils.InferenceRequest]:
        """Return each request with its rows of the stacked inputs, as views."""
        is_batched = self._config.max_batch_size > 0
        requests: list[pb_utils.InferenceRequest] = []
        row = 0
        for index, part in enumerate(parts):
            end = row + part.num_rows
            if self._config.joins_requests:
                # Ragged inputs have no rows in common; each request is a piece.
                own = dict(batch.all_pieces[index])
            else:
                own = {name: a[row:end] if is_batched else a for name, a in batch.inputs.items()}
            given = part.parameters
            flags = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * bool(given.get(START))
            flags |= pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * bool(given.get(END))
            tensors = [pb_utils.Tensor(name, a, self._datatypes[name]) for name, a in own.items()]
            requests.append(
                pb_utils.InferenceRequest(
                    request_id=part.id,
                    correlation_id=_correlation_id(given),
                    inputs=tensors,
                    requested_output_names=part.outputs or self._output_names,
                    model_name=self._config.name,
                    model_version=int(self._config.version),
                    flags=flags,
                    parameters={key: given[key] for key in given if key not in (ID, START, END)},
                )
            )
            row = end
        return requests


def load(config: ModelConfig) -> TritonRunner | FunctionRunner:
    if "EXECUTION_ENV_PATH" in config.options:
        own = f"models run in the server's own Python ({sys.executable})"
        raise ConfigError(f"parameters.EXECUTION_ENV_PATH: not supported; {own}")
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


def _load_own(config: ModelConfig, code: Code, module: ModuleType) -> FunctionRunner:
    try:
        entry = find_entry(module)
        # None: it is called with a mapping of arrays that it does not declare.
        is_undeclared = entry.takes_mapping and entry.declaration.inputs is None
        form = None if is_undeclared else read_form(entry)
    except ConfigError as error:
        raise code.problem("; ".join(error.problems)) from None
    if not entry.method:
        return FunctionRunner(code, entry.function, None, form)
    with code.explained(f"{entry.target.__name__}(): "):
        model = _construct(entry.target, config)
    if hasattr(model, "load"):
        with code.explained("load: "):
            code.result(model.load())
    return FunctionRunner(code, getattr(model, entry.method), model, form)


def _stacked(name: str, rows: Sequence[Array]) -> Array:
    try:
        return np.stack(rows)
    except ValueError:
        shapes = ", ".join(sorted({str(list(row.shape)) for row in rows}))
        problem = f"output '{name}': rows of one request have different shapes: {shapes}"
        raise BackendFailed(problem) from None


def _construct(kind: Callable[..., object], config: ModelConfig) -> object:
    """Create the model, passing the configuration if its class takes it."""
    try:
        inspect.signature(kind).bind(config)
    except TypeError:
        return kind()
    return kind(config)


def _arguments(config: ModelConfig) -> dict[str, str]:
    """Return the arguments that Triton passes to `initialize`."""
    return {
        "model_config": json.dumps(pbtxt.to_json(config)),
        "model_instance_kind": "CPU",
        "model_instance_name": f"{config.name}_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(config.folder.parent),
        "model_version": config.version,
        "model_name": config.name,
    }


def _answer(response: object) -> Outputs | Exception:
    if not isinstance(response, pb_utils.InferenceResponse):
        got = type(response).__name__
        return BackendFailed(f"execute: expected an InferenceResponse, got {got}")
    error = response.error()
    if error is not None:
        return BackendFailed(error.message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _correlation_id(parameters: Mapping[str, Parameter]) -> int | str:
    id = parameters.get(ID, 0)
    return id if isinstance(id, int | str) else 0


def _built(form: str) -> Mapping[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "form": form}


def _end(code: Code, goodbye: Callable[[], object] | None) -> None:
    """Close the model, which may fail, and then its module."""
    try:
        if goodbye is not None:
            code.result(goodbye())
    except BaseException:  # A model's code may raise anything; the worker exits all the same.
        log.exception("the model failed while it was closed")
    finally:
        code.close()
