"""Encoded images in front of a model on a GPU: decoded, resized and normalised there.

JPEG files are decoded by the batch with nvJPEG, through torchvision; then one kernel resizes, crops
and normalises them into the model's input (`kernels.pixels`). What nvJPEG does not decode, or not
as Pillow does, goes to the threads of `ImageStep` and from there to the same kernel: other formats,
CMYK, damaged files. Without nvJPEG that is true of all files. Decoding is part of the H2D copy;
CUDA graphs hold the model alone.
"""

from __future__ import annotations

import importlib
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backends import GPU_MEMORY, Batch, Execution, Outputs, PerRequest, split_rows
from penstock.backends.finished import finish
from penstock.backends.gpu_memory import tells_of_no_memory
from penstock.backends.image import ImageStep, check_resized, check_size, draw_sample
from penstock.backends.jpeg import JpegHeader, read_header
from penstock.backends.processing import Function, Functions, Processed, RowHead, stacked
from penstock.backends.torch_cuda import Arena, Tensors, alias
from penstock.config import DECODE_BYTES, ModelConfig
from penstock.errors import InvalidRequest, first_line
from penstock.kernels import pixels
from penstock.kernels.pixels import DecodedImage, PixelForm
from penstock.repository.image_settings import NUM_CHANNELS, is_channels_first
from penstock.types import Array

if TYPE_CHECKING:
    from penstock.backends.pytorch import TorchRunner
    from penstock.backends.torch_cuda import Cuda

log = logging.getLogger("penstock.gpu")
# Size of the image that batches are rehearsed with: a file of about 100 kB.
SAMPLE_SIZE = 500, 375
# Files to images [3, height, width] on the device, in RGB.
DecodeJpegs = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Crop = Array | InvalidRequest


def _bytes_of(data: bytes) -> torch.Tensor:
    """Return a tensor on the memory of bytes, to be read only."""
    return torch.frombuffer(data, dtype=torch.uint8)


# torch warns of such tensors, once in a process.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    _bytes_of(bytes(1))


