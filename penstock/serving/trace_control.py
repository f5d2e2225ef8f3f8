"""Tracing as the core runs it: the settings, how many traces are left, and where they go.

Answers the management API's calls for trace settings. Records come from the core's own tracer and
from shards; only those that the count of their settings allows are written, so counts are exact.
Belongs to the core's event loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.config import TraceConfig
from penstock.errors import ConfigError, InvalidRequest
from penstock.serving.scrape import ScrapeLines
from penstock.serving.trace_settings import GLOBAL, TraceLayers, parse_changes
from penstock.serving.trace_writer import TraceJob, TraceWriter
from penstock.serving.tracer import Tracer
from penstock.types import Parameter
from penstock.wire.json_errors import JsonObject
from penstock.wire.trace_records import OFF, TENSORS, TraceRecord, TraceSetting

NO_PLACE = (
    "traces have no place to go: start the server with --trace-config triton,file=FILE, "
    "--trace-config chrome,file=FILE or --trace-config mode=opentelemetry"
)


class TracingShards(Protocol):
    """Shards, which are told the settings of the core's tracer."""

    async def publish(self) -> None:
        """Return when all of them use the settings."""

    def publish_soon(self) -> None: ...


class Traces:
    """`tracer` is the core's own."""

    def __init__(self, tracer: Tracer, shards: TracingShards | None = None) -> None:
        self._tracer = tracer
        self._shards = shards
        self._config = TraceConfig()
        self._layers = TraceLayers()
        self.writer: TraceWriter | None = None

    def begin(self, config: TraceConfig) -> None:
        """Trace as the server was started; ConfigError if traces cannot be written."""
        self._config = config
        start = TraceSetting(config.levels, config.rate, config.count, config.log_frequency)
        self._layers = TraceLayers(start)
        if config.levels and not (config.file or config.exports):
            raise ConfigError(NO_PLACE)
        if config.file and not config.exports:
            check_file(Path(config.file).absolute())
        self.writer = TraceWriter.make(config)
        self._tracer.send = self.receive
        self._use()

    def close(self) -> None:
        """Write what waits. Blocks for a moment."""
        if self.writer is not None:
            self.writer.close()

    def receive(self, record: TraceRecord) -> None:
        """Take the record of a request that has ended here or in a shard."""
        if self.writer is None:
            return
        # Traces of clients do not count.
        if not record.trace_id:
            if not self._layers.take(record.scope):
                return
            if self._layers.is_exhausted(record.scope):
                self._use()
                if self._shards is not None:
                    self._shards.publish_soon()
        frequency = self._layers.setting(record.scope).log_frequency
        self.writer.put(TraceJob(record, frequency))

    async def change(self, model: str, text: str) -> None:
        """Change the settings of a model, or the global ones, as the JSON of a client says."""
        changes = parse_changes(msgspec.json.decode(text, type=JsonObject))
        levels = changes.get("trace_level") or ()
        if levels and self.writer is None:
            raise InvalidRequest(NO_PLACE)
        if self._config.exports and isinstance(levels, tuple) and TENSORS in levels:
            raise InvalidRequest("the level TENSORS needs the trace mode triton")
        self._layers.change(model, changes)
        self._use()
        if self._shards is not None:
            await self._shards.publish()

    def show(self, model: str = GLOBAL) -> JsonObject:
        """Return the settings as Triton answers them."""
        setting, config = self._layers.setting(model), self._config
        shown: JsonObject = {
            "trace_level": list(setting.levels) or [OFF],
            "trace_rate": str(setting.rate),
            "trace_count": str(setting.count),
        }
        if not config.exports:
            frequency = str(setting.log_frequency)
            shown |= {"log_frequency": frequency, "trace_file": config.file}
        shown["trace_mode"] = config.mode
        if config.exports:
            shown["url"] = config.url
            shown |= {f"resource.{key}": value for key, value in config.resource.items()}
            shown["bsp_max_queue_size"] = str(config.max_queue_size)
            shown["bsp_schedule_delay"] = str(round(config.schedule_delay_s * 1e3))
            shown["bsp_max_export_batch_size"] = str(config.max_batch_size)
        return shown

    async def answer(self, model: str, given: Parameter | None) -> bytes:
        """Answer a call: change what is given, then return the settings as JSON."""
        if given:
            await self.change(model, str(given))
        return msgspec.json.encode(self.show(model))

    def families(self) -> Sequence[ScrapeLines]:
        """Return the metrics, if requests can be traced."""
        writer = self.writer
        if writer is None:
            return []
        samples = [({"outcome": "written"}, writer.num_written)]
        samples.append(({"outcome": "dropped"}, writer.num_dropped))
        text = "Traces of requests, by what became of them"
        return [ScrapeLines.of("penstock_traces_total", text, "counter", samples)]

    def _use(self) -> None:
        self._tracer.use(self._layers.table(follows_clients=self._config.exports))


def check_file(path: Path) -> None:
    """Raise ConfigError for a trace file that cannot be written."""
    folder, problem = path.parent, ""
    if path.is_dir():
        problem = "it is a folder"
    elif path.is_symlink():
        problem = "it is a link; name the file itself"
    elif not folder.is_dir():
        problem = f"the folder {folder} does not exist"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "it cannot be written"
    if problem:
        raise ConfigError(f"--trace-config file={path}: {problem}")
