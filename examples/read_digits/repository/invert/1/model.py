"""A picture with bright ink on a dark ground, from one with dark ink on a bright ground."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            picture = pb_utils.get_input_tensor_by_name(request, "PICTURE").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("INK", 1 - picture)]))
        return answers
