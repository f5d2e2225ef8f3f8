"""A process that runs a Python model's file to learn how its function is called: `python -m
penstock.backends.python_form FD FILE`. `penstock export triton` starts it to wrap the function.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.python_code import Code
from penstock.backends.python_signature import TRITON, EntryPoint, find_entry, read_form
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.repository.python_file import report


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor is to the function: "array", "list" or "value", perhaps of texts."""

    name: str
    datatype: str
    num_axes: int
    form: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class FunctionForm:
    """The function of a file and how it is called; without tensors it takes and returns arrays by
    name."""

    # The name of the function or class in the file; empty for TritonPythonModel.
    entry: str = ""
    method: str = ""
    takes_mapping: bool = True
    is_batched: bool = True
    is_bare: bool = False
    inputs: tuple[TensorForm, ...] = ()
    outputs: tuple[TensorForm, ...] = ()


@dataclass(frozen=True, slots=True)
class FormReport:
    """The answer of the child process: a form, or problems."""

    form: FunctionForm | None
    problems: tuple[str, ...] = ()


def read(path: Path) -> FunctionForm:
    code = Code(ModelConfig("", "1", "python", str(path), (), (), 0, BatchPolicy(1)))
    try:
        module = code.load()
        if hasattr(module, TRITON):
            return FunctionForm()
        entry = find_entry(module)
        names = [name for name, value in vars(module).items() if value is entry.target]
        _check_construction(entry)
        if entry.takes_mapping and entry.declaration.inputs is None:
            return FunctionForm(names[0], entry.method)
        found = read_form(entry)
        inputs, outputs = (
            tuple(
                TensorForm(name, each.datatype, len(each.shape), each.form, each.is_text)
                for name, each in some.items()
            )
            for some in (found.inputs, found.outputs)
        )
        return FunctionForm(
            names[0],
            entry.method,
            found.takes_mapping,
            found.is_batched,
            found.is_bare,
            inputs,
            outputs,
        )
    finally:
        code.close()


def _check_construction(entry: EntryPoint) -> None:
    """Raise ConfigError for a class that needs Penstock's configuration."""
    if not entry.method:
        return
    try:
        inspect.signature(entry.target).bind()
    except TypeError:
        name = getattr(entry.target, "__name__", "Model")
        problem = f"class {name} takes Penstock's configuration, which Triton does not have"
        raise ConfigError(f"{problem}; expected a class that is made without arguments") from None


def main() -> None:
    fd, path = int(sys.argv[1]), Path(sys.argv[2])
    try:
        found = FormReport(read(path))
    except ConfigError as error:
        found = FormReport(None, error.problems)
    report(fd, found)


if __name__ == "__main__":
    main()
