"""Terminal output: progress and table at start, and the explanation of a model."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

import penstock
from penstock.api.server_process import addresses
from penstock.config import CPU
from penstock.dashboard.example_calls import KEY, curl_line, key_options
from penstock.dashboard.state import call_of, num_ready
from penstock.report.tables import bar, section
from penstock.repository.layout import listed
from penstock.serving.explain import Explanation, PastBatch, StepState
from penstock.serving.placement import briefly, describe_share, gib
from penstock.system import logs

if TYPE_CHECKING:
    from penstock.server import LoadProgress, Server
    from penstock.serving.placement import GpuPlan
    from penstock.serving.served import Served

log = logging.getLogger("penstock.cli")
server_log = logging.getLogger("penstock.server")

STATE_STYLES = {"READY": "green", "UNAVAILABLE": "red", "LOADING": "yellow"}
NUM_BATCHES_SHOWN = 12
BAR_WIDTH = 40
WATCH_S = 1.0
# Interval between lines when the output is not a terminal.
QUIET_S = 10.0


def console() -> Console:
    made = Console()
    if not made.is_terminal:
        made.width = 1000  # Wide enough that no line of a file is broken.
    return made


class LoadingStatus:
    """Reports that models are loading: a moving line in a terminal, otherwise a line in the log."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._told_at: float | None = None

    def __call__(self, progress: LoadProgress) -> None:
        names = listed(progress.waiting_for, 5)
        text = f"{progress.num_loaded} of {progress.num_models} models loaded; loading {names}"
        if sys.stderr.isatty():
            if self._status is None:
                self._status = Console(stderr=True).status("")
                self._status.start()
            self._status.update(f"{escape(text)} ({progress.elapsed_s:.0f} s)")
        elif self._told_at is None or progress.elapsed_s - self._told_at >= QUIET_S:
            self._told_at = progress.elapsed_s
            log.info("%s", text)

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


# Start.


def print_start(server: Server, host: str, names: Sequence[str]) -> None:
    """Print the models (`names` are those of the repository) and the addresses."""
    out = console()
    out.print(start_table(server, names))
    for failure in server.catalog.failures:
        for problem in failure.problems:
            out.print(Text(f"{failure.name}: {problem}", style="red"), soft_wrap=True)
    lines = [f"{what:7}  {address}" for what, address in _addresses(server, host).items()]
    lines.append(f"Page     {addresses(server, reachable(host)).url}/")
    choice = server.shard_choice
    lines.append(f"Shards   {choice.number} ({choice.reason})")
    for line in [*lines, *_try_it(server, reachable(host))]:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def log_start(server: Server, host: str, names: Sequence[str]) -> None:
    """Log the same for machines: one line per model and port."""
    models = {(model.config.name, model.config.version): model for model in server.catalog}
    for entry in server.catalog.index(names):
        fields: dict[str, object] = {"model": entry.name, "version": entry.version}
        fields["state"] = entry.state or "not loaded"
        if entry.reason:
            fields["reason"] = entry.reason
        if model := models.get((entry.name, entry.version)):
            fields |= {"backend": model.config.backend, "batching": _batching(model)}
            fields |= {"instances": model.config.num_instances, "load_s": model.metrics.load_s}
            fields["devices"] = list(model.config.devices)
        whole = f"{entry.name}/{entry.version}".removesuffix("/")
        server_log.info("%s is %s", whole, fields["state"], extra=fields)
    for what, address in _addresses(server, host).items():
        server_log.info("%s is served at %s", what, address, extra={"address": address})


