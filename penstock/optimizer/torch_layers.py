"""PyTorch models run in this process on the serving device, for passes that choose precisions layer
by layer: the answers of a model with some layers in another precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, PenstockError, first_line
from penstock.optimizer.simulate import fitted
from penstock.types import Array

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.pytorch import LoadedModule

# Rows of equal shapes that are run together.
MAX_ROWS = 16
Row = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class TorchTrial:
    """A loaded model and batches on its device."""

    loaded: LoadedModule
    config: ModelConfig
    batches: Sequence[Mapping[str, Tensor]]

    def answers(self) -> list[dict[str, Array]]:
        return [self.answer(batch) for batch in self.batches]

    def answer(self, batch: Mapping[str, Tensor]) -> dict[str, Array]:
        """Return the outputs of a batch, floats in FP32."""
        import torch

        from penstock.backends.pytorch import by_name

        names = [spec.name for spec in self.config.outputs]
        with torch.no_grad():
            found = by_name(self.loaded.call(batch), names)
        return {
            name: (each.float() if each.is_floating_point() else each).cpu().numpy()
            for name, each in found.items()
            if name in names
        }


@contextmanager
def opened(
    config: ModelConfig, rows: Sequence[Row], options: Mapping[str, str]
) -> Iterator[TorchTrial]:
    """Load a model with these options instead of its own precision, and put rows on its device;
    BackendFailed if the model's code fails."""
    import torch

    from penstock.backends.pytorch import DTYPES, load_module, set_precision

    model = config.model
    dropped = ("penstock.dtype", "penstock.keep_fp32", "penstock.compile", "penstock.fuse")
    kept = {key: text for key, text in model.options.items() if key not in dropped}
    model = replace(model, options={**kept, **options})
    dtype = DTYPES[options.get("penstock.dtype", "")]
    if model.device != "cpu":
        set_precision("fp32")
    loaded = load_module(model)
    try:
        batches = []
        for batch in _batches(model, rows):
            made = {name: torch.from_numpy(each).to(model.device) for name, each in batch.items()}
            if dtype is not None:
                made = {n: t.to(dtype) if t.is_floating_point() else t for n, t in made.items()}
            batches.append(made)
        yield TorchTrial(loaded, model, batches)
    except PenstockError:
        raise
    except Exception as error:  # The model's own code.
        raise BackendFailed(f"the model cannot be run by layers: {first_line(error)}") from error
    finally:
        loaded.close()


def _batches(config: ModelConfig, rows: Sequence[Row]) -> Iterator[dict[str, Array]]:
    """Yield batches of rows of equal shapes; single rows if the model has no batch dimension."""
    names = [spec.name for spec in config.inputs]
    groups: dict[object, list[dict[str, Array]]] = {}
    for row in fitted(rows, config):
        given = {name: np.asarray(row[name]) for name in names if name in row}
        if not config.max_batch_size:
            yield given
            continue
        shapes = tuple((name, array.shape) for name, array in given.items())
        groups.setdefault(shapes, []).append(given)
    most = min(MAX_ROWS, config.max_batch_size)
    for group in groups.values():
        for start in range(0, len(group), most):
            some = group[start : start + most]
            yield {name: np.stack([row[name] for row in some]) for name in some[0]}
