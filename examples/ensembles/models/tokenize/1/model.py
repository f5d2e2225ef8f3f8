"""Texts to token ids and their mask, with the tokenizer.json beside this file.

Runs unchanged in Triton, with `tokenizers` in its Python. The texts of a request get one length,
padded; a text that is not UTF-8 fails its own request.
"""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

MAX_TOKENS = 128


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        try:
            texts = [text.decode() for text in given.ravel()]
        except UnicodeDecodeError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"TEXT: {error}"))
        found = self.tokenizer.encode_batch(texts)
        ids = np.array([each.ids for each in found], np.int64)
        mask = np.array([each.attention_mask for each in found], np.int64)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("IDS", ids), pb_utils.Tensor("MASK", mask)]
        )
