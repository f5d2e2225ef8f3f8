"""Resizing, sampling and boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.backends.onnx_import.values import Numbers, OnnxOperator, Reals, ints, positive, reals
from penstock.errors import ConfigError

# Distance from the middle of two pixels at which ONNX Runtime takes a position as a tie.
TIE = 1e-6


def _source(
    n_out: int,
    n_in: int,
    scale: float,
    mode: str,
    region: tuple[float, float],
    device: torch.device,
) -> Tensor:
    """Return the position in the input of each position in the output."""
    at = torch.arange(n_out, device=device, dtype=torch.float32)
    # By a tensor: torch multiplies by the inverse of a number, which rounds differently.
    steps = torch.full_like(at, scale)
    if mode == "asymmetric":
        return at / steps
    if mode == "align_corners":
        # PyTorch and ONNX Runtime use the whole length; ONNX's reference uses scale * n_in.
        return at * (n_in - 1) / (n_out - 1) if n_out > 1 else torch.zeros_like(at)
    if mode == "tf_crop_and_resize":
        start, end = region
        if n_out > 1:
            return start * (n_in - 1) + at * (end - start) * (n_in - 1) / (n_out - 1)
        return torch.full_like(at, 0.5 * (start + end) * (n_in - 1))
    if mode == "pytorch_half_pixel" and n_out == 1:
        return torch.zeros_like(at)
    if mode == "half_pixel_symmetric":
        # In the order and precision of ONNX Runtime, as positions between two round either way.
        adjusted = np.float32(n_out) / (np.float32(scale) * np.float32(n_in))
        offset = float(np.float32(n_in / 2) * (1 - adjusted))
        return (offset + (at.double() + 0.5) / steps.double() - 0.5).float()
    return (at + 0.5) / steps - 0.5


def _nearest(position: Tensor, mode: str) -> Tensor:
    match mode:
        case "floor":
            return position.floor()
        case "ceil":
            return position.ceil()
    below = position.floor()
    rest = position - below
    is_tie = (rest - 0.5).abs() < TIE
    at_tie = below + 1 if mode == "round_prefer_ceil" else below
    return torch.where(is_tie, at_tie, below + (rest > 0.5))


def _weights(
    position: Tensor, scale: float, kind: str, cubic: float, antialias: bool
) -> tuple[Tensor, Tensor]:
    """Return the positions that each output reads, and their weights."""
    stretch = min(scale, 1.0) if antialias else 1.0
    reach = (1 if kind == "linear" else 2) / stretch
    first = (position - reach).floor() + 1
    count = math.ceil(2 * reach) if antialias else int(2 * reach)
    at = first[:, None] + torch.arange(count, device=position.device)
    distance = ((at - position[:, None]) * stretch).abs()
    if kind == "linear":
        weights = (1 - distance).clamp(min=0)
    else:
        near = ((cubic + 2) * distance - (cubic + 3)) * distance**2 + 1
        far = ((cubic * distance - 5 * cubic) * distance + 8 * cubic) * distance - 4 * cubic
        weights = torch.where(
            distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far))
        )
    return at, weights


@dataclass(frozen=True, slots=True)
class Resampling:
    """How positions of one axis are chosen and weighed."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    antialias: bool
    excludes_outside: bool
    filling: float

    def resize(
        self, x: Tensor, axis: int, length: int, scale: float, region: tuple[float, float]
    ) -> Tensor:
        n_in = x.shape[axis]
        position = _source(length, n_in, scale, self.coordinates, region, x.device)
        if self.mode == "nearest":
            at = _nearest(position, self.nearest).long().clamp(0, n_in - 1)
            found = x.index_select(axis, at)
        else:
            found = self._interpolate(x, axis, position, scale)
        if self.coordinates != "tf_crop_and_resize":
            return found
        shape = [1] * found.dim()
        shape[axis] = -1
        outside = (position < 0) | (position > n_in - 1)
        return found.masked_fill(outside.reshape(shape), self.filling)

    def _interpolate(self, x: Tensor, axis: int, position: Tensor, scale: float) -> Tensor:
        n_in = x.shape[axis]
        at, weights = _weights(position, scale, self.mode, self.cubic, self.antialias)
        if self.excludes_outside:
            weights = weights * ((at >= 0) & (at < n_in))
        weights = weights / weights.sum(1, keepdim=True)
        at = at.long().clamp(0, n_in - 1)
        parts = x.index_select(axis, at.reshape(-1)).unflatten(axis, at.shape)
        shape = [1] * parts.dim()
        shape[axis], shape[axis + 1] = weights.shape
        wide = parts if x.is_floating_point() else parts.float()
        return (wide * weights.to(wide.dtype).reshape(shape)).sum(axis + 1)