def reachable(host: str) -> str:
    """Return an address under which clients on this machine reach a server that listens on `host`:
    listening on all addresses includes the loopback one."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _try_it(server: Server, host: str) -> list[str]:
    """Return a command that calls the first model that is ready, and what it needs."""
    ready = [model for model in server.catalog if model.is_ready]
    if not ready:
        return []
    model = min(ready, key=lambda each: (each.config.name, -int(each.config.version)))
    lines, options = ["", "Try it:"], []
    if server.needs_key:
        lines.append(f"  export {KEY}=...  # a key with the scope infer")
    if server.tls is not None:
        lines.append("  # If the certificate is not for this address: -k instead of --cacert.")
        options += ["--cacert", shlex.quote(server.tls.cert)]
        if server.tls.client_ca:
            options += ["--cert", "client.pem", "--key", "client-key.pem"]
    options += key_options() if server.needs_key else []
    line = curl_line(call_of(server.catalog, model), addresses(server, host).url, options)
    return [*lines, f"  {line}"]


def _addresses(server: Server, host: str) -> dict[str, str]:
    at = addresses(server, host)
    grpc, metrics = at.grpc_url.partition("://")[2], at.metrics_url
    found = {"HTTP": f"{at.url}/v2", "gRPC": grpc, "Metrics": metrics}
    return {what: address for what, address in found.items() if address}


def tell_memory_plan(plan: Sequence[GpuPlan]) -> None:
    """Report GPU memory by model: a table in a terminal, otherwise lines in the log."""
    out = console()
    if out.is_terminal and logs.from_environment().format != "json":
        out.print(memory_table(plan))
        return
    for each in plan:
        gpu, models = each.gpu, "; ".join(map(describe_share, each.shares))
        fields = {"gpu_uuid": gpu.uuid, "needed_bytes": each.needed_bytes}
        server_log.info(
            "GPU %d (%s): models need %s of the %s that can be had: %s",
            *(gpu.index, gpu.name, gib(each.needed_bytes), gib(each.room_bytes), models),
            extra=fields | {"room_bytes": each.room_bytes, "total_bytes": gpu.total_bytes},
        )


def memory_table(plan: Sequence[GpuPlan]) -> Table:
    table = Table(title="GPU memory", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("GPU", "model"):
        table.add_column(column, overflow="fold")
    for column in ("workers", "each", "together", ""):
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    for each in plan:
        gpu, name = each.gpu, f"{each.gpu.index} {each.gpu.name}"
        for share in each.shares:
            cells = (gib(share.need.num_bytes), gib(share.num_bytes), share.need.source)
            model = escape(f"{share.model}/{share.version}")
            slots = share.num_instances // share.num_workers
            workers = f"{share.num_workers} of {slots}" if slots > 1 else str(share.num_workers)
            table.add_row(escape(name), model, workers, *cells)
            name = ""
        style = "green" if each.fits else "red"
        room = f"of {gib(each.room_bytes)}" if gpu.total_bytes else "of unknown"
        total = f"[{style}]{gib(each.needed_bytes)}[/{style}]"
        table.add_row("", "[dim]in all[/dim]", "", "", total, room)
    return table


def start_table(server: Server, names: Sequence[str]) -> Table:
    title = f"Penstock {penstock.__version__}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold")
    for column in ("version", "state", "backend", "batching", "instances", "loaded in"):
        is_figure = column in ("version", "instances", "loaded in")
        table.add_column(column, no_wrap=True, justify="right" if is_figure else "left")
    models = {(model.config.name, model.config.version): model for model in server.catalog}
    for entry in server.catalog.index(names):
        state = entry.state or "not loaded"
        style = STATE_STYLES.get(state, "dim")
        cells = [escape(entry.name), entry.version, f"[{style}]{state}[/{style}]"]
        table.add_row(*cells, *_model_cells(models.get((entry.name, entry.version))))
    return table


def _model_cells(model: Served | None) -> list[str]:
    if model is None:
        return ["", "", "", ""]
    config, ready = model.config, num_ready(model)
    count = str(config.num_instances)
    if ready != config.num_instances:
        count = f"{ready} of {count}"
    if config.uses_gpu:
        count += f" on {briefly(config)}"
    return [config.backend, _batching(model), count, f"{model.metrics.load_s:.2f} s"]


def _batching(model: Served) -> str:
    config, mode = model.config, model.mode
    if mode in ("continuous", "ensemble"):
        return mode
    slo_s = config.batching.slo_latency_s
    text = "no" if mode == "unbatched" else f"up to {config.max_batch_size}"
    if mode == "slo" and slo_s is not None:
        text += f", SLO {slo_s * 1e3:g} ms"
    return text


# Explain.


def explained(answer: Explanation) -> Group:
    """Render an explanation, most important parts first: a screen may be too small for the rest."""
    parts: list[RenderableType] = [_title(answer)]
    parts += [Text(f"Note: {note}", style="yellow") for note in answer.notes]
    if answer.steps:
        return Group(*parts, *_ensemble(answer))
    parts.append(section("Why batches are as they are"))
    parts += [Text(f"- {text}") for text in answer.verdicts]
    if any(each.device != CPU for each in answer.instances):
        columns: tuple[str, ...] = ("instance", "device", "state", "slots", "pid", "GPU memory")
        rows: list[Sequence[object]] = [
            (one.index, one.device, one.state, one.num_slots, one.pid, memory)
            for one in answer.instances
            for memory in [gib(one.gpu_memory_bytes) if one.gpu_memory_bytes else ""]
        ]
        parts += [section("Instances"), _table(columns, rows, num_words=3)]
    columns = ("shape", "waits for", "requests", "rows", "oldest ms")
    rows = [
        (lane.shape, lane.waits_for, lane.num_requests, lane.num_rows, _ms(lane.oldest_s))
        for lane in answer.waiting
    ]
    parts += [section("Waiting now"), _table(columns, rows, num_words=2, empty="nothing")]
    refused = _table(("reason", "requests"), list(answer.refused.items()), empty="nobody")
    parts += [section("Refused"), refused]
    if answer.paces:
        unit = "tokens" if "max_tokens" in answer.policy else "rows"
        parts.append(section(f"T(b) in ms, b in {unit}; b* is aimed at"))
        columns = ("shape", "b*", "arrivals/s", *(f"T({n})" for n in answer.paces[0].times_s))
        rows = [
            (pace.shape, pace.target_size, f"{pace.arrivals_per_s:.0f}", *times)
            for pace in answer.paces
            for times in [map(_ms, pace.times_s.values())]
        ]
        parts.append(_table(columns, rows))
    parts += [section("Rows per batch, since it was loaded"), _bars(answer.batch_sizes)]
    parts += [section("Last batches (ms: waits, then work)"), _recent(answer)]
    rows = [(one.shape, one.num_requests, one.num_rows, one.num_batches) for one in answer.shapes]
    shapes = _table(("shape", "requests", "rows", "batches"), rows)
    parts += [section(f"Shapes of a row ({answer.num_shapes} seen)"), shapes]
    if answer.processes:
        columns = ("process", "pid", "of a core", "connections")
        rows = [
            (one.name, one.pid, f"{one.busy:.0%}", "" if (n := one.num_connections) is None else n)
            for one in answer.processes
        ]
        parts += [section("Event loops just now"), _table(columns, rows)]
    if answer.shards:
        parts.append(Text(answer.shards))
    return Group(*parts)


def _ensemble(answer: Explanation) -> list[RenderableType]:
    """Render the steps of an ensemble, which has no batches of its own."""
    refused = _table(("reason", "requests"), list(answer.refused.items()), empty="nobody")
    parts: list[RenderableType] = [section("Steps (ms: means of a request)")]
    parts += [_steps(answer.steps), *(Text(f"- {text}") for text in answer.verdicts)]
    return [*parts, section("Refused"), refused]


def _steps(steps: Sequence[StepState]) -> RenderableType:
    rows = [
        (one.model, one.version or "latest", *_counts(one), *map(_ms, means))
        for one in steps
        for count in [max(1, one.num_answered)]
        for means in [(one.queue_s / count, one.compute_s / count, one.total_s / count)]
    ]
    columns = ("model", "version", "answered", "failed", "skipped", "queued", "computed", "in all")
    return _table(columns, rows, num_words=2)


def _counts(step: StepState) -> tuple[int, int, int]:
    return step.num_answered, step.num_failed, step.num_skipped


def watch(ask: Callable[[], Explanation]) -> NoReturn:
    """Show a new answer every second until Ctrl-C, which raises KeyboardInterrupt. In a terminal
    each answer replaces the last one, cut to its height; other outputs get all of them."""
    out = console()
    with Live(console=out, auto_refresh=False) if out.is_terminal else nullcontext() as live:
        while True:
            if live is None:
                out.print(explained(ask()), "")
            else:
                live.update(explained(ask()), refresh=True)
            time.sleep(WATCH_S)


def _title(answer: Explanation) -> Group:
    style = STATE_STYLES.get(answer.state, "dim")
    states = [each.state for each in answer.instances]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    policy = ", ".join(f"{name} {text}" for name, text in answer.policy.items())
    return Group(
        Text.assemble(
            (f"{answer.model}/{answer.version}", "bold"), " ", (answer.state, style), f"  {counts}"
        ),
        Text.assemble(("mode ", "dim"), (answer.mode, "bold"), f": {answer.mode_reason}"),
        Text.assemble(("policy ", "dim"), policy),
        *([Text.assemble(("scaling ", "dim"), answer.scaling)] if answer.scaling else []),
    )


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    num_words: int = 1,
    empty: str = "none",
) -> RenderableType:
    """Make a table with words on the left, figures on the right; without rows, `empty`."""
    if not rows:
        return Text(empty, style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        is_word = index < num_words
        table.add_column(column, justify="left" if is_word else "right", no_wrap=not is_word)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def _recent(answer: Explanation) -> RenderableType:
    has_tokens = any(batch.num_tokens for batch in answer.recent)
    tokens = ("tokens",) if has_tokens else ()
    figures = ("rows", *tokens, "requests", "for batch", "for instance", "compute", "total")
    rows = [_batch_cells(batch, has_tokens) for batch in answer.recent[:NUM_BATCHES_SHOWN]]
    return _table(("closed by", "shape", "instance", "ago", *figures), rows, num_words=2)


def _batch_cells(batch: PastBatch, has_tokens: bool) -> list[object]:
    why = batch.closed_by
    if batch.outcome != "answered":
        why += f" ({batch.outcome})"
    tokens = [batch.num_tokens] if has_tokens else []
    times = (batch.batch_wait_s, batch.instance_wait_s, batch.compute_s, batch.duration_s)
    cells = (why, batch.shape, batch.instance, f"{batch.age_s:.1f} s", batch.num_rows)
    return [*cells, *tokens, batch.num_requests, *map(_ms, times)]


def _bars(batch_sizes: dict[int, int]) -> RenderableType:
    """Render a bar per power of two of the batch size."""
    steps: Counter[int] = Counter()
    for size, count in batch_sizes.items():
        steps[1 << (size - 1).bit_length()] += count
    rows = []
    for step, count in sorted(steps.items()):
        label = str(step) if step <= 2 else f"{step // 2 + 1}-{step}"
        line = bar(count, max(steps.values()), BAR_WIDTH)
        rows.append((label, line, count, f"{count / steps.total():.0%}"))
    return _table(("rows", "", "batches", "share"), rows, num_words=2)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
