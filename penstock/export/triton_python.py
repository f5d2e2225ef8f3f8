"""Function models as `TritonPythonModel`: the text of a model.py that calls a function. Pure.

The text needs numpy only. Requests whose arrays fit together are computed in one call, as Penstock
does; a failed call is repeated for each of them, so that an error is that of its request.
"""

from __future__ import annotations

import pprint
from collections.abc import Mapping

# The user's file beside the generated model.py.
ORIGINAL = "penstock_model.py"
# Stands in for the package where only its declarations are used.
SHIM = "penstock.py"
SHIM_TAIL = "\n\nTensor = TensorType\n"
SOURCE = '''"""{mark}

Calls {called} of {original} as Penstock does.
"""

import asyncio
import dataclasses
import importlib.util
import inspect
import json
import os
import sys
import types

import numpy as np
import triton_python_backend_utils as pb_utils

FORM = {form}
PACKAGE = "penstock_exported"


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.has_rows = config["max_batch_size"] > 0
        self.names = [each["name"] for each in config["input"]]
        self.types = {{
            each["name"]: pb_utils.triton_string_to_numpy(each["data_type"])
            for each in config["output"]
        }}
        self.loop = asyncio.new_event_loop()
        module = load_original()
        target = getattr(module, FORM["entry"])
        self.model = None
        self.function = target
        if FORM["method"]:
            self.model = target()
            self.function = getattr(self.model, FORM["method"])
            if hasattr(self.model, "load"):
                self.result(self.model.load())

    def execute(self, requests):
        inputs = [self.arrays(request) for request in requests]
        answers = self.together(inputs) if FORM["is_batched"] and self.has_rows else None
        if answers is None:
            answers = [self.alone(each) for each in inputs]
        return [self.response(answer) for answer in answers]

    def finalize(self):
        if hasattr(self.model, "close"):
            self.result(self.model.close())
        self.loop.close()

    def result(self, value):
        if not inspect.isawaitable(value):
            return value

        async def wait():
            return await value

        return self.loop.run_until_complete(wait())

    def arrays(self, request):
        found = {{name: pb_utils.get_input_tensor_by_name(request, name) for name in self.names}}
        return {{name: each.as_numpy() for name, each in found.items() if each is not None}}

    def together(self, inputs):
        """Answer all requests with one call; None if they do not fit together or it fails."""
        kinds = {{tuple((name, a.shape[1:]) for name, a in each.items()) for each in inputs}}
        if len(inputs) < 2 or len(kinds) > 1 or not inputs[0]:
            return None
        counts = [len(next(iter(each.values()))) for each in inputs]
        stacked = {{name: np.concatenate([each[name] for each in inputs]) for name in inputs[0]}}
        try:
            outputs = self.call(stacked)
        except Exception:
            return None
        if any(len(array) != sum(counts) for array in outputs.values()):
            return None
        ends = np.cumsum(counts)
        return [
            {{name: array[end - count : end] for name, array in outputs.items()}}
            for end, count in zip(ends, counts)
        ]

    def alone(self, inputs):
        """Answer one request; its error if it fails."""
        try:
            if FORM["is_batched"]:
                return self.call(inputs)
            num_rows = len(next(iter(inputs.values()))) if inputs and self.has_rows else 1
            rows = [
                self.call({{name: array[row] for name, array in inputs.items()}})
                for row in range(num_rows)
            ]
            return {{name: np.stack([row[name] for row in rows]) for name in rows[0]}}
        except Exception as error:
            return error

    def call(self, arrays):
        kinds = FORM["inputs"]
        values = {{
            name: to_python(kinds[name], array) if kinds else array
            for name, array in arrays.items()
        }}
        takes_mapping = FORM["takes_mapping"]
        result = self.result(self.function(values) if takes_mapping else self.function(**values))
        if dataclasses.is_dataclass(result):
            names = [each.name for each in dataclasses.fields(result)]
            result = {{name: getattr(result, name) for name in names}}
        elif hasattr(result, "_asdict"):
            result = result._asdict()
        elif FORM["is_bare"] and not isinstance(result, dict):
            result = {{next(iter(FORM["outputs"])): result}}
        return {{name: self.to_array(name, result[name]) for name in self.types}}

    def to_array(self, name, value):
        kind = FORM["outputs"].get(name)
        if kind is None or kind["form"] == "array":
            if not isinstance(value, np.ndarray):
                got = type(value).__name__
                raise TypeError(f"output '{{name}}': expected a numpy array, got {{got}}")
            return value
        if kind["datatype"] == "BYTES":
            array = np.array(value, dtype=np.object_)
            flat = array.ravel()
            flat[:] = [each.encode() if isinstance(each, str) else each for each in flat]
            return flat.reshape(array.shape)
        return np.asarray(value).astype(self.types[name], casting="same_kind")

    def response(self, answer):
        if isinstance(answer, Exception):
            text = f"{{type(answer).__name__}}: {{answer}}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
        tensors = [
            pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in answer.items()
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)


def to_python(kind, array):
    if kind["form"] == "array":
        return array
    values = array.tolist() if isinstance(array, (np.ndarray, np.generic)) else array
    return decoded(values) if kind["is_text"] else values


def decoded(values):
    if isinstance(values, bytes):
        return values.decode()
    return [decoded(each) for each in values] if isinstance(values, list) else values


def load_original():
    """Load the file in a package of its own, so that it may import modules beside it both ways."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    package = types.ModuleType(PACKAGE)
    package.__path__ = [folder]
    sys.modules[PACKAGE] = package
    name = f"{{PACKAGE}}.model"
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "{original}"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
'''


def write_wrapper(mark: str, form: Mapping[str, object]) -> str:
    """Return model.py. `form` has the fields of a FunctionForm, its tensors by name."""
    entry, method = str(form["entry"]), str(form["method"])
    called = f"{entry}.{method}" if method else entry
    shown = pprint.pformat(dict(form), sort_dicts=False, width=96)
    return SOURCE.format(mark=mark, called=called, original=ORIGINAL, form=shown)