def open_nvjpeg(device: torch.device) -> tuple[DecodeJpegs | None, str]:
    """Return nvJPEG's decoder; None, and why, if it cannot be used here."""
    try:
        library = importlib.import_module("torchvision.io")
    except Exception as error:  # An installation for another torch fails in many ways.
        return None, f"torchvision cannot be imported: {first_line(error)}"
    mode = library.ImageReadMode.RGB

    def decode(files: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = library.decode_jpeg(list(files), mode, device)
        return found

    try:
        (image,) = decode([_bytes_of(draw_sample(*SAMPLE_SIZE))])
        if tuple(image.shape) != (NUM_CHANNELS, *SAMPLE_SIZE[::-1]):
            return None, f"nvJPEG gave an image of shape {list(image.shape)}"
    except Exception as error:  # torchvision without nvJPEG, or a GPU or driver it does not know.
        return None, f"nvJPEG: {first_line(error)}"
    return decode, ""


@dataclass(slots=True)
class DeviceDecoder:
    """Makes batches of pixels on a device, one after the other."""

    device: Cuda
    step: ImageStep
    dtype: torch.dtype
    is_channels_last: bool
    # None: all files are decoded by the step's threads.
    decode_jpegs: DecodeJpegs | None
    num_on_gpu: int = 0
    num_on_cpu: int = 0
    # What kernels in flight read, and the mark behind them. nvJPEG writes on a stream of its own,
    # which does not wait for them.
    _in_use: list[object] = field(default_factory=list)
    _used: torch.cuda.Event | None = None

    def write(
        self, files: Sequence[bytes], arena: Arena, num_run: int
    ) -> tuple[Tensors, dict[int, InvalidRequest]]:
        """Return the model's input, and the errors of rows that are no image and black now. Decodes
        in parts that fit `DECODE_BYTES`."""
        batch, view = self._take(arena, num_run)
        headers, crops, errors = self._sort(files)
        for part in _parts(headers):
            self._wait()
            decoded = self._decode({row: files[row] for row in part}, headers)
            for row in part:
                if row not in decoded:
                    crops[row] = self._submit(files[row])
            self.num_on_gpu += len(decoded)
            self._place(list(decoded.values()), (), view)
        if not headers:
            self._wait()
        self._finish(crops, errors, num_run, len(files), view)
        return {self.step.spec.name: batch}, errors

    def _take(self, arena: Arena, num_run: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the model's input, and a view of it as [rows, 3, height, width]."""
        name, shape = self.step.spec.name, self.step.spec.shape
        is_first = is_channels_first(self.step.spec)
        is_turned = is_first and self.is_channels_last
        sizes = (*shape[1:], shape[0]) if is_turned else shape
        batch = arena.take({name: (self.dtype, (num_run, *sizes))})[name]
        if is_turned:
            batch = batch.permute(0, 3, 1, 2)
        return batch, batch if is_first else batch.permute(0, 3, 1, 2)

    def _sort(
        self, files: Sequence[bytes]
    ) -> tuple[dict[int, JpegHeader], dict[int, Future[Crop]], dict[int, InvalidRequest]]:
        """Return the headers of files for the GPU, begin to decode the others, and refuse what is
        too large."""
        headers: dict[int, JpegHeader] = {}
        crops: dict[int, Future[Crop]] = {}
        errors: dict[int, InvalidRequest] = {}
        for row, data in enumerate(files):
            header = read_header(data) if self.decode_jpegs is not None else None
            if header is None or not header.is_usual:
                crops[row] = self._submit(data)
                continue
            try:
                check_size(header.width, header.height)
                check_resized(self.step.settings.place(*_upright(header)))
            except InvalidRequest as error:
                errors[row] = self.step.refused(str(error))
            else:
                headers[row] = header
        return headers, crops, errors

    def _submit(self, data: bytes) -> Future[Crop]:
        return self.step.threads.submit(self.step.tried_crop, data)

    def _decode(
        self, files: Mapping[int, bytes], headers: Mapping[int, JpegHeader]
    ) -> dict[int, DecodedImage]:
        """Return the images that nvJPEG decodes."""
        encoded = {row: _bytes_of(data) for row, data in files.items()}
        self._in_use.append(encoded)
        found: dict[int, DecodedImage] = {}
        for row, image in self._decode_apart(encoded).items():
            header = headers[row]
            if tuple(image.shape) == (NUM_CHANNELS, header.height, header.width):
                placed = self.step.settings.place(*_upright(header))
                found[row] = DecodedImage(image, header.orientation, placed, row)
        return found

    def _decode_apart(self, files: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Decode files together; if that fails, in halves, so that one bad file costs few calls."""
        assert self.decode_jpegs is not None
        try:
            return dict(zip(files, self.decode_jpegs(list(files.values())), strict=True))
        except RuntimeError as error:
            if tells_of_no_memory(str(error), self.device.memory()):
                raise
        if len(files) == 1:
            return {}
        rows = list(files)
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        decoded: dict[int, torch.Tensor] = {}
        for half in halves:
            decoded |= self._decode_apart({row: files[row] for row in half})
        return decoded

    def _finish(
        self,
        crops: Mapping[int, Future[Crop]],
        errors: dict[int, InvalidRequest],
        num_run: int,
        num_rows: int,
        view: torch.Tensor,
    ) -> None:
        """Place what the threads have decoded; rows without an image, and padding, become black."""
        made: dict[int, Array] = {}
        for row, future in crops.items():
            crop = future.result()
            if isinstance(crop, InvalidRequest):
                errors[row] = crop
            else:
                made[row] = crop
        self.num_on_cpu += len(made)
        black = [*errors, *range(num_rows, num_run)]
        self._place(self._copied(made), black, view)

    def _copied(self, made: Mapping[int, Array]) -> list[DecodedImage]:
        """Copy crops [height, width, 3] to the device, in one piece."""
        if not made:
            return []
        settings = self.step.settings
        shape = len(made), settings.height, settings.width, NUM_CHANNELS
        host = self.device.pinned(int(np.prod(shape))).view(shape)
        for number, crop in enumerate(made.values()):
            host[number] = alias(crop)
        there = self.device.empty(host.numel()).view(shape)
        there.copy_(host, non_blocking=True)
        self._in_use.append(host)
        placed = settings.height, settings.width, 0, 0
        return [
            DecodedImage(image.permute(2, 0, 1), 1, placed, row)
            for row, image in zip(made, there, strict=True)
        ]

    def _place(
        self, images: Sequence[DecodedImage], black_rows: Sequence[int], view: torch.Tensor
    ) -> None:
        settings = self.step.settings
        form = PixelForm(
            settings.resample, settings.scale, settings.mean, settings.std, settings.is_bgr
        )
        pixels.place(images, black_rows, view, form, self._upload)
        self._in_use.extend(images)
        self._used = self.device.mark("in")

    def _upload(self, table: torch.Tensor) -> torch.Tensor:
        host = self.device.pinned(table.nbytes).view(table.dtype).view(table.shape)
        host.copy_(table)
        there = self.device.empty(table.nbytes).view(table.dtype).view(table.shape)
        there.copy_(host, non_blocking=True)
        self._in_use += host, there
        return there

    def _wait(self) -> None:
        """Wait until earlier kernels have read their images, so that the memory can be reused."""
        if self._used is not None:
            self._used.synchronize()
            self._used = None
        self._in_use.clear()


@dataclass(slots=True)
class ImageFiles:
    """The encoded images of a batch, as the pipeline's inputs."""

    decoder: DeviceDecoder
    files: Sequence[bytes]
    errors: Mapping[int, InvalidRequest] = field(default_factory=dict)

    def write(self, arena: Arena, num_run: int) -> Tensors:
        made, self.errors = self.decoder.write(self.files, arena, num_run)
        return made


@dataclass(slots=True)
class ImageExecution:
    """A batch in flight; rows that are no image have errors instead of answers."""

    inner: Execution
    batch: Batch
    errors: Mapping[int, InvalidRequest]
    after: Function | RowHead | None
    # Known once `wait` is exhausted.
    prepare_s: float = 0.0
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs | PerRequest]:
        (outputs,) = self.inner.wait()
        assert not isinstance(outputs, PerRequest)
        began = time.perf_counter()
        rows = split_rows(outputs, self.batch.num_rows)
        answers: list[Outputs | Exception] = [
            self.errors.get(number, row) for number, row in enumerate(rows)
        ]
        if self.after is not None:
            made = iter(self.after.tried_all([row for row in answers if isinstance(row, Mapping)]))
            answers = [next(made) if isinstance(row, Mapping) else row for row in answers]
        parts = [stacked(part, True) for part in self.batch.by_request(answers)]
        self.prepare_s = self.inner.prepare_s
        self.finish_s = self.inner.finish_s + time.perf_counter() - began
        return finish(self.batch, parts).wait()


class ImageRunner(Processed):
    """A model on a GPU that gets encoded images. Batches overlap as those of the model do."""

    runs_ahead = True
    has_own_rehearsals = True

    def __init__(self, config: ModelConfig, inner: TorchRunner, functions: Functions) -> None:
        super().__init__(config, inner, functions)
        step, pipeline = functions.before, inner.pipeline
        assert isinstance(step, ImageStep) and pipeline is not None
        self._network = inner
        self._after = functions.after
        decode_jpegs: DecodeJpegs | None = None
        self._problem = "decoder=cpu"
        if not step.settings.is_decoded_on_cpu:
            decode_jpegs, self._problem = _open_decoder(step, torch.device(config.device))
            if self._problem:
                log.warning("images are decoded by CPU threads: %s", self._problem)
        form = inner.input_form(step.spec.name)
        self.decoder = DeviceDecoder(pipeline.device, step, *form, decode_jpegs)

    def built(self) -> Mapping[str, str]:
        built = {**super().built(), **self.decoder.step.names()}
        built["image_decoder"] = f"CPU threads: {self._problem}" if self._problem else "nvJPEG"
        is_triton = pixels.has_kernel(torch.device(self._config.device))
        built["image_kernel"] = "Triton" if is_triton else "torch"
        if GPU_MEMORY in built:
            built[GPU_MEMORY] = str(int(built[GPU_MEMORY]) + DECODE_BYTES)
        return built

    def start(self, batch: Batch) -> Execution:
        step = self.decoder.step
        files = [step.file_in(values) for values in batch.inputs[step.input]]
        inputs = ImageFiles(self.decoder, files)
        running = self._network.start_on_device(inputs, batch.num_rows)
        return ImageExecution(running, batch, inputs.errors, self._after)

    def rehearsals(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch of real images."""
        name = self.decoder.step.input
        files = np.empty(batch.inputs[name].shape, np.object_)
        files[...] = draw_sample(*SAMPLE_SIZE)
        yield Batch({name: files}, batch.num_rows, batch.requests)


def _open_decoder(step: ImageStep, device: torch.device) -> tuple[DecodeJpegs | None, str]:
    if step.settings.resample not in pixels.FILTERS:
        return None, "only bilinear and bicubic interpolation are there on GPUs"
    return open_nvjpeg(device)


def _upright(header: JpegHeader) -> tuple[int, int]:
    return pixels.upright_size(header.width, header.height, header.orientation)


def _parts(headers: Mapping[int, JpegHeader]) -> Iterator[list[int]]:
    """Yield rows that are decoded together."""
    part: list[int] = []
    num_bytes = 0
    for row, header in headers.items():
        size = NUM_CHANNELS * header.width * header.height
        if part and num_bytes + size > DECODE_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(row)
        num_bytes += size
    if part:
        yield part
