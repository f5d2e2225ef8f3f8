"""A process that runs a Python model's file to learn its tensors: `python -m
penstock.backends.python_reader FD FILE`.

The answer goes to a file descriptor, as the code may print anything. `python_file` starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.backends.python_code import Code
from penstock.backends.python_signature import TRITON, find_entry, read_form
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.repository.python_file import SignatureReport, report
from penstock.repository.signature import Signature
from penstock.types import TensorSpec

# The version that errors name.
VERSION = "1"
NOT_TOLD = (
    f"{TRITON} does not say what tensors it has; write config.pbtxt, or a static method "
    "auto_complete_config"
)


def read(path: Path) -> Signature:
    code = Code(ModelConfig("", VERSION, "python", str(path), (), (), 0, BatchPolicy(1)))
    try:
        module = code.load()
        if hasattr(module, TRITON):
            return _read_triton(code, module)
        return read_form(find_entry(module)).signature()
    finally:
        code.close()


def _read_triton(code: Code, module: ModuleType) -> Signature:
    complete = getattr(getattr(module, TRITON), "auto_complete_config", None)
    if complete is None:
        raise ConfigError(NOT_TOLD)
    config = pb_utils.AutoConfig()
    with code.explained("auto_complete_config: "):
        config = complete(config) or config
    values = config.as_dict()
    max_batch = int(values["max_batch_size"])
    prefix = (-1,) if max_batch else ()

    def spec(item: pb_utils.ParsedConfig) -> TensorSpec:
        datatype = pb_utils.v2_datatype(item["data_type"])
        shape = (*prefix, *map(int, item["dims"]))
        return TensorSpec(str(item["name"]), datatype, shape, bool(item.get("optional")))

    inputs, outputs = (tuple(map(spec, values[kind])) for kind in ("input", "output"))
    is_decoupled = pb_utils.using_decoupled_model_transaction_policy(values)
    if not outputs and not is_decoupled:
        raise ConfigError(NOT_TOLD)
    return Signature(inputs, outputs, chosen_batch=max_batch, is_decoupled=is_decoupled)


def main() -> None:
    fd, path = int(sys.argv[1]), Path(sys.argv[2])
    try:
        found = SignatureReport(read(path))
    except ConfigError as error:
        label = f"{VERSION}/{path.name}: "
        problems = tuple(problem.removeprefix(label) for problem in error.problems)
        found = SignatureReport(None, problems)
    report(fd, found)


if __name__ == "__main__":
    main()
