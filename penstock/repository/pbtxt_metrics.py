"""Reads `model_metrics` of config.pbtxt: the buckets of a model's histograms."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.repository.pbtxt_fields import Proto

# The only family whose buckets Triton lets a model choose.
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


def read(message: Proto, problem: Callable[[str, str], None]) -> tuple[float, ...]:
    """Return the buckets of FIRST_RESPONSE, in milliseconds; empty if they are not given. Report
    other families and wrong buckets to `problem`."""
    found: tuple[float, ...] = ()
    for index, control in enumerate(message.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        family = control.metric_identifier.family
        if family != FIRST_RESPONSE:
            text = f"'{family}'; only the buckets of {FIRST_RESPONSE} can be chosen"
            problem(f"{path}.metric_identifier.family", text)
            continue
        buckets = tuple(control.histogram_options.buckets)
        is_rising = all(low < high for low, high in zip(buckets, buckets[1:], strict=False))
        if not buckets or not is_rising or not all(map(math.isfinite, buckets)):
            text = f"{list(buckets)}; expected rising numbers, in milliseconds"
            problem(f"{path}.histogram_options.buckets", text)
            continue
        found = buckets
    return found
