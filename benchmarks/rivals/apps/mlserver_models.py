"""Both models for MLServer. Payloads stay lists where no array is needed: that is the fastest."""

import numpy as np
import onnx_session
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Identity(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        tensor = payload.inputs[0]
        output = ResponseOutput(
            name="OUTPUT0", shape=tensor.shape, datatype="FP32", data=tensor.data
        )
        return InferenceResponse(model_name=self.name, outputs=[output])


class Digits(MLModel):
    async def load(self) -> bool:
        self.run = onnx_session.open_model(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        tensor = payload.inputs[0]
        images = np.array(tensor.data.root, dtype=np.float32).reshape(tensor.shape)
        logits = self.run(images)
        output = ResponseOutput(
            name="logits", shape=list(logits.shape), datatype="FP32", data=logits.ravel().tolist()
        )
        return InferenceResponse(model_name=self.name, outputs=[output])
