"""Finds the digits in a picture: connected bright strokes, cut out as 8x8 pixels each."""

import numpy as np
import triton_python_backend_utils as pb_utils

SIZE = 8
# Fainter pixels are noise; smaller spots are dust.
MIN_INK, MIN_PIXELS = 0.3, 6


class TritonPythonModel:
    def execute(self, requests):
        return [self.find(request) for request in requests]

    def find(self, request):
        ink = pb_utils.get_input_tensor_by_name(request, "INK").as_numpy()
        boxes = find_boxes(ink > MIN_INK)
        padded = np.pad(ink, SIZE)
        crops = np.zeros((len(boxes), 1, SIZE, SIZE), np.float32)
        for crop, (top, left, bottom, right) in zip(crops, boxes, strict=True):
            # The box is centred in the crop; strokes may be narrower than the digit.
            y, x = (top + bottom) // 2 - SIZE // 2, (left + right) // 2 - SIZE // 2
            crop[0] = padded[y + SIZE : y + 2 * SIZE, x + SIZE : x + 2 * SIZE]
        outputs = [pb_utils.Tensor("CROPS", crops), pb_utils.Tensor("BOXES", boxes)]
        return pb_utils.InferenceResponse(outputs)


def find_boxes(is_ink):
    """Return top, left, bottom, right of each group of pixels, from the top left on. Pixels belong
    together if at most one pixel is between them."""
    height, width = is_ink.shape
    labels = np.where(is_ink, 1 + np.arange(is_ink.size).reshape(is_ink.shape), 0)
    is_new = True
    while is_new:
        padded = np.pad(labels, 2)
        near = [padded[y : y + height, x : x + width] for y in range(5) for x in range(5)]
        grown = np.where(is_ink, np.max(near, axis=0), 0)
        is_new = not np.array_equal(grown, labels)
        labels = grown
    boxes = []
    for label in np.unique(labels[labels > 0]):
        rows, columns = np.nonzero(labels == label)
        if len(rows) >= MIN_PIXELS:
            boxes.append((rows.min(), columns.min(), rows.max() + 1, columns.max() + 1))
    return np.array(sorted(boxes), np.int32).reshape(-1, 4)
