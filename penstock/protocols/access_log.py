"""One line per inference: the request, its outcome and its timings. Only with --log-requests. Never
logs contents: neither tensors nor error texts, which may quote them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.protocols.http_errors import logged_status
from penstock.types import Request, Timings

if TYPE_CHECKING:
    from penstock.llm.generation import Generation

log = logging.getLogger("penstock.requests")


def ended(protocol: str, config: ModelConfig, request: Request, error: object) -> None:
    """Log a request that a model answered or refused; `error` may be an answer."""
    # Rows are unknown for a request that did not fit the model.
    rows = request.num_rows if request.timings.queued else ""
    what = {**about(config), "request_id": request.id, "rows": rows}
    record(protocol, what, _spans(request.timings), error)


def refused(
    protocol: str, what: Mapping[str, str], received: float, error: Exception, path: bytes = b""
) -> None:
    """Log a message that did not become a request; `what` names its model or path."""
    record(protocol, what, {"total": time.monotonic() - received}, error, path)


def generated(
    what: Mapping[str, object],
    generations: Sequence[Generation],
    received: float,
    error: PenstockError | None,
    path: bytes,
) -> None:
    """Log a request for text that a language model answered or refused."""
    totals = [each.totals for each in generations]
    num_tokens = {
        "prompt_tokens": sum(each.num_prompt for each in totals),
        "generation_tokens": sum(each.num_generated for each in totals),
    }
    spans = {"total": time.monotonic() - received}
    firsts = [each.first_at for each in generations if each.first_at is not None]
    if firsts:
        spans["first_token"] = min(firsts) - received
    record("http", {**what, **num_tokens}, spans, error, path)


def about(config: ModelConfig) -> dict[str, object]:
    return {"model": config.name, "version": config.version}


def record(
    protocol: str,
    what: Mapping[str, object],
    spans: Mapping[str, float],
    error: object,
    path: bytes = b"",
) -> None:
    """Log one line. `spans` are in seconds; of an error only kind and status are logged."""
    status = logged_status(protocol, error, path)
    kind = type(error).__name__ if isinstance(error, Exception) else ""
    times = {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in spans.items()}
    write(log, protocol, {"status": status, **what, "error": kind, **times})


def write(logger: logging.Logger, protocol: str, fields: dict[str, object]) -> None:
    """Log one line, without empty fields."""
    fields = {key: value for key, value in fields.items() if value != ""}
    text = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
    logger.info("%s %s", protocol, text, extra={"protocol": protocol, **fields})


def _spans(timings: Timings) -> dict[str, float]:
    """Return the timings; stages that were not reached are left out."""
    queued, dispatched = timings.queued, timings.dispatched
    reached = {"decode": queued, "queue": dispatched, "compute": timings.compute_infer_s}
    total_s = (timings.completed or time.monotonic()) - timings.received
    phases = timings.phases().items()
    return {"total": total_s, **{name: s for name, s in phases if reached.get(name.split("_")[0])}}


def _quoted(value: object) -> str:
    """Quote a value unless it is one word, so that a client's text cannot look like two fields."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text)
