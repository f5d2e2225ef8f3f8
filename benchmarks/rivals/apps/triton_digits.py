"""Digits for Triton's Python backend: one run of ONNX Runtime per batch. Becomes model.py."""

import os

import numpy as np
import onnx_session
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.run = onnx_session.open_model(os.environ["DIGITS_ONNX"])

    def execute(self, requests):
        images = [pb_utils.get_input_tensor_by_name(r, "image").as_numpy() for r in requests]
        logits = self.run(np.concatenate(images) if len(images) > 1 else images[0])
        responses, row = [], 0
        for image in images:
            part = logits[row : row + len(image)]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("logits", part)]))
            row += len(image)
        return responses
