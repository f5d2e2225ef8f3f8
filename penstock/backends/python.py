"""Models written in Python: the file `model.py`, in one of three forms (docs/python-models.md).

An unchanged `TritonPythonModel` sees each request of a batch by itself and answers or fails each.
`class Model` or a function takes the stacked batch as a mapping of arrays, or its inputs by name,
then either the whole batch or one row (`python_signature`). All may be `async def`. Input arrays
are read-only, because a batch may have to run again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import numpy as np

from penstock.backends import Batch, Execution, Outputs, Runner
from penstock.backends.finished import Finished, finish
from penstock.backends.python_code import Code, end_model
from penstock.backends.python_signature import TRITON, CallForm, find_entry, read_form
from penstock.backends.triton_python import TritonRunner, describe_built, make_arguments
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.types import Array


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
            return describe_built("rows")
        return describe_built("infer" if self._model is None else "Model")

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
        end_model(self._code, getattr(self._model, "close", None))


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
            model.initialize(make_arguments(config))
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
