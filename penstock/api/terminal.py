"""Terminal output: progress and table at start, and the explanation of a model."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

import penstock
from penstock.config import CPU, TlsConfig
from penstock.dashboard.example_calls import KEY, curl_line, key_options
from penstock.dashboard.state import call_of, num_ready
from penstock.serving.explain import (
    Explanation,
    InstanceState,
    PaceState,
    ProcessState,
)
from penstock.serving.memory_plan import gib, told
from penstock.serving.placement import briefly
from penstock.system import logs

if TYPE_CHECKING:
    from penstock.server import LoadProgress, Server
    from penstock.serving.memory_plan import GpuPlan
    from penstock.serving.served import Served

log = logging.getLogger("penstock.cli")
server_log = logging.getLogger("penstock.server")

STATE_STYLES = {"READY": "green", "UNAVAILABLE": "red", "LOADING": "yellow"}
NUM_BATCHES_SHOWN = 12
BAR_WIDTH = 40
WATCH_S = 1.0
# Interval between lines when the output is not a terminal.
QUIET_S = 10.0


def console(is_error: bool = False) -> Console:
    made = Console(stderr=is_error)
    if not made.is_terminal:
        made.width = 1000  # Wide enough that no line of a file is broken.
    return made


class LoadingStatus:
    """Reports that models are loading: a moving line in a terminal, otherwise a line in the log."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._told_at: float | None = None

    def __call__(self, progress: LoadProgress) -> None:
        names = ", ".join(progress.waiting_for[:5])
        if len(progress.waiting_for) > 5:
            names += f" and {len(progress.waiting_for) - 5} more"
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
    lines += [f"Page     {_root(server, reachable(host))}/", *_try_it(server, reachable(host))]
    for line in lines:
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


def _root(server: Server, host: str) -> str:
    address = f"[{host}]" if ":" in host else host
    return f"{server.scheme}://{address}:{server.http_port}"


def _try_it(server: Server, host: str) -> list[str]:
    """Return a command that calls the first model that is ready, and what it needs."""
    ready = [model for model in server.catalog if model.is_ready]
    if not ready:
        return []
    model = min(ready, key=lambda each: (each.config.name, -int(each.config.version)))
    options = [*_tls_options(server.tls), *(key_options() if server.needs_key else [])]
    line = curl_line(call_of(server.catalog, model), _root(server, host), options)
    lines = ["", "Try it:"]
    if server.needs_key:
        lines.append(f"  export {KEY}=...  # a key with the scope infer")
    if server.tls is not None:
        lines.append("  # If the certificate is not for this address: -k instead of --cacert.")
    return [*lines, f"  {line}"]


def _tls_options(tls: TlsConfig | None) -> list[str]:
    if tls is None:
        return []
    client = ["--cert", "client.pem", "--key", "client-key.pem"] if tls.client_ca else []
    return ["--cacert", shlex.quote(tls.cert), *client]


def _addresses(server: Server, host: str) -> dict[str, str]:
    address = f"[{host}]" if ":" in host else host
    found = {"HTTP": f"{_root(server, host)}/v2"}
    if server.grpc is not None:
        found["gRPC"] = f"{address}:{server.grpc.port}"
    if server.metrics_port is not None:
        found["Metrics"] = f"{server.scheme}://{address}:{server.metrics_port}/metrics"
    return found


def tell_memory_plan(plan: Sequence[GpuPlan]) -> None:
    """Report GPU memory by model: a table in a terminal, otherwise lines in the log."""
    out = console()
    if out.is_terminal and logs.from_environment().format != "json":
        out.print(memory_table(plan))
        return
    for each in plan:
        gpu = each.gpu
        models = "; ".join(map(told, each.shares))
        fields = {"gpu_uuid": gpu.uuid, "needed_bytes": each.needed_bytes}
        server_log.info(
            "GPU %d (%s): models need %s of the %s that can be had: %s",
            *(gpu.index, gpu.name, gib(each.needed_bytes), gib(each.room_bytes), models),
            extra=fields | {"room_bytes": each.room_bytes, "total_bytes": gpu.total_bytes},
        )


