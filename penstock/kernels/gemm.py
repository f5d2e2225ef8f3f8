"""Choose GEMM algorithms: torch's own, or one of those that cuBLASLt proposes, whichever is
fastest for its sizes on this GPU.

They are timed while a model is loaded, on a warm GPU; algorithms with wrong results are dropped.
Choices of an earlier start are read from the version's folder: nothing is timed then, only the
results are checked again. Sizes that were not warmed up use torch. `packed_encoder` and
`fp8_linear` call it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from penstock.errors import first_line
from penstock.kernels import CHOICES, cublaslt
from penstock.kernels.convolution import (
    REFERENCE,
    GpuTimer,
    Remembered,
    check_close,
    choices_file,
    remembered,
)
from penstock.kernels.cublaslt import E4M3, GemmForm, Operands, Unavailable

# Largest relative error against torch (in norm), by output type. Two algorithms may round a value
# to e4m3 in different directions.
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2, E4M3: 0.1}
# Calls in a timed graph, and replays: few, as GEMMs are long.
NUM_CALLS, NUM_RUNS = 4, 3
# Work before timing, so that the GPU has its clock under load: about 0.1 s.
WARM_OPERATIONS, MAX_WARM_CALLS = 5e13, 256
# From this many rows on, an H200 is limited by power, and torch's larger tiles draw less: an
# algorithm 2 % faster for a moment was 2 % slower for seconds (33,792 tokens, 693 W, 2026-11-15).
MANY_ROWS, CLEARLY = 16_384, 0.95
# Standard deviation of random operands in e4m3.
SPREAD = 50.0
PREFIX = "cublaslt"


@dataclass(frozen=True, slots=True)
class Gemm:
    """A GEMM to compute, and torch's way to compute it from x."""

    form: GemmForm
    operands: Operands
    by_torch: Callable[[torch.Tensor], torch.Tensor]

    def randomized(self) -> Gemm:
        """Return it with a random x: GPUs are faster on uniform values, as in a warm-up. In e4m3
        one row has the largest values: results beyond the range must saturate, not become NaN."""
        x = self.operands.x
        made = torch.randn(x.shape, device=x.device)
        if x.dtype == E4M3:
            made *= SPREAD
            made[0] = torch.finfo(E4M3).max
        return replace(self, operands=replace(self.operands, x=made.to(x.dtype)))


