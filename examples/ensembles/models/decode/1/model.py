"""Image files to the pixels that MobileNetV2 was trained on: the middle of each, 224 x 224.

Runs unchanged in Triton, with Pillow in its Python. A file that is no image fails its own request.
"""

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

SHORTEST, SIDE = 256, 224
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


def decode(data):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = SHORTEST / min(image.size)
    width, height = (max(SIDE, round(scale * side)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), np.float32)
    return ((pixels / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy()
        try:
            pixels = np.stack([decode(data) for data in files.ravel()])
        except (OSError, Image.DecompressionBombError) as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"FILE: {error}"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels)])
