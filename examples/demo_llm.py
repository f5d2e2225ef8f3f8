"""A language model served and used as its users would: SmolLM2-135M-Instruct from PyPI.

Serves the GGUF file, chats with it by the `openai` client, shows that a second question about the
same text begins sooner because the text is known, and measures it with arrivals and lengths like
those of a conversation service, scaled to a small machine. Run by `make demo-llm`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fetch import FetchFailed, smollm2
from openai import OpenAI
from rich.console import Console
from rich.table import Table
from serving import ROOT, Server, penstock, show

FOLDER = ROOT / ".bench" / "llm"
PAGE = ROOT / "demo-llm.html"
# Questions of a service: a few seconds apart, most short and some long, on two cores.
RATE, DURATION = "0.5", "30s"
PROMPTS, ANSWERS = "lognormal:60:300", "lognormal:24:96"
MAX_TOKENS = 60
PERCENTILES = ("p50", "p90", "p99")
MEASURES = {
    "first token": "ttft_ms",
    "each that follows": "tpot_ms",
    "the whole answer": "latency_ms",
}
QUESTION = "In one sentence: what does a dam's spillway do?"
NOTES = (
    "Notes of the plant's morning meeting. Unit one ran all night at eighty percent. Unit two was "
    "stopped at four because the bearing of the turbine became warm; the oil was changed and it "
    "runs again since six. The level of the reservoir fell by nine centimetres and rain is "
    "expected on Thursday, so the spillway stays closed. Visitors come at ten, a school class of "
    "twenty-six; the gallery must be lit and the door to the cable tunnel locked. The divers who "
    "clean the intake were moved to next week. The new gauge at the penstock shows two bar less "
    "than the old one; until somebody knows which of them is right, both are read every hour. "
)
ABOUT = ("Which unit was stopped, and why?", "When do the visitors come?")


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, as whoever asked saw it."""

    first_s: float
    took_s: float
    num_tokens: int
    num_prompt: int
    num_known: int


def main() -> None:
    console = Console()
    try:
        model = smollm2()
    except FetchFailed as error:
        raise SystemExit(str(error)) from None
    with Server(console, model) as server:
        client = OpenAI(base_url=f"http://{server.address}/v1", api_key="none")
        name = client.models.list().data[0].id
        console.print(f"\n[bold]{QUESTION}[/bold]")
        ask(console, client, name, QUESTION)
        said = []
        for question in ABOUT:
            console.print(f"\n[bold]About the notes: {question}[/bold]")
            said.append(ask(console, client, name, f"{NOTES}\n\n{question}"))
        console.print(begin_table(said))
        console.print(served_table(measured(console, server.address)))
    page = os.path.relpath(PAGE, Path.cwd())
    console.print(f"What users of the service saw: {page}")


def ask(console: Console, client: OpenAI, model: str, question: str) -> Said:
    """The answer appears as it is made."""
    began = time.perf_counter()
    first_s = 0.0
    usage: Any = None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for piece in stream:
        usage = piece.usage or usage
        text = piece.choices[0].delta.content if piece.choices else None
        if text:
            first_s = first_s or time.perf_counter() - began
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    took_s = time.perf_counter() - began
    if usage is None or not usage.completion_tokens:
        raise SystemExit("the server answered nothing")
    known = usage.prompt_tokens_details.cached_tokens
    return Said(first_s, took_s, usage.completion_tokens, usage.prompt_tokens, known)


def measured(console: Console, address: str) -> dict[str, Any]:
    path = FOLDER / "bench.json"
    load = ["--rate", RATE, "--lengths", PROMPTS, "--output-lengths", ANSWERS]
    arguments = ["bench", f"openai+http://{address}/v1", *load, "--duration", DURATION]
    show(console, arguments)
    rest = ["--warm-up", "0s", "--precision", "0", "--seed", "7"]
    if status := penstock([*arguments, *rest, "--json", str(path), "--html", str(PAGE)]):
        raise SystemExit(f"penstock bench ended with {status}")
    run: dict[str, Any] = json.loads(path.read_text())
    return run


def begin_table(said: list[Said]) -> Table:
    table = Table(title="Two questions about one text")
    for column in ("", "prompt tokens", "known already", "first word after", "then"):
        table.add_column(column, justify="right" if column else "left")
    for number, each in enumerate(said):
        rest_s = max(each.took_s - each.first_s, 1e-9)
        rate = f"{(each.num_tokens - 1) / rest_s:.0f} tokens/s"
        cells = (str(each.num_prompt), str(each.num_known), f"{each.first_s:.2f} s", rate)
        table.add_row(("first", "second")[number], *cells)
    return table


def served_table(run: dict[str, Any]) -> Table:
    [level] = run["levels"]
    summary = level["summary"]
    table = Table(title=f"{RATE} questions a second, {summary['num_failed']} failed")
    for column in ("", *PERCENTILES):
        table.add_column(column, justify="right" if column else "left")
    for name, key in MEASURES.items():
        found = [summary[key].get(each, {}).get("value") for each in PERCENTILES]
        cells = ["-" if each is None else f"{each:,.0f} ms" for each in found]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    main()
