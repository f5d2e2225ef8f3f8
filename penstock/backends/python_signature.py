"""The function of a Python model's file: which it is, its tensors, and how it is called.

Tensors come from `@penstock.model(...)` or from annotations. The worker calls the function by what
is found here; a child process (`python_reader`) reports it to the server, which never runs a
model's code itself.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, get_args, get_origin

import numpy as np

from penstock.errors import BackendFailed, ConfigError
from penstock.repository.python_model import MARK, Declaration, TensorType
from penstock.repository.signature import Signature
from penstock.types import DATATYPES, Array, TensorSpec

TRITON = "TritonPythonModel"
# Names of functions and methods that are the model without further marks.
NAMES = ("infer", "predict")
EXPECTED = f"class {TRITON}, class Model with a method infer, or function infer"
# The output of a function that returns one value.
OUTPUT = "output"
SCALARS = {str: "BYTES", bytes: "BYTES", bool: "BOOL", int: "INT64", float: "FP64"}
SEQUENCES = (list, tuple, collections.abc.Sequence)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
EXAMPLE = 'Annotated[np.ndarray, penstock.Tensor("FP32", [-1, 3])]'
ACCEPTED = f"str, bytes, bool, int, float, list[...] or {EXAMPLE}"


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """The model of a file: a function, or a class and the name of its method."""

    target: Callable[..., object]
    method: str = ""

    @property
    def function(self) -> Callable[..., object]:
        """The function, or the method without its object."""
        found: Callable[..., object] = getattr(self.target, self.method, self.target)
        return found

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        try:
            found = dict(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            return {}
        is_static = isinstance(
            inspect.getattr_static(self.target, self.method, None), staticmethod | classmethod
        )
        if self.method and not is_static:
            found.pop(next(iter(found), ""), None)
        return found

    @property
    def declaration(self) -> Declaration:
        found = getattr(self.target, MARK, None) or getattr(self.function, MARK, None)
        return found if isinstance(found, Declaration) else Declaration()

    @property
    def takes_mapping(self) -> bool:
        """Whether it takes all inputs as one mapping of arrays."""
        parameters = list(self.parameters.values())
        if not parameters:
            return True
        first, *others = parameters
        if first.name in (self.declaration.inputs or {}):
            return False
        if any(each.default is each.empty and each.kind not in VARIADIC for each in others):
            return False
        hint = _hints(self.function).get(first.name, first.annotation)
        return hint is first.empty or _is_mapping(hint) or isinstance(hint, str)


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find_entry(module: types.ModuleType) -> EntryPoint:
    """Find the model of a file without TritonPythonModel; ConfigError if it has none or several."""
    own = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ or name in ("infer", "Model")
    }
    marked = [value for value in own.values() if hasattr(value, MARK)]
    if len(marked) > 1:
        names = ", ".join(each.__name__ for each in marked)
        raise ConfigError(f"@penstock.model marks {names}; expected one model in a file")
    if marked:
        return _entry(marked[0])
    kind, infer = own.get("Model"), own.get("infer")
    has_model = inspect.isclass(kind) and bool(_method(kind))
    has_infer = callable(infer) and not inspect.isclass(infer)
    if has_model and has_infer:
        raise ConfigError(f"defines class Model and function infer; expected {EXPECTED}")
    if has_infer:
        return EntryPoint(own["infer"])
    if has_model:
        return _entry(own["Model"])
    public = [value for name, value in own.items() if not name.startswith("_")]
    functions = [value for value in public if inspect.isfunction(value)]
    named = [each for each in functions if each.__name__ in NAMES]
    if len(named or functions) == 1:
        return EntryPoint((named or functions)[0])
    if not functions:
        raise ConfigError(f"defines no model; expected {EXPECTED}")
    names = ", ".join(each.__name__ for each in functions)
    raise ConfigError(f"defines {names}; mark one with @penstock.model(), or call it infer")


def _entry(target: Callable[..., object]) -> EntryPoint:
    if not inspect.isclass(target):
        return EntryPoint(target)
    if not (method := _method(target)):
        raise ConfigError(f"class {target.__name__}: no method infer")
    return EntryPoint(target, method)


def _method(kind: object) -> str:
    return next((name for name in NAMES if callable(getattr(kind, name, None))), "")


@dataclass(frozen=True, slots=True)
class _Type:
    """An annotation: the tensor, and the Python values it stands for."""

    datatype: str
    # As the function sees it.
    shape: tuple[int, ...]
    # "array", "list" or "value".
    form: str
    is_text: bool = False

    def to_python(self, array: object) -> object:
        """Convert an array, or one element of it."""
        if self.form == "array":
            return array
        values = array.tolist() if isinstance(array, np.ndarray | np.generic) else array
        return _decoded(values) if self.is_text else values

    def to_array(self, name: str, value: object) -> Array:
        """Convert a result. Arrays have to be right already; nothing is rounded."""
        if self.form == "array":
            if not isinstance(value, np.ndarray):
                got = type(value).__name__
                raise BackendFailed(f"output '{name}': expected a numpy array, got {got}")
            return value
        if self.datatype == "BYTES":
            return _encoded(name, value, len(self.shape))
        found = np.asarray(value)
        try:
            return found.astype(DATATYPES[self.datatype].numpy, casting="same_kind")
        except TypeError:
            got = f"expected values of {self.datatype}, got {found.dtype}"
            raise BackendFailed(f"output '{name}': {got}") from None


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the function is called: with which types, and for a whole batch or for each row."""

    inputs: Mapping[str, _Type]
    outputs: Mapping[str, _Type]
    optional: frozenset[str]
    is_batched: bool
    # It returns the value of the only output, rather than values by name.
    is_bare: bool
    # It takes all inputs as one mapping.
    takes_mapping: bool
    max_batch_size: int | None

    def signature(self) -> Signature:
        # A row has no batch dimension of its own, unless a call is a whole request.
        prefix = () if self.is_batched or self.max_batch_size == 0 else (-1,)
        notes = () if self.is_batched else ("the function is called for one row at a time",)
        inputs, outputs = (
            [TensorSpec(name, each.datatype, (*prefix, *each.shape)) for name, each in some.items()]
            for some in (self.inputs, self.outputs)
        )
        return Signature(
            tuple(replace(spec, is_optional=spec.name in self.optional) for spec in inputs),
            tuple(outputs),
            notes=notes if self.max_batch_size != 0 else (),
            chosen_batch=self.max_batch_size,
        )

    def call(self, function: Callable[..., object], arrays: Mapping[str, object]) -> object:
        """Call the function with arrays, or with the elements of one row."""
        values = {name: self.inputs[name].to_python(array) for name, array in arrays.items()}
        return function(values) if self.takes_mapping else function(**values)

    def named(self, result: object) -> dict[str, Array]:
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            result = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
        elif hasattr(result, "_asdict"):
            result = result._asdict()
        elif self.is_bare and not isinstance(result, Mapping):
            result = {next(iter(self.outputs)): result}
        if not isinstance(result, Mapping):
            got = type(result).__name__
            raise BackendFailed(f"expected {', '.join(self.outputs)} by name, got {got}")
        if missing := [name for name in self.outputs if name not in result]:
            raise BackendFailed(f"output '{missing[0]}' is missing; got {', '.join(result)}")
        return {name: each.to_array(name, result[name]) for name, each in self.outputs.items()}


