"""Both models as one BentoML service; the settings come as environment variables.

The methods are coroutines although they do not wait: that saves BentoML a hop to a thread per
request and measured faster than plain methods, batched or not.
"""

import os
from typing import Annotated

import bentoml
import numpy as np
import onnx_session
from bentoml.validators import DType

BATCHING = {"batchable": True, "max_batch_size": 64} if os.environ["BENCH_BATCH"] == "1" else {}
Floats = Annotated[np.ndarray, DType("float32")]


@bentoml.service(workers=int(os.environ["BENCH_WORKERS"]), logging={"access": {"enabled": False}})
class Models:
    def __init__(self) -> None:
        self.run = onnx_session.open_model(os.environ["BENCH_ONNX"])

    @bentoml.api(route="/identity", **BATCHING)
    async def identity(self, inputs: Floats) -> Floats:
        return inputs

    @bentoml.api(route="/digits", **BATCHING)
    async def digits(self, inputs: Floats) -> Floats:
        return self.run(inputs.reshape(-1, 1, 8, 8))
