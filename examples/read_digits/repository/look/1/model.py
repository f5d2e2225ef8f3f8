"""Whether a picture is dark ink on bright paper."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            picture = pb_utils.get_input_tensor_by_name(request, "PICTURE").as_numpy()
            is_paper = np.array([picture.size > 0 and np.median(picture) > 0.5])
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("IS_PAPER", is_paper)]))
        return answers