def read_form(entry: EntryPoint) -> CallForm:
    """Read types from the declaration or the annotations; ConfigError says what to write."""
    said = entry.declaration
    hints = _hints(entry.function, must_work=said.inputs is None or said.outputs is None)
    parameters = {n: each for n, each in entry.parameters.items() if each.kind not in VARIADIC}
    if said.inputs is not None:
        inputs = {name: _type(name, hint) for name, hint in said.inputs.items()}
    elif entry.takes_mapping:
        raise ConfigError(
            "does not say what tensors it takes; annotate each parameter, as in def "
            f"infer(x: {EXAMPLE}), use @penstock.model(inputs=..., outputs=...), or write "
            "config.pbtxt"
        )
    else:
        inputs = {name: _type(name, hints.get(name)) for name in parameters}
    outputs, is_bare = _outputs(said, hints.get("return"))
    optional = {name for name, each in parameters.items() if each.default is not each.empty}
    return CallForm(
        inputs,
        outputs,
        frozenset(optional & set(inputs)),
        _is_batched(said, inputs, outputs) or said.max_batch_size == 0,
        is_bare,
        entry.takes_mapping,
        said.max_batch_size,
    )


def _is_batched(
    said: Declaration, inputs: Mapping[str, _Type], outputs: Mapping[str, _Type]
) -> bool:
    """Whether a call gets a whole batch: as declared, or if it takes and gives arrays."""
    every = {**inputs, **outputs}
    if said.batched is False:
        return False
    arrays = [name for name, each in every.items() if each.form == "array"]
    others = [name for name, each in every.items() if each.form != "array"]
    if said.batched:
        single = [name for name, each in every.items() if each.form == "value"]
        if single and said.max_batch_size != 0:
            raise ConfigError(
                f"'{single[0]}' is one value, and batched=True; expected list[...] or {EXAMPLE}"
            )
        return True
    if arrays and others:
        raise ConfigError(
            f"'{arrays[0]}' is an array of a whole batch and '{others[0]}' a value of one row; "
            "expected arrays only, or @penstock.model(batched=False) for one row at a time, "
            "or @penstock.model(batched=True) for lists of one entry for each row"
        )
    return not others


