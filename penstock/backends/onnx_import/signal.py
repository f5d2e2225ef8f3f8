"""Fourier transforms, windows and mel filters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.backends.onnx_import.values import (
    DTYPES,
    Numbers,
    OnnxOperator,
    Reals,
    one_int,
    reals,
)

CPU = torch.device("cpu")


def dft(
    x: Tensor,
    length: Numbers | None = None,
    chosen: Numbers | None = None,
    *,
    axis: int | None = None,
    inverse: int = 0,
    onesided: int = 0,
    opset: int,
) -> Tensor:
    default = 1 if opset < 20 else -2
    where = one_int(chosen) if chosen is not None else default if axis is None else axis
    count = None if length is None else one_int(length)
    # The last axis holds real and imaginary parts.
    where = where + 1 if where < 0 else where
    values = _complex(x)
    if inverse and onesided:
        return torch.fft.irfft(values, count, where).unsqueeze(-1).to(x.dtype)
    if inverse:
        found = torch.fft.ifft(values, count, where)
    else:
        found = torch.fft.fft(values, count, where)
        if onesided:
            found = found.narrow(where, 0, found.shape[where] // 2 + 1)
    return torch.view_as_real(found).to(x.dtype)


def _complex(x: Tensor) -> Tensor:
    """Return the numbers of a tensor whose last axis holds one or two parts; torch transforms none
    of 16 bits."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return torch.view_as_complex(wide.contiguous()) if x.shape[-1] == 2 else wide.squeeze(-1)


def stft(
    x: Tensor,
    step: Numbers,
    window: Tensor | None = None,
    length: Numbers | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    size = one_int(length) if length is not None else len(window) if window is not None else 0
    frames = _complex(x).unfold(1, size, one_int(step))
    if window is not None:
        frames = frames * window
    found = torch.fft.fft(frames, size, -1)
    found = found[..., : size // 2 + 1] if onesided else found
    return torch.view_as_real(found).to(x.dtype)


def _window(compute: Callable[[Tensor], Tensor]) -> OnnxOperator:
    def call(
        size: Numbers, *, output_datatype: int = 1, periodic: int = 1, device: torch.device = CPU
    ) -> Tensor:
        count = one_int(size)
        at = torch.arange(count, dtype=torch.float64, device=device)
        at = at * 2 * math.pi / (count if periodic else count - 1)
        return compute(at).to(DTYPES[output_datatype])

    return OnnxOperator(call, host=(0,))


def mel_weights(
    num_bins: Numbers,
    length: Numbers,
    rate: Numbers,
    low: Reals,
    high: Reals,
    *,
    output_datatype: int = 1,
    device: torch.device = CPU,
) -> Tensor:
    bins, size = one_int(num_bins), one_int(length)
    first, last = (2595 * math.log10(1 + reals(each)[0] / 700) for each in (low, high))
    mels = [first + n * (last - first) / (bins + 2) for n in range(bins + 2)]
    hertz = [700 * (10 ** (each / 2595) - 1) for each in mels]
    edges = [math.floor((size + 1) * each / one_int(rate)) for each in hertz]
    found = torch.zeros(size // 2 + 1, bins)
    for n in range(bins):
        lower, centre, upper = edges[n : n + 3]
        if centre == lower:
            found[centre, n] = 1
        for at in range(lower, centre + 1) if centre != lower else ():
            found[at, n] = (at - lower) / (centre - lower)
        for at in range(centre, upper) if upper != centre else ():
            found[at, n] = (upper - at) / (upper - centre)
    return found.to(device, DTYPES[output_datatype])


OPERATORS = {
    "BlackmanWindow": _window(lambda at: 0.42 - 0.5 * at.cos() + 0.08 * (2 * at).cos()),
    "DFT": OnnxOperator(dft, host=(1, 2)),
    "HammingWindow": _window(lambda at: 25 / 46 - 21 / 46 * at.cos()),
    "HannWindow": _window(lambda at: 0.5 - 0.5 * at.cos()),
    "MelWeightMatrix": OnnxOperator(mel_weights, host=(0, 1, 2, 3, 4)),
    "STFT": OnnxOperator(stft, host=(1, 3)),
}
