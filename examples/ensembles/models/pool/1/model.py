"""Hidden states to one vector a text: the mean over its tokens, of length 1. Runs in Triton too."""

import numpy as np
import triton_python_backend_utils as pb_utils


def pool(hidden, mask):
    weights = mask[:, :, None].astype(np.float32)
    mean = (hidden * weights).sum(1) / np.maximum(weights.sum(1), 1)
    return mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        hidden = pb_utils.get_input_tensor_by_name(request, "HIDDEN").as_numpy()
        mask = pb_utils.get_input_tensor_by_name(request, "MASK").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", pool(hidden, mask))])