def resize(
    x: Tensor,
    roi: Reals | None = None,
    scales: Reals | None = None,
    sizes: Numbers | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] = (),
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    opset: int,
) -> Tensor:
    if opset == 10:
        # Opset 10 has the scales in second place, and positions that are floored.
        scales, roi = roi, None
        coordinate_transformation_mode, nearest_mode = "asymmetric", "floor"
    where = [positive(axis, x.dim()) for axis in axes] or list(range(x.dim()))
    factors = [] if scales is None else reals(scales)
    wanted = [] if sizes is None or factors else ints(sizes)
    if wanted and keep_aspect_ratio_policy != "stretch":
        pick = min if keep_aspect_ratio_policy == "not_larger" else max
        one = pick(each / x.shape[axis] for each, axis in zip(wanted, where, strict=True))
        wanted = [math.floor(one * x.shape[axis] + 0.5) for axis in where]
        factors_by_size = [one] * len(where)
    else:
        factors_by_size = [each / x.shape[axis] for each, axis in zip(wanted, where, strict=False)]
    factors = factors or factors_by_size
    if not wanted:
        wanted = [
            int(np.float32(x.shape[axis]) * np.float32(each))
            for axis, each in zip(where, factors, strict=True)
        ]
    is_cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    if not is_cropped and all(x.shape[n] == size for n, size in zip(where, wanted, strict=True)):
        # As ONNX Runtime does, even where a scale differs from 1.
        return x
    crops = [] if roi is None else reals(roi)
    dtype = x.dtype
    how = Resampling(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(antialias),
        bool(exclude_outside),
        extrapolation_value,
    )
    for number, axis in enumerate(where):
        region = (crops[number], crops[number + len(where)]) if crops else (0.0, 1.0)
        if wanted[number] == x.shape[axis] and factors[number] == 1 and not is_cropped:
            continue
        x = how.resize(x, axis, wanted[number], factors[number], region)
    if not dtype.is_floating_point and x.is_floating_point():
        limits = torch.iinfo(dtype)
        x = x.clamp(limits.min, limits.max)
    return x.to(dtype)


def upsample(
    x: Tensor, factors: Reals | None = None, *, mode: str = "nearest", scales: Sequence[float] = ()
) -> Tensor:
    return resize(
        x,
        None,
        scales if factors is None else factors,
        coordinate_transformation_mode="asymmetric",
        mode=mode,
        nearest_mode="floor",
        opset=11,
    )


def grid_sample(
    x: Tensor,
    grid: Tensor,
    *,
    align_corners: int = 0,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
) -> Tensor:
    names = {"linear": "bilinear", "cubic": "bicubic"}
    kind = names.get(mode, mode)
    if x.dim() > 5 or (kind == "bicubic" and x.dim() != 4):
        raise ConfigError(f"GridSample: {kind} over {x.dim() - 2} axes is not supported")
    dtype = torch.promote_types(_wide_type(x), grid.dtype)
    made = functional.grid_sample(
        x.to(dtype), grid.to(dtype), kind, padding_mode, bool(align_corners)
    )
    return made.to(x.dtype)


def _wide_type(x: Tensor) -> torch.dtype:
    """Return the datatype for positions: 16 bits do not tell the pixels of a large image apart."""
    return torch.promote_types(x.dtype, torch.float32)


def affine_grid(theta: Tensor, size: Numbers, *, align_corners: int = 0) -> Tensor:
    made = functional.affine_grid(theta.to(_wide_type(theta)), ints(size), bool(align_corners))
    return made.to(theta.dtype)


def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    max_boxes: Numbers | None = None,
    iou_limit: Reals | None = None,
    score_limit: Reals | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """Return [batch, class, box] of the boxes that are kept, class by class."""
    limit = ints(max_boxes)[0] if max_boxes is not None else 0
    threshold = reals(iou_limit)[0] if iou_limit is not None else 0.0
    lowest = reals(score_limit)[0] if score_limit is not None else None
    boxes = boxes.to(_wide_type(boxes))
    kept: list[Tensor] = []
    for row in range(boxes.shape[0]):
        overlap = _overlaps(boxes[row], bool(center_point_box))
        for label in range(scores.shape[1]):
            chosen = _suppressed(scores[row, label], overlap, limit, threshold, lowest)
            at = chosen.new_tensor([row, label]).expand(len(chosen), 2)
            kept.append(torch.cat([at, chosen[:, None]], 1))
    return torch.cat(kept) if kept else boxes.new_zeros((0, 3), dtype=torch.int64)