def _outputs(said: Declaration, hint: object) -> tuple[dict[str, _Type], bool]:
    """Return the outputs, and whether the function returns the only one by itself."""
    fields = said.outputs if said.outputs is not None else _fields(hint)
    if fields is not None:
        if not fields:
            raise ConfigError("declares no outputs; expected at least one")
        is_bare = len(fields) == 1 and said.outputs is not None
        return {name: _type(name, each, "output") for name, each in fields.items()}, is_bare
    if hint is None or hint is type(None) or _is_mapping(hint):
        raise ConfigError(
            "does not say what it returns; annotate the result as "
            f"{EXAMPLE}, as a dataclass or TypedDict of such types, or use "
            "@penstock.model(outputs=...)"
        )
    return {OUTPUT: _type(OUTPUT, hint, "output")}, True


def _fields(hint: object) -> dict[str, object] | None:
    """Return the fields of a dataclass, TypedDict or NamedTuple; None for other types."""
    is_tuple = inspect.isclass(hint) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    if not (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint) or is_tuple):
        return None
    return typing.get_type_hints(hint, include_extras=True)


def _type(name: str, hint: object, kind: str = "input") -> _Type:
    """Return what an annotation or a declared type stands for."""
    if isinstance(hint, TensorType):
        return _declared(name, hint, "array")
    if get_origin(hint) is Annotated:
        base, *extras = get_args(hint)
        declared = [extra for extra in extras if isinstance(extra, TensorType)]
        if declared:
            is_list = (get_origin(base) or base) in SEQUENCES
            found = _declared(name, declared[0], "list" if is_list else "array")
            return replace(found, is_text=is_list and _holds_text(base))
        hint = base
    if (datatype := _scalar(hint)) is not None:
        return _Type(datatype, (), "value", hint is str)
    if get_origin(hint) in SEQUENCES and get_args(hint):
        inner = _type(name, get_args(hint)[0], kind)
        if inner.form != "array":
            return replace(inner, shape=(-1, *inner.shape), form="list")
    text = hint.__name__ if inspect.isclass(hint) and not get_args(hint) else str(hint)
    what = "no annotation" if hint is None else f"annotated as {text}"
    raise ConfigError(f"{kind} '{name}': {what}; expected {ACCEPTED}")


def _scalar(hint: object) -> str | None:
    """Return the datatype of a Python type or of a numpy scalar."""
    if isinstance(hint, type) and hint in SCALARS:
        return SCALARS[hint]
    if inspect.isclass(hint) and issubclass(hint, np.generic):
        numbers = {each.numpy: each.name for each in DATATYPES.values() if each.name != "BF16"}
        return numbers.get(np.dtype(hint))
    return None


def _holds_text(hint: object) -> bool:
    return hint is str or any(map(_holds_text, get_args(hint)))


def _declared(name: str, declared: TensorType, form: str) -> _Type:
    if declared.datatype not in DATATYPES:
        known = ", ".join(DATATYPES)
        raise ConfigError(f"'{name}': datatype '{declared.datatype}' is not one of {known}")
    shape = tuple(declared.shape)
    if any(not isinstance(size, int) or size == 0 or size < -1 for size in shape):
        raise ConfigError(f"'{name}': shape {list(shape)}: each must be positive or -1")
    return _Type(declared.datatype, shape, form)


def _is_mapping(hint: object) -> bool:
    return (get_origin(hint) or hint) in MAPPINGS


def _hints(function: Callable[..., object], must_work: bool = False) -> dict[str, object]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # Annotations are users' code and may raise anything.
        if must_work:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"its annotations cannot be read: {reason}") from None
        return {}


def _decoded(values: object) -> object:
    if isinstance(values, bytes):
        return values.decode()
    return [_decoded(each) for each in values] if isinstance(values, list) else values


def _encoded(name: str, value: object, num_dimensions: int) -> Array:
    """Return texts or bytes as an array of this many dimensions."""
    found = np.array(value, dtype=np.object_)
    if found.size == 0:
        found = found.reshape((*found.shape, *[0] * (num_dimensions - found.ndim)))
    items = found.ravel()
    wrong = [each for each in items if not isinstance(each, str | bytes)]
    if wrong and found.ndim < num_dimensions and isinstance(wrong[0], Sequence):
        raise BackendFailed(f"output '{name}': its lists have different lengths")
    if wrong or found.ndim != num_dimensions:
        expected = "a list of texts" if found.ndim < num_dimensions else "texts"
        got = type(wrong[0] if wrong else value).__name__
        raise BackendFailed(f"output '{name}': expected {expected}, got {got}")
    items[:] = [each.encode() if isinstance(each, str) else each for each in items]
    return items.reshape(found.shape)