def memory_table(plan: Sequence[GpuPlan]) -> Table:
    table = Table(title="GPU memory", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GPU", overflow="fold")
    table.add_column("model", overflow="fold")
    for column in ("workers", "each", "together"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("", no_wrap=True)
    for each in plan:
        gpu = each.gpu
        name = f"{gpu.index} {gpu.name}"
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
    index = server.catalog.index(names)
    table.add_column("model", overflow="fold")
    for column in ("version", "state", "backend", "batching", "instances", "loaded in"):
        is_figure = column in ("version", "instances", "loaded in")
        table.add_column(column, no_wrap=True, justify="right" if is_figure else "left")
    models = {(model.config.name, model.config.version): model for model in server.catalog}
    for entry in index:
        state = entry.state or "not loaded"
        style = STATE_STYLES.get(state, "dim")
        cells = [escape(entry.name), entry.version, f"[{style}]{state}[/{style}]"]
        table.add_row(*cells, *_model_cells(models.get((entry.name, entry.version))))
    return table


def _model_cells(model: Served | None) -> list[str]:
    if model is None:
        return ["", "", "", ""]
    config = model.config
    ready = num_ready(model)
    count = str(config.num_instances)
    if ready != config.num_instances:
        count = f"{ready} of {count}"
    if config.uses_gpu:
        count += f" on {briefly(config)}"
    return [config.backend, _batching(model), count, f"{model.metrics.load_s:.2f} s"]


def _batching(model: Served) -> str:
    config, mode = model.config, model.mode
    if mode == "continuous":
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
    parts += [_section("Why batches are as they are"), *map(_sentence, answer.verdicts)]
    if any(each.device != CPU for each in answer.instances):
        parts += [_section("Instances"), _instances(answer.instances)]
    parts += [_section("Waiting now"), _waiting(answer)]
    parts += [_section("Refused"), _refused(answer)]
    if answer.paces:
        unit = "tokens" if "max_tokens" in answer.policy else "rows"
        parts += [_section(f"T(b) in ms, b in {unit}; b* is aimed at"), _paces(answer.paces)]
    parts += [_section("Rows per batch, since it was loaded"), _bars(answer.batch_sizes)]
    parts += [_section("Last batches (ms: waits, then work)"), _recent(answer)]
    parts += [_section(f"Shapes of a row ({answer.num_shapes} seen)"), _shapes(answer)]
    if answer.processes:
        parts += [_section("Event loops just now"), _processes(answer.processes)]
    return Group(*parts)


def watch(ask: Callable[[], Explanation]) -> NoReturn:
    """Show a new answer every second until Ctrl-C, which raises KeyboardInterrupt. In a terminal
    each answer replaces the last one, cut to its height; other outputs get one after the other.
    """
    out = console()
    if not out.is_terminal:
        while True:
            out.print(explained(ask()), "")
            time.sleep(WATCH_S)
    with Live(console=out, auto_refresh=False) as live:
        while True:
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
    )


def _processes(processes: Sequence[ProcessState]) -> Table:
    table = _table("process", "pid", "of a core", "connections")
    for each in processes:
        count = "" if each.num_connections is None else str(each.num_connections)
        table.add_row(each.name, str(each.pid), f"{each.busy:.0%}", count)
    return table


def _section(title: str) -> Text:
    return Text.assemble("\n", (title, "bold cyan"))


def _sentence(text: str) -> Text:
    return Text(f"- {text}")


def _table(*columns: str, num_words: int = 1) -> Table:
    """Make a table with text on the left, figures on the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        is_word = index < num_words
        table.add_column(column, justify="left" if is_word else "right", no_wrap=not is_word)
    return table


def _instances(instances: Sequence[InstanceState]) -> Table:
    table = _table("instance", "device", "state", "slots", "pid", "GPU memory", num_words=3)
    for each in instances:
        memory = gib(each.gpu_memory_bytes) if each.gpu_memory_bytes else ""
        figures = (str(each.num_slots), str(each.pid), memory)
        table.add_row(str(each.index), each.device, each.state, *figures)
    return table


def _waiting(answer: Explanation) -> RenderableType:
    if not answer.waiting:
        return Text("nothing", style="dim")
    table = _table("shape", "waits for", "requests", "rows", "oldest ms", num_words=2)
    for lane in answer.waiting:
        counts = (str(lane.num_requests), str(lane.num_rows), _ms(lane.oldest_s))
        table.add_row(Text(lane.shape), Text(lane.waits_for), *counts)
    return table


def _recent(answer: Explanation) -> RenderableType:
    if not answer.recent:
        return Text("none", style="dim")
    has_tokens = any(batch.num_tokens for batch in answer.recent)
    tokens = ("tokens",) if has_tokens else ()
    figures = ("rows", *tokens, "requests", "for batch", "for instance", "compute", "total")
    table = _table("closed by", "shape", "instance", "ago", *figures, num_words=2)
    for batch in answer.recent[:NUM_BATCHES_SHOWN]:
        why = batch.closed_by
        if batch.outcome != "answered":
            why += f" ({batch.outcome})"
        table.add_row(
            Text(why),
            Text(batch.shape),
            str(batch.instance),
            f"{batch.age_s:.1f} s",
            str(batch.num_rows),
            *([str(batch.num_tokens)] if has_tokens else []),
            str(batch.num_requests),
            *map(
                _ms,
                (batch.batch_wait_s, batch.instance_wait_s, batch.compute_s, batch.duration_s),
            ),
        )
    return table


def _bars(batch_sizes: dict[int, int]) -> RenderableType:
    """Render a bar per power of two of the batch size."""
    if not batch_sizes:
        return Text("none", style="dim")
    steps: dict[int, int] = {}
    for size, count in batch_sizes.items():
        step = 1 << (size - 1).bit_length()
        steps[step] = steps.get(step, 0) + count
    total, most = sum(steps.values()), max(steps.values())
    table = _table("rows", "", "batches", "share", num_words=2)
    for step, count in sorted(steps.items()):
        label = str(step) if step <= 2 else f"{step // 2 + 1}-{step}"
        bar = "█" * max(1, round(BAR_WIDTH * count / most))
        table.add_row(label, Text(bar, style="cyan"), str(count), f"{count / total:.0%}")
    return table


def _shapes(answer: Explanation) -> RenderableType:
    if not answer.shapes:
        return Text("none", style="dim")
    table = _table("shape", "requests", "rows", "batches")
    for seen in answer.shapes:
        counts = (str(seen.num_requests), str(seen.num_rows), str(seen.num_batches))
        table.add_row(Text(seen.shape), *counts)
    return table


def _paces(paces: Sequence[PaceState]) -> Table:
    table = _table("shape", "b*", "arrivals/s", *(f"T({size})" for size in paces[0].times_s))
    for pace in paces:
        times = [_ms(time_s) for time_s in pace.times_s.values()]
        rate = f"{pace.arrivals_per_s:.0f}"
        table.add_row(Text(pace.shape), str(pace.target_size), rate, *times)
    return table


def _refused(answer: Explanation) -> RenderableType:
    if not answer.refused:
        return Text("nobody", style="dim")
    table = _table("reason", "requests")
    for reason, count in answer.refused.items():
        table.add_row(reason, str(count))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