def _overlaps(boxes: Tensor, is_centred: bool) -> Tensor:
    """Return the intersection over union of each pair."""
    one, two = boxes[:, :2], boxes[:, 2:]
    if is_centred:
        one, two = one - two / 2, one + two / 2
    low, high = torch.minimum(one, two), torch.maximum(one, two)
    area = (high - low).prod(1)
    shared = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    inner = shared.clamp(min=0).prod(2)
    union = area[:, None] + area - inner
    return torch.where(union > 0, inner / union, torch.zeros_like(inner))


def _suppressed(
    scores: Tensor, overlap: Tensor, limit: int, threshold: float, lowest: float | None
) -> Tensor:
    order = scores.sort(descending=True, stable=True).indices.tolist()
    candidates = [each for each in order if lowest is None or float(scores[each]) > lowest]
    near = (overlap > threshold).cpu()
    kept: list[int] = []
    for each in candidates:
        if len(kept) == limit:
            break
        if not any(bool(near[each, other]) for other in kept):
            kept.append(each)
    return torch.tensor(kept, dtype=torch.int64, device=scores.device)


def roi_align(
    x: Tensor,
    rois: Tensor,
    rows: Tensor,
    *,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    opset: int,
) -> Tensor:
    default = "half_pixel" if opset >= 16 else "output_half_pixel"
    offset = 0.5 if (coordinate_transformation_mode or default) == "half_pixel" else 0.0
    found = []
    for number in range(len(rois)):
        left, top, right, bottom = (float(each) * spatial_scale - offset for each in rois[number])
        width, height = right - left, bottom - top
        if not offset:
            width, height = max(width, 1.0), max(height, 1.0)
        image = x[int(rows[number])]
        down = _samples(top, height, output_height, sampling_ratio, x)
        across = _samples(left, width, output_width, sampling_ratio, x)
        values = _bilinear(image.to(down.dtype), down, across, is_max=mode == "max")
        parts = values.reshape(
            len(image), output_height, -1, output_width, len(across) // output_width
        )
        pooled = parts.amax((2, 4)) if mode == "max" else parts.mean((2, 4))
        found.append(pooled.to(x.dtype))
    return torch.stack(found) if found else x.new_zeros(0, x.shape[1], output_height, output_width)


def _samples(start: float, length: float, count: int, ratio: int, like: Tensor) -> Tensor:
    size = length / count
    num = ratio or max(math.ceil(size), 1)
    at = torch.arange(count * num, device=like.device, dtype=_wide_type(like))
    return start + (at + 0.5) * size / num


def _bilinear(image: Tensor, down: Tensor, across: Tensor, is_max: bool) -> Tensor:
    """Sample an image at each pair of positions; outside of it by one or more, it is 0. The maximum
    is taken over the weighted corners, as in ONNX's reference."""
    height, width = image.shape[1:]

    def axis(at: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        inside = (at >= -1) & (at <= length)
        at = at.clamp(min=0)
        low = at.floor().long().clamp(max=length - 1)
        high = (low + 1).clamp(max=length - 1)
        at = torch.where(low >= length - 1, low.to(at.dtype), at)
        return inside, low, high, 1 - (at - low), at - low

    in_y, y0, y1, wy0, wy1 = axis(down, height)
    in_x, x0, x1, wx0, wx1 = axis(across, width)
    corners = [
        image[:, ys][:, :, xs] * (wy[:, None] * wx)
        for ys, wy in ((y0, wy0), (y1, wy1))
        for xs, wx in ((x0, wx0), (x1, wx1))
    ]
    stacked = torch.stack(corners)
    values = stacked.amax(0) if is_max else stacked.sum(0)
    return values * (in_y[:, None] & in_x)


OPERATORS = {
    "AffineGrid": OnnxOperator(affine_grid, host=(1,)),
    "GridSample": OnnxOperator(grid_sample),
    "NonMaxSuppression": OnnxOperator(non_max_suppression, host=(2, 3, 4)),
    "Resize": OnnxOperator(resize, host=(1, 2, 3)),
    "RoiAlign": OnnxOperator(roi_align),
    "Upsample": OnnxOperator(upsample, host=(1,)),
}