@dataclass
class Multiplier:
    """The algorithms of one runner. `told` are the choices of an earlier start."""

    products: cublaslt.Products
    timer: GpuTimer
    told: Mapping[str, str] = field(default_factory=dict)
    # Why algorithms were dropped, by form and number.
    problems: dict[str, str] = field(default_factory=dict)
    num_timed: int = 0
    # Whether new forms are queued for timing.
    is_open: bool = True
    # Algorithm by form; None: torch.
    _chosen: dict[GemmForm, int | None] = field(default_factory=dict)
    # Forms that could not be timed.
    _untried: set[GemmForm] = field(default_factory=set)
    _waiting: dict[GemmForm, Gemm] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def __deepcopy__(self, memo: object) -> Multiplier:
        """Return itself: copies of a layer share it."""
        return self

    def run(self, product: Gemm) -> torch.Tensor:
        form = product.form
        if form not in self._chosen and self.is_open:
            if self._key(form) in self.told:
                self._choose(product)
            else:
                self._waiting.setdefault(form, product)
        number = self._chosen.get(form)
        if number is None or not product.operands.are_aligned:
            return product.by_torch(product.operands.x)
        return self.products.multiply(form, product.operands, number)

    def prepare(self, num_tokens: int, call: Callable[[], object]) -> None:
        """Time the GEMMs of a token count before it runs for the first time."""
        if self.is_open and num_tokens not in self._seen:
            if num_tokens not in self._told_counts:
                # GEMMs queue their forms.
                call()
                self.tune()
            self._seen.add(num_tokens)

    def settle(self) -> None:
        """Stop timing: from now on clients wait for answers."""
        self.is_open = False
        # Queued forms keep their operands alive.
        self._waiting.clear()

    def tune(self) -> None:
        if not self._waiting:
            return
        self._warm_up()
        num_before = self.num_timed
        # Last one first: one GEMM may be part of torch's way to compute another.
        while self._waiting:
            self._choose(self._waiting.popitem()[1])
        if self.num_timed > num_before:
            self.timer.done()

    def _choose(self, product: Gemm) -> None:
        form = product.form
        self._chosen[form] = None
        try:
            product = product.randomized()
            number = self._recalled(product)
            self._chosen[form] = self._fastest(product) if number is None else number
        except Exception as error:  # Mostly out of memory: the model itself may need less.
            self._untried.add(form)
            self.problems[str(form)] = first_line(error)

    @functools.cached_property
    def _told_counts(self) -> set[int]:
        """Token counts with choices of an earlier start, which cover all GEMMs of a count."""
        start = self._key("")
        rows = (
            key.removeprefix(start).partition("x")[0] for key in self.told if key.startswith(start)
        )
        return {int(each) for each in rows if each.isdecimal()}

    def files(self) -> dict[str, bytes]:
        """Return the files for the version's folder, without forms that could not be timed."""
        # All forms of a count or none: a later start looks no further if it finds one.
        unknown = {form.num_rows for form in self._untried}
        known = [form for form in self._chosen if form.num_rows not in unknown]
        choices = {self._key(form): _name(self._chosen[form]) for form in known}
        return choices_file(dict(sorted(choices.items())), self.products.device) if choices else {}

    def facts(self) -> dict[str, str]:
        counts = Counter(_name(number).partition(" ")[0] for number in self._chosen.values())
        text = ", ".join(f"{count} by {name}" for name, count in sorted(counts.items()))
        facts = {"products": text or "none yet", "products_timed": f"{self.num_timed} forms"}
        facts["cublaslt"] = str(self.products.version)
        if self.problems:
            case, problem = next(iter(self.problems.items()))
            facts["products_dropped"] = f"{len(self.problems)}: {case}: {problem}"
        return facts

    def _key(self, form: GemmForm | str) -> str:
        return f"{PREFIX} {self.products.version} {form}"

    def _warm_up(self) -> None:
        """Warm up the GPU if anything is to be timed."""
        new = [each for form, each in self._waiting.items() if self._key(form) not in self.told]
        if not new:
            return
        product = max(new, key=lambda each: each.form.num_operations)
        count = min(MAX_WARM_CALLS, int(WARM_OPERATIONS / product.form.num_operations))
        with contextlib.suppress(torch.OutOfMemoryError):
            x = product.randomized().operands.x
            # CPUs need no warm-up.
            for _ in range(count if x.is_cuda else 0):
                product.by_torch(x)

    def _recalled(self, product: Gemm) -> int | None:
        """Return the choice of an earlier start, if its results are right here too."""
        name = self.told.get(self._key(product.form), "")
        number = name.removeprefix(f"{PREFIX} ")
        if name == number or not number.isdecimal():
            return None
        try:
            self._check(product, int(number), product.by_torch(product.operands.x))
        except Exception as error:
            self.problems[f"{product.form}: {name}"] = first_line(error)
            return None
        return int(number)

    def _fastest(self, product: Gemm) -> int | None:
        if self.told.get(self._key(product.form)) == REFERENCE:
            return None
        self.num_timed += 1
        x = product.operands.x
        wanted = product.by_torch(x)
        times: dict[int | None, float] = {
            None: self.timer.seconds(functools.partial(product.by_torch, x))
        }
        form, operands = product.form, product.operands
        try:
            num_algorithms = self.products.num_algorithms(form, operands)
        except Unavailable as error:  # The library is too old for this form.
            self.problems[str(form)] = str(error)
            num_algorithms = 0
        for number in range(num_algorithms):
            call = functools.partial(self.products.multiply, form, operands, number)
            try:
                self._check(product, number, wanted)
                times[number] = self.timer.seconds(call)
            except Exception as error:  # An algorithm may not support the form.
                self.problems[f"{form}: {_name(number)}"] = first_line(error)
        best = min(times, key=lambda number: times[number])
        is_enough = product.form.num_rows < MANY_ROWS or times[best] <= CLEARLY * times[None]
        return best if is_enough else None

    def _check(self, product: Gemm, number: int, wanted: torch.Tensor) -> None:
        found = self.products.multiply(product.form, product.operands, number)
        check_close(found, wanted, TOLERANCE[product.form.out])


def open_multiplier(device: torch.device, folder: Path) -> Multiplier:
    """Return a multiplier with the choices in a version's folder; Unavailable if impossible."""
    products = cublaslt.open_products(device)
    path = folder / CHOICES
    told = remembered(path.read_bytes(), device) if path.is_file() else {}
    return Multiplier(products, GpuTimer(device, NUM_CALLS, NUM_RUNS), told)


def joined(files: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the files of several choosers of one model, with all their choices in one file."""
    found = {name: content for each in files for name, content in each.items()}
    parts = [
        msgspec.json.decode(each[CHOICES], type=Remembered) for each in files if CHOICES in each
    ]
    if len(parts) > 1:
        choices = {key: name for part in parts for key, name in part.choices.items()}
        whole = msgspec.structs.replace(parts[0], choices=choices)
        found[CHOICES] = msgspec.json.format(msgspec.json.encode(whole), indent=1)
    return found


def _name(number: int | None) -> str:
    return REFERENCE if number is None else f"{PREFIX} {number}"
