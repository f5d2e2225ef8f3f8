"""model.py of Triton's Python backend: the version that Penstock serves, by the same backend.

One call gets all requests that Triton's batcher put together (ragged, so that lengths may differ),
writes them as rows into one buffer that the GPU copies from by itself, and runs one batch. Rows are
filled up to the one length that CUDA graphs were captured for: padding is not computed, and a batch
as long as its longest row would be a new shape nearly every time.

The stub looks at no PYTHONPATH, so packages are named in a variable of our own. Its tensors are
numpy's before 2.0; in a newer one they would be garbage, and go by DLPack instead, which is slower.
"""

# ruff: noqa: E402

import json
import math
import mmap
import os
import sys
from dataclasses import replace

sys.path[:0] = os.environ["BESIDE_TRITON_PACKAGES"].split(os.pathsep)

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from penstock.backends import Batch, backend
from penstock.repository import layout
from penstock.serving.warmups import warm_up_buckets
from penstock.types import DATATYPES

IS_NUMPY_SHARED = int(np.__version__.partition(".")[0]) < 2


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        served, name = os.path.split(parameters["served_by_penstock"]["string_value"])
        (config,) = layout.read_one(served, name).configs
        device = parameters["device"]["string_value"]
        # Triton's batcher knows no budget of tokens: graphs of fuller batches are to be warm, too.
        batching = replace(config.batching, max_tokens=None)
        config = replace(config, device=device, num_instances=1, batching=batching)
        self.length = max(config.padding.buckets)
        self.output = config.outputs[0].name
        self.runner = backend(config.backend)(config)
        shape = (config.max_batch_size, self.length)
        dtypes = {spec.name: DATATYPES[spec.datatype].numpy for spec in config.inputs}
        sizes = [math.prod(shape) * dtype.itemsize for dtype in dtypes.values()]
        # Pages of its own: the driver pins whole ones.
        memory = mmap.mmap(-1, sum(sizes))
        self.inputs, offset = {}, 0
        for (name, dtype), size in zip(dtypes.items(), sizes, strict=True):
            flat = np.frombuffer(memory, dtype, math.prod(shape), offset)
            self.inputs[name] = flat.reshape(shape)
            offset += size
        self.runner.pin(memoryview(memory))
        warm_up_buckets(config, self.runner)
        built = {**self.runner.built(), "tensors": "numpy" if IS_NUMPY_SHARED else "DLPack"}
        facts = ", ".join(f"{key}={value}" for key, value in built.items())
        pb_utils.Logger.log_info(f"{args['model_instance_name']} was built with {facts}")

    def execute(self, requests):
        spans, num_rows = [], 0
        for request in requests:
            span = self.laid_down(request, num_rows)
            spans.append(span)
            num_rows += span[0]
        answers = self.computed(num_rows) if num_rows else None
        responses, row = [], 0
        for rows, length in spans:
            if not rows:
                problem = f"a sequence of {length} is longer than {self.length}"
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(problem)))
                continue
            tensor = tensor_of(self.output, answers[row : row + rows, :length])
            responses.append(pb_utils.InferenceResponse([tensor]))
            row += rows
        return responses

    def laid_down(self, request, row):
        """How many rows it has, and of what length; no rows: they are too long."""
        for name, buffer in self.inputs.items():
            given = array_of(pb_utils.get_input_tensor_by_name(request, name))
            rows, length = given.shape
            if length > self.length:
                return 0, length
            buffer[row : row + rows, :length] = given
            buffer[row : row + rows, length:] = 0
        return rows, length

    def computed(self, num_rows):
        inputs = {name: each[:num_rows] for name, each in self.inputs.items()}
        (outputs,) = self.runner.start(Batch(inputs, num_rows)).wait()
        return outputs[self.output]

    def finalize(self):
        self.runner.close()


def array_of(tensor):
    return tensor.as_numpy() if IS_NUMPY_SHARED else torch.from_dlpack(tensor).numpy()


def tensor_of(name, array):
    array = np.ascontiguousarray(array)
    if IS_NUMPY_SHARED:
        return pb_utils.Tensor(name, array)
    return pb_utils.Tensor.from_dlpack(name, torch.from_numpy(array))
