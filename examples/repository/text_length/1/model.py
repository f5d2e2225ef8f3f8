"""How many characters each text has: a model in the form that Triton's Python backend defines.

It runs unchanged in Triton. A text that is not UTF-8 fails its own request and no other.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "LENGTH")
        self.length_type = pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        try:
            lengths = [len(text.decode()) for text in texts.ravel()]
        except UnicodeDecodeError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"TEXT: {error}"))
        values = np.array(lengths, self.length_type).reshape(texts.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("LENGTH", values)])
