"""The tensors of one model's requests in shared memory: inputs in, outputs out.

Requests with fixed row sizes are copied into slabs as they arrive; others get extents of the input
spill when their batch is sent. Knows no process: a `Dispatch` frame is all that a worker sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import TooLarge
from penstock.serving.batches import RunningBatch
from penstock.serving.context import ModelContext
from penstock.serving.plan import RequestPlan
from penstock.serving.slab import Extents, Segment, Slab, SlabPool, aligned
from penstock.types import Request, Tensor
from penstock.wire import frames

# Limit on the requests of one batch of extents, so that its frame stays small.
MAX_PARTS = 256


class RequestMemory:
    """Owns slabs and input spill. `needs_parts`: workers need the requests of a batch."""

    def __init__(self, context: ModelContext) -> None:
        self._config = config = context.config
        self._planner = context.planner
        self._metrics = context.metrics
        self.input_spill = Segment(config.memory.spill_bytes)
        self.extents = Extents(config.memory.spill_bytes)
        max_slabs = max(config.memory.max_slabs, 2 * config.num_instances)
        self.pool = SlabPool(context.planner.slab_bytes, max_slabs)
        # Every slab there is; it grows, and workers must map each before its first batch.
        self.slabs: Sequence[Slab] = self.pool.slabs
        fixed = [index for index, spec in enumerate(config.outputs) if spec.is_fixed]
        self._column = {index: column for column, index in enumerate(fixed)}
        self.needs_parts = len(self._column) < len(config.outputs)

    def close(self) -> None:
        self.pool.close()
        self.input_spill.close()

    def check_size(self, request: Request) -> None:
        """Raise TooLarge if even an empty spill has no room for the inputs."""
        needed = sum(aligned(len(tensor.data)) for tensor in request.inputs)
        if needed > self.extents.capacity:
            raise TooLarge(
                f"the inputs take {needed} bytes, more than the {self.extents.capacity} that "
                f"model '{self._config.name}' has for them (parameters.penstock.spill_bytes)"
            )

    def place(self, request: Request, *, is_needed: bool = False) -> bool:
        """Copy the tensors into rows of a slab and drop the request's own buffers. False if all
        slabs are taken, unless it `is_needed`. Requests without a row layout stay as they are."""
        ticket = request.ticket
        plan = ticket.fit.plan
        geometry, count = plan.geometry, plan.num_rows
        if geometry.layout is None:
            return True
        slab = self.pool.place(geometry, geometry.layout, count, is_needed=is_needed)
        if slab is None:
            return False
        ticket.slab = slab
        ticket.row = row = slab.next_row - count
        if plan.own_shapes is not None:
            self._fill_padded(request, plan, slab)
        else:
            inputs, view = request.inputs, slab.seg.view
            for (offset, row_bytes), index in zip(geometry.input_columns, plan.order, strict=True):
                start = offset + row * row_bytes
                view[start : start + count * row_bytes] = inputs[index].data
        request.inputs = ()
        return True

    def _fill_padded(self, request: Request, plan: RequestPlan, slab: Slab) -> None:
        pads, geometry = self._planner.pads, plan.geometry
        assert pads is not None and plan.own_shapes is not None
        for index, (offset, row_bytes) in enumerate(geometry.input_columns):
            start = offset + request.ticket.row * row_bytes
            target = slab.seg.view[start : start + plan.num_rows * row_bytes]
            data = request.inputs[plan.order[index]].data
            pads.write(index, target, data, plan.own_shapes[index], geometry.row_shapes[index])
            self._metrics.padded_bytes += len(target)
            self._metrics.padding_bytes += len(target) - len(data)

    def release(self, request: Request, *, was_dispatched: bool = True) -> None:
        """Return the rows that the request holds, if any."""
        ticket = request.ticket
        slab = ticket.slab
        if slab is not None:
            ticket.slab = None
            self.pool.release(slab, request.num_rows, was_dispatched)

    def requeued(self, request: Request) -> None:
        """Record that a request that was dispatched is queued again; it keeps its rows."""
        slab = request.ticket.slab
        if slab is not None:
            self.pool.requeued(slab, request.num_rows)

    def place_batch(self, batch: RunningBatch) -> int:
        """Give the requests of a batch the memory that they lack; return how many, from the first
        on, have it. 0: the spill has no room."""
        if batch.requests[0].ticket.fit.plan.geometry.layout is None:
            return self._place_extents(batch)
        for index, request in enumerate(batch.requests):
            if request.ticket.slab is None and not self.place(request, is_needed=index == 0):
                return index
        return len(batch.requests)

    def _place_extents(self, batch: RunningBatch) -> int:
        for index, request in enumerate(batch.requests):
            extents = self._copy(request.inputs) if index < MAX_PARTS else None
            if extents is None:
                assert index or self.extents.num_held, "one request fits an empty spill segment"
                return index
            batch.extents.append(extents)
        return len(batch.requests)

    def _copy(self, tensors: Sequence[Tensor]) -> tuple[frames.Extent, ...] | None:
        """Copy tensors into extents of the spill; None if they do not all fit."""
        placed: list[frames.Extent] = []
        for tensor in tensors:
            nbytes = len(tensor.data)
            offset = self.extents.allocate(nbytes)
            if offset is None:
                for extent in placed:
                    self.extents.release(extent.offset)
                return None
            self.input_spill.view[offset : offset + nbytes] = tensor.data
            placed.append(frames.Extent(tensor.name, tensor.datatype, tensor.shape, offset, nbytes))
        return tuple(placed)

    def frame(self, batch: RunningBatch) -> frames.Dispatch:
        """Describe a placed batch to its worker, and count its rows."""
        geometry = batch.requests[0].ticket.fit.plan.geometry
        batch.num_tokens = sum(request.num_tokens for request in batch.requests)
        layout = geometry.layout
        if layout is None:
            batch.num_rows = sum(request.num_rows for request in batch.requests)
            parts = self._parts(batch)
            return frames.Dispatch(batch.id, (), requests=parts, num_tokens=batch.num_tokens)
        runs: list[frames.RowRange] = []
        slab: Slab | None = None
        start = count = 0
        for request in batch.requests:
            ticket, num_rows = request.ticket, request.num_rows
            assert ticket.slab is not None
            if ticket.slab is slab and ticket.row == start + count:
                count += num_rows
            else:
                if slab is not None:
                    runs.append(frames.RowRange(slab.id, start, count))
                slab, start, count = ticket.slab, ticket.row, num_rows
            batch.num_rows += num_rows
            self.pool.dispatched(slab, num_rows)
        assert slab is not None
        runs.append(frames.RowRange(slab.id, start, count))
        parts = self._parts(batch) if self.needs_parts else ()
        return frames.Dispatch(
            batch.id,
            tuple(runs),
            geometry.row_shapes,
            layout.capacity,
            parts,
            num_tokens=batch.num_tokens,
        )

    def _parts(self, batch: RunningBatch) -> tuple[frames.RequestPart, ...]:
        return tuple(
            frames.RequestPart(
                request.id,
                request.num_rows,
                batch.extents[index] if batch.extents else (),
                tuple(output.name for output in request.outputs),
                dict(request.parameters or {}),
                request.ticket.fit.plan.length,
            )
            for index, request in enumerate(batch.requests)
        )

    def outputs(
        self, request: Request, output_spill: Segment | None, extents: Sequence[frames.Extent]
    ) -> list[Tensor]:
        """Return views of the outputs, in the order of the request."""
        outputs: list[Tensor] = []
        specs = self._config.outputs
        ticket, count = request.ticket, request.num_rows
        fit, slab = ticket.fit, ticket.slab
        for index in fit.selection:
            spec = specs[index]
            if slab is not None and index in self._column:
                offset, row_bytes = fit.plan.geometry.output_columns[self._column[index]]
                start = offset + ticket.row * row_bytes
                view = slab.seg.view[start : start + count * row_bytes]
                shape = (count, *spec.shape)
                outputs.append(Tensor(spec.name, spec.datatype, shape, view))
                continue
            extent = next(extent for extent in extents if extent.name == spec.name)
            assert output_spill is not None
            view = output_spill.view[extent.offset : extent.offset + extent.nbytes]
            outputs.append(Tensor(spec.name, spec.datatype, extent.shape, view))
        return outputs

    def release_extents(self, batch: RunningBatch) -> None:
        for extents in batch.extents:
            for extent in extents:
                self.extents.release(extent.offset)
        batch.extents = []

    def release_batch(self, batch: RunningBatch) -> None:
        """Release all that the requests of a batch hold, their own buffers included."""
        self.release_extents(batch)
        for request in batch.requests:
            self.release(request)
            request.inputs = ()
