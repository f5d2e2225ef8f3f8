"""One line per inference: the request, its outcome and its timings. Only with --log-requests. Never
logs contents: neither tensors nor error texts, which may quote them."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import ModelConfig
from penstock.types import Request, Timings

if TYPE_CHECKING:
    from penstock.llm.generation import Generation

log = logging.getLogger("penstock.requests")


def ended(protocol: str, status: object, config: ModelConfig, request: Request, error: str) -> None:
    """Log a request that a model answered or refused; `error` is the kind of error, if any."""
    fields = {
        "status": status,
        "model": config.name,
        "version": config.version,
        "request_id": request.id,
        # Unknown for a request that did not fit the model.
        "rows": request.num_rows if request.timings.queued else "",
        "error": error,
        **_milliseconds(request.timings),
    }
    _write(protocol, fields)


@dataclass(slots=True)
class Generated:
    """Totals over the prompts of one text request."""

    id: str
    received: float
    num_prompt: int = 0
    num_generated: int = 0
    first_at: float | None = None

    def add(self, generation: Generation) -> None:
        totals = generation.totals
        self.num_prompt += totals.num_prompt
        self.num_generated += totals.num_generated
        if generation.first_at is not None:
            self.first_at = min(generation.first_at, self.first_at or generation.first_at)


def generated(status: object, config: ModelConfig, told: Generated, error: str) -> None:
    """Log a text request that reached a model."""
    fields = {
        "status": status,
        "model": config.name,
        "version": config.version,
        "request_id": told.id,
        "prompt_tokens": told.num_prompt,
        "generation_tokens": told.num_generated,
        "error": error,
        "total_ms": _ms(time.monotonic() - told.received),
    }
    if told.first_at is not None:
        fields["first_token_ms"] = _ms(told.first_at - told.received)
    _write("http", fields)


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Size and arrival of a message that became several requests."""

    count: int
    received: float


def embedded(status: object, config: ModelConfig, rows: EmbeddedRows, error: str) -> None:
    fields = {
        "status": status,
        "model": config.name,
        "version": config.version,
        "rows": rows.count,
        "error": error,
        "total_ms": _ms(time.monotonic() - rows.received),
    }
    _write("http", fields)


def refused(
    protocol: str, status: object, what: dict[str, str], received: float, error: str
) -> None:
    """Log a message that did not become a request; `what` names its model or path."""
    total_ms = _ms(time.monotonic() - received)
    fields = {"status": status, **what, "error": error, "total_ms": total_ms}
    _write(protocol, fields)


def _write(protocol: str, fields: dict[str, object]) -> None:
    write(log, protocol, fields)


def write(logger: logging.Logger, protocol: str, fields: dict[str, object]) -> None:
    """Log one line, without empty fields."""
    fields = {key: value for key, value in fields.items() if value != ""}
    text = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
    logger.info("%s %s", protocol, text, extra={"protocol": protocol, **fields})


def _milliseconds(timings: Timings) -> dict[str, float]:
    """Return the timings; stages that were not reached are left out."""
    ended = timings.completed or time.monotonic()
    spans = {"total": ended - timings.received}
    if timings.queued:
        spans["decode"] = timings.queued - timings.received
    if timings.dispatched:
        queue_s = timings.dispatched - timings.queued
        spans["queue_batch"] = queue_s - timings.instance_wait_s
        spans["queue_instance"] = timings.instance_wait_s
    if timings.compute_infer_s:
        spans["compute_input"] = timings.compute_input_s
        spans["compute_infer"] = timings.compute_infer_s
        spans["compute_output"] = timings.compute_output_s
    return {f"{name}_ms": _ms(seconds) for name, seconds in spans.items()}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _quoted(value: object) -> str:
    """Quote a value unless it is one word, so that a client's text cannot look like two fields."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text)
