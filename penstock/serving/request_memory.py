"""The tensors of one model's requests in shared memory: inputs in, outputs out.

Requests with fixed row sizes are copied into slabs as they arrive; others get extents of the input
spill when their batch is sent. Knows no process: a `Dispatch` frame is all that a worker sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.config import ModelConfig
from penstock.errors import TooLarge
from penstock.serving.batches import RunningBatch
from penstock.serving.context import ModelContext
from penstock.serving.held_rows import HeldBatch, HeldRows
from penstock.serving.model_gauges import ModelGauges
from penstock.serving.plan import Fit, RequestPlan
from penstock.serving.regions import LentTensor
from penstock.serving.reservation import Reservation
from penstock.serving.slab import Extents, Segment, Slab, SlabPool, aligned
from penstock.types import Request, Tensor, TensorSpec, to_array
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
        # Of bodies that are being received, and of queued requests: they can be moved out.
        self._receiving: set[Reservation] = set()
        self._queued: set[Request] = set()
        self._num_reserved_bytes = 0
        max_slabs = _max_slabs(config)
        self.pool = SlabPool(context.planner.slab_bytes, max_slabs)
        if config.uses_gpu and context.planner.has_rows:
            # Workers pin slabs, which takes milliseconds: not while requests wait.
            self.pool.prepare(min(max_slabs, config.num_instances + 1))
        # Every slab there is; it grows, and workers must map each before its first batch.
        self.slabs: Sequence[Slab] = self.pool.slabs
        fixed = [index for index, spec in enumerate(config.outputs) if spec.is_fixed]
        self._column = {index: column for column, index in enumerate(fixed)}
        self.needs_parts = len(self._column) < len(config.outputs)

    def resize(self, config: ModelConfig) -> None:
        """Serve another number of instances."""
        self.pool.allow(_max_slabs(config))

    def close(self) -> None:
        self.pool.close()
        self.input_spill.close()

    def gauges(self) -> ModelGauges:
        """Return the bytes of all slabs, and of rows that requests hold."""
        used = sum(
            slab.num_held * slab.layout.nbytes // slab.layout.capacity
            for slab in self.slabs
            if slab.layout is not None
        )
        return ModelGauges(len(self.slabs) * self.pool.slab_bytes, used)

    def check_size(self, request: Request) -> None:
        """Raise TooLarge if even an empty spill has no room for the inputs."""
        needed = sum(aligned(tensor.nbytes) for tensor in request.inputs)
        if needed > self.extents.capacity:
            raise TooLarge(
                f"the inputs take {needed} bytes, more than the {self.extents.capacity} that "
                f"model '{self._config.name}' has for them (parameters.penstock.spill_bytes)"
            )

    def place(self, request: Request, *, is_needed: bool = False) -> bool:
        """Copy the tensors into rows of a slab and drop the request's own buffers, unless a worker
        may read them where they are. False if all slabs are taken, unless it `is_needed`. Requests
        without a row layout stay as they are."""
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
        if request.rows is not None and plan.own_shapes is None:
            return True
        request.rows = None
        if plan.own_shapes is not None:
            self._fill_padded(request, plan, slab)
        else:
            inputs, view = request.inputs, slab.seg.view
            for (offset, row_bytes), index in zip(geometry.input_columns, plan.order, strict=True):
                start = offset + row * row_bytes
                # The worker reads what is in a client's memory.
                if inputs[index].place is None:
                    view[start : start + count * row_bytes] = inputs[index].data
        request.inputs = ()
        return True

    def reserve(self, form: object) -> Reservation | None:
        """Reserve memory for a request of a form that was served before, while it is received. None
        if it has to be copied: its form is unknown, it is padded, or too much is reserved."""
        fit = self._planner.known.get(form)
        if fit is None or fit.plan.own_shapes is not None:
            return None
        geometry, count = fit.plan.geometry, fit.plan.num_rows
        if geometry.layout is None:
            return self._reserve_extents(fit)
        slab = self.pool.reserve(geometry, geometry.layout, count)
        if slab is None:
            return None
        row = slab.next_row - count
        views = [slab.seg.view] * len(fit.plan.order)
        for (offset, row_bytes), index in zip(geometry.input_columns, fit.plan.order, strict=True):
            start = offset + row * row_bytes
            views[index] = slab.seg.view[start : start + count * row_bytes]
        return Reservation(fit, views, self, slab, row)

    def _reserve_extents(self, fit: Fit) -> Reservation | None:
        sizes = [0] * len(fit.plan.order)
        for index, size in zip(fit.plan.order, fit.plan.sizes, strict=True):
            sizes[index] = size or 0
        total = sum(map(aligned, sizes))
        # What is copied must find room too, whatever slow clients and long queues hold.
        if self._num_reserved_bytes + total > self.extents.capacity // 4:
            return None
        offsets: list[int] = []
        for size in sizes:
            offset = self.extents.allocate(size)
            if offset is None:
                for each in offsets:
                    self.extents.release(each)
                return None
            offsets.append(offset)
        self._num_reserved_bytes += total
        view = self.input_spill.view
        views = [view[at : at + size] for at, size in zip(offsets, sizes, strict=True)]
        reservation = Reservation(fit, views, self, offsets=tuple(offsets))
        self._receiving.add(reservation)
        return reservation

    def give_back(self, reservation: Reservation) -> None:
        slab, count = reservation.slab, reservation.fit.plan.num_rows
        if slab is not None:
            self.pool.received(slab, count)
            self.pool.release(slab, count, was_dispatched=False)
        else:
            self._receiving.discard(reservation)
            self._release_offsets(reservation.offsets, reservation.fit)

    def _release_offsets(self, offsets: Sequence[int], fit: Fit) -> None:
        self._num_reserved_bytes -= sum(aligned(size or 0) for size in fit.plan.sizes)
        for offset in offsets:
            self.extents.release(offset)

    def adopt(self, request: Request, reservation: Reservation) -> bool:
        """Give the request the memory that was reserved for it, and that it fills. False if that
        has another layout, or was given back: then the request has private copies."""
        ticket = request.ticket
        if reservation.memory is not self or reservation.fit is not ticket.fit:
            reservation.move_out()
            for tensor, view in zip(request.inputs, reservation.views, strict=True):
                tensor.data = view
            return False
        reservation.memory = None
        if reservation.slab is None:
            self._receiving.discard(reservation)
            self._queued.add(request)
            ticket.offsets = reservation.offsets
            return True
        ticket.slab, ticket.row = reservation.slab, reservation.row
        self.pool.received(reservation.slab, request.num_rows)
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
        if ticket.loan is not None:
            loan, ticket.loan = ticket.loan, None
            loan.end()
        slab = ticket.slab
        if slab is not None:
            ticket.slab = None
            self.pool.release(slab, request.num_rows, was_dispatched)
        elif ticket.offsets:
            self._queued.discard(request)
            offsets, ticket.offsets = ticket.offsets, ()
            self._release_offsets(offsets, ticket.fit)

    def keep(self, request: Request) -> Callable[[], None]:
        """Keep the rows of a request that is being answered; return what releases them."""
        ticket = request.ticket
        slab, ticket.slab = ticket.slab, None
        assert slab is not None
        return partial(self.pool.release, slab, request.num_rows)

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
            extents = self._extents_of(request) if index < MAX_PARTS else None
            if extents is None and index == 0:
                # Those behind it in the queue must not block it.
                self._move_out()
                extents = self._extents_of(request)
            if extents is None:
                assert index or self.extents.num_held, "one request fits an empty spill segment"
                return index
            batch.extents.append(extents)
        return len(batch.requests)

    def _extents_of(self, request: Request) -> tuple[frames.Extent, ...] | None:
        """Return the extents that the request holds, or copies; None if these do not all fit."""
        if not request.ticket.offsets:
            return self._copy(request.inputs)
        self._queued.discard(request)
        return tuple(
            frames.Extent(each.name, each.datatype, each.shape, offset, len(each.data))
            for each, offset in zip(request.inputs, request.ticket.offsets, strict=True)
        )

    def _move_out(self) -> None:
        """Move what is being received, and what is queued, out of the spill."""
        for reservation in list(self._receiving):
            reservation.move_out()
        for request in list(self._queued):
            for tensor in request.inputs:
                tensor.data = bytes(tensor.data)
            self.release(request)

    def _copy(self, tensors: Sequence[Tensor]) -> tuple[frames.Extent, ...] | None:
        """Copy tensors into extents of the spill; None if they do not all fit."""
        placed: list[frames.Extent] = []
        for tensor in tensors:
            nbytes = tensor.nbytes
            offset = self.extents.allocate(nbytes)
            if offset is None:
                for extent in placed:
                    self.extents.release(extent.offset)
                return None
            if tensor.place is None:
                self.input_spill.view[offset : offset + nbytes] = tensor.data
            placed.append(frames.Extent(tensor.name, tensor.datatype, tensor.shape, offset, nbytes))
        return tuple(placed)

    def frame(self, batch: RunningBatch) -> frames.Dispatch:
        """Describe a placed batch to its worker, and count its rows."""
        geometry = batch.requests[0].ticket.fit.plan.geometry
        batch.num_tokens = sum(request.num_tokens for request in batch.requests)
        layout = geometry.layout
        has_regions = any([request.uses_regions for request in batch.requests])
        if layout is None:
            batch.num_rows = sum(request.num_rows for request in batch.requests)
            parts, held = self._parts(batch), self._hold(batch, has_rows=False)
            return frames.Dispatch(
                batch.id,
                (),
                requests=parts,
                num_tokens=batch.num_tokens,
                held=held,
                has_regions=has_regions,
            )
        runs: list[frames.RowRange] = []
        slab: Slab | None = None
        start = count = 0
        has_rows = False
        for request in batch.requests:
            has_rows = has_rows or request.rows is not None
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
        if len(runs) > 1:
            runs = self._sorted_runs(batch)
        parts = self._parts(batch) if self.needs_parts or has_regions else ()
        return frames.Dispatch(
            batch.id,
            tuple(runs),
            geometry.row_shapes,
            layout.capacity,
            parts,
            num_tokens=batch.num_tokens,
            held=self._hold(batch, has_rows),
            has_regions=has_regions,
        )

    def _hold(self, batch: RunningBatch, has_rows: bool) -> int:
        """Return the number of a batch with a caller in this process; 0 if it has none.
        `has_rows`: some of its inputs are not in shared memory."""
        requests = batch.requests
        if not any([request.takes_arrays for request in requests]):
            return 0
        counts = [request.num_rows for request in requests]
        batch.held = HeldBatch(counts, map(self._held, requests) if has_rows else ())
        return batch.held.number

    def _held(self, request: Request) -> HeldRows:
        """Return where the inputs of a placed request are: its own memory, or its rows."""
        if request.rows is not None:
            return request.rows
        slab, row = request.ticket.slab, request.ticket.row
        assert slab is not None
        plan, arrays = request.ticket.fit.plan, {}
        columns, shapes = plan.geometry.input_columns, plan.geometry.row_shapes
        for spec, (offset, size), shape in zip(self._config.inputs, columns, shapes, strict=True):
            start = offset + row * size
            data = slab.seg.view[start : start + plan.num_rows * size].toreadonly()
            tensor = Tensor(spec.name, spec.datatype, (plan.num_rows, *shape), data)
            arrays[spec.name] = to_array(tensor)
        return HeldRows(arrays, 0, plan.num_rows)

    def _sorted_runs(self, batch: RunningBatch) -> list[frames.RowRange]:
        """Sort the requests of a batch by their rows; return the runs of adjacent rows. Requests
        whose bodies were received side by side are complete in any order."""
        batch.requests.sort(key=_place_of)
        runs: list[frames.RowRange] = []
        for request in batch.requests:
            slab_id, row = _place_of(request)
            last = runs[-1] if runs else None
            if last is not None and last.slab == slab_id and last.row + last.count == row:
                runs[-1] = frames.RowRange(slab_id, last.row, last.count + request.num_rows)
            else:
                runs.append(frames.RowRange(slab_id, row, request.num_rows))
        return runs

    def _parts(self, batch: RunningBatch) -> tuple[frames.RequestPart, ...]:
        return tuple(
            frames.RequestPart(
                request.id,
                request.num_rows,
                batch.extents[index] if batch.extents else (),
                tuple(output.name for output in request.outputs),
                dict(request.parameters or {}),
                request.ticket.fit.plan.length,
                *(self._spans(request) if request.uses_regions else ((), ())),
                request.ticket.slot,
            )
            for index, request in enumerate(batch.requests)
        )

    def _spans(
        self, request: Request
    ) -> tuple[tuple[frames.RegionSpan, ...], tuple[frames.RegionSpan, ...]]:
        """Return what the worker reads from clients' memory, and what it writes there."""
        loan = request.ticket.loan
        assert loan is not None, "it is admitted"
        reads, writes = loan.inputs.values(), loan.outputs.values()
        return tuple(span.frame for span in reads), tuple(span.frame for span in writes)

    def outputs(
        self, request: Request, output_spill: Segment | None, extents: Sequence[frames.Extent]
    ) -> list[Tensor]:
        """Return views of the outputs, in the order of the request."""
        outputs: list[Tensor] = []
        specs = self._config.outputs
        ticket, count = request.ticket, request.num_rows
        fit, slab, loan = ticket.fit, ticket.slab, ticket.loan
        for index in fit.selection:
            spec = specs[index]
            if loan is not None and spec.name in loan.outputs:
                outputs.append(self._placed(spec, loan.outputs[spec.name], request, extents))
                continue
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

    def _placed(
        self, spec: TensorSpec, span: LentTensor, request: Request, extents: Sequence[frames.Extent]
    ) -> Tensor:
        """Return an output that the worker has written to a client's memory."""
        extent = next((extent for extent in extents if extent.name == spec.name), None)
        if extent is not None:
            shape, nbytes = extent.shape, extent.nbytes
        else:
            shape = (request.num_rows, *spec.shape)
            nbytes = spec.row_bytes(shape)
        return Tensor(spec.name, spec.datatype, shape, b"", replace(span.place, nbytes=nbytes))

    def release_extents(self, batch: RunningBatch) -> None:
        """Release the copies; requests keep extents of their own."""
        for request, extents in zip(batch.requests, batch.extents, strict=False):
            if not request.ticket.offsets:
                for extent in extents:
                    self.extents.release(extent.offset)
        batch.extents = []

    def release_batch(self, batch: RunningBatch) -> None:
        """Release all that the requests of a batch hold, their own buffers included."""
        self.release_extents(batch)
        for request in batch.requests:
            self.release(request)
            request.inputs = ()
            request.rows = None


def _place_of(request: Request) -> tuple[int, int]:
    slab = request.ticket.slab
    assert slab is not None
    return slab.id, request.ticket.row


def _max_slabs(config: ModelConfig) -> int:
    return max(config.memory.max_slabs, 2 * config.max_instances)
