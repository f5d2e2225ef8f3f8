"""Break every worker of a server under load, and lose nothing.

Starts `penstock serve` on the example repository, sends the held-out digits with `tritonclient`
from several threads, kills the workers in the middle, and prints what the clients saw. Exits with
1 if a request was lost.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient
from rich.console import Console
from rich.table import Table
from serving import Server
from train_digits import Digits, held_out

REPOSITORY = Path(__file__).parent / "repository"
NUM_CLIENTS = 4
BEFORE_S = 2.0
AFTER_S = 2.0
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Answer:
    finished: float
    latency_s: float
    is_right: bool
    error: str


class Clients:
    """Threads that send one image after the other until told to stop."""

    def __init__(self, address: str, digits: Digits) -> None:
        self._address = address
        self._digits = digits
        self._turns = itertools.count()
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with httpclient.InferenceServerClient(self._address, network_timeout=30) as client:
            while not self._stop.is_set():
                self.answers.append(self._ask(client, next(self._turns)))

    def _ask(self, client: httpclient.InferenceServerClient, turn: int) -> Answer:
        index = turn % len(self._digits.labels)
        image = self._digits.images[index : index + 1]
        tensor = httpclient.InferInput("image", image.shape, "FP32")
        tensor.set_data_from_numpy(image)
        began = time.monotonic()
        try:
            logits = client.infer("digits", [tensor]).as_numpy("logits")
        except Exception as error:  # Whatever it is, it is a lost request.
            return Answer(time.monotonic(), time.monotonic() - began, False, str(error))
        is_right = bool(np.argmax(logits) == self._digits.labels[index])
        return Answer(time.monotonic(), time.monotonic() - began, is_right, "")


def main() -> None:
    console = Console()
    server = Server(console, REPOSITORY)
    digits = held_out()
    console.print(
        f"\n{NUM_CLIENTS} clients send the {len(digits.labels)} held-out digits, one at a time; "
        "then every worker gets SIGKILL."
    )
    with Clients(server.address, digits) as clients:
        began = time.monotonic()
        time.sleep(BEFORE_S)
        killed_at = time.monotonic()
        num_killed = server.kill_workers()
        while not any(answer.finished - answer.latency_s > killed_at for answer in clients.answers):
            time.sleep(0.01)
        time.sleep(AFTER_S)
    code, num_left = server.stop()
    report(console, clients.answers, began, killed_at)
    lost = [answer.error for answer in clients.answers if answer.error]
    console.print(
        f"{num_killed} workers killed, {len(lost)} of {len(clients.answers)} requests lost; "
        f"SIGTERM: exit code {code}, {num_left} processes left behind."
    )
    if lost or code or num_left:
        raise SystemExit(f"requests or processes were lost: {lost[:3]}")


def report(console: Console, answers: Sequence[Answer], began: float, killed_at: float) -> None:
    first_after = min(a.finished for a in answers if a.finished > killed_at + 0.05)
    table = Table(title="What the clients saw")
    for column in ("phase", "requests", "lost", "right", "p50", "p99", "longest"):
        table.add_column(column, justify="right" if column != "phase" else "left")
    phases = {
        "steady": [a for a in answers if a.finished <= killed_at],
        "worker killed": [a for a in answers if killed_at < a.finished <= first_after + 0.05],
        "recovered": [a for a in answers if a.finished > first_after + 0.05],
    }
    for name, part in phases.items():
        table.add_row(name, *summary(part))
    console.print(table)
    console.print(f"answers per 100 ms  {timeline(answers, began, killed_at)}", highlight=False)


def summary(answers: Sequence[Answer]) -> list[str]:
    latencies = np.array([answer.latency_s for answer in answers]) * 1e3
    if not len(latencies):
        return ["0", "0", "", "", "", ""]
    lost = sum(bool(answer.error) for answer in answers)
    right = sum(answer.is_right for answer in answers) / len(answers)
    p50, p99 = np.percentile(latencies, [50, 99])
    return [
        f"{len(answers):,}",
        str(lost),
        f"{right:.2%}",
        f"{p50:.2f} ms",
        f"{p99:.2f} ms",
        f"{latencies.max():.1f} ms",
    ]


def timeline(answers: Sequence[Answer], began: float, killed_at: float) -> str:
    """One bar per 100 ms; the cross marks the kill."""
    end = max(answer.finished for answer in answers)
    counts, _ = np.histogram([a.finished for a in answers], np.arange(began, end, 0.1))
    top = max(1, counts.max())
    bars = [BARS[int(np.ceil(count / top * (len(BARS) - 1)))] for count in counts]
    bars.insert(int((killed_at - began) / 0.1), "✗")
    return "".join(bars)


if __name__ == "__main__":
    main()
