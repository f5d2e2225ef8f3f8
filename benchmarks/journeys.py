"""How much one reads to follow a request, a streamed token or an optimise candidate:

    python benchmarks/journeys.py                 all three; candidate takes minutes
    python benchmarks/journeys.py infer --list    every function on the path of an HTTP request

Each journey is run for real, in all its processes, with a hook that counts calls. A function is on
the path if it was called at least once per request (or candidate); *path lines* are the lines of
these functions, *module lines* those of the files they are in. Functions that run once per
connection, per load or every now and then are not on the path. A candidate's path is that of the
optimiser and its trial processes; the server that measures it is the journey of a request.
"""

from __future__ import annotations

import argparse
import ast
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "penstock"
NUM_REQUESTS = 300
FLUSH_S = 1.0
MAX_PATH_LINES, MAX_MODULE_LINES = 2500, 6000
VARIABLE = "PENSTOCK_TRACE_FOLDER"
# Runs first in every Python process whose path names its folder.
HOOK = """
import atexit, collections, json, os, sys, threading, time

def trace(folder):
    counts = collections.Counter()

    def count(frame, event, _):
        # Templates are compiled under the names of their files.
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and name.endswith(".py"):
            counts[frame.f_code] += 1

    def write():
        rows = [
            [c.co_filename, c.co_qualname, c.co_firstlineno, n] for c, n in counts.copy().items()
        ]
        path = os.path.join(folder, str(os.getpid()))
        part = f"{path}.{threading.get_ident()}"
        with open(part, "w") as file:
            json.dump(rows, file)
        os.replace(part, path + ".json")

    def write_often():
        while True:
            time.sleep(FLUSH_S)
            write()

    threading.Thread(target=write_often, daemon=True).start()
    atexit.register(write)
    threading.setprofile(count)
    sys.setprofile(count)

if VARIABLE in os.environ:
    # The arguments are not in sys.argv yet.
    with open("/proc/self/cmdline") as file:
        words = file.read().split("\\0")
    if not {"serve", "penstock.benchmark.generator"} & set(words) or not SKIPS_SERVERS:
        trace(os.environ[VARIABLE])
"""


@dataclass(frozen=True)
class Called:
    file: Path
    name: str
    line: int


@dataclass(frozen=True)
class Journey:
    title: str
    run: Callable[[Path, dict[str, str]], None]
    # A function on the path of all; what was called less often is not on it.
    anchor: str
    # Whether servers and load generators are left out.
    skips_servers: bool = False


def infer(scratch: Path, environment: dict[str, str]) -> None:
    body = (ROOT / "examples" / "digit.json").read_bytes()
    with served(ROOT / "examples" / "repository" / "digits", environment) as port:
        post(port, "/v2/models/digits/infer", body)


def chat(scratch: Path, environment: dict[str, str]) -> None:
    make = "import sys, pathlib, text_server; text_server.write_model(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    subprocess.run(
        [sys.executable, "-c", make, str(scratch)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    message = {"role": "user", "content": "hello"}
    call = {"model": "smol", "messages": [message], "max_tokens": 8, "stream": True}
    with served(scratch / "smol", environment) as port:
        post(port, "/v1/chat/completions", json.dumps(call).encode())


def candidate(scratch: Path, environment: dict[str, str]) -> None:
    model = ROOT / "examples" / "repository" / "digits" / "1" / "model.onnx"
    command = ["optimize", str(model), "--slo", "p99 < 50 ms at 50/s", "--exhaustive"]
    command += ["--budget", "3m", "--duration", "2s"]
    subprocess.run(
        [sys.executable, "-m", "penstock", *command, "--out", str(scratch / "out")],
        env=environment,
        cwd=scratch,
        check=False,  # Whether the SLO is met does not matter here.
        stdout=subprocess.DEVNULL,
    )


@contextmanager
def served(model: Path, environment: dict[str, str]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", str(model), "--http-port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not is_ready(port):
            if process.poll() is not None:
                sys.exit(f"the server of {model} ended with status {process.returncode}")
            time.sleep(0.2)
        yield port
        time.sleep(3 * FLUSH_S)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def post(port: int, path: str, body: bytes) -> None:
    """Send the requests one after the other over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(NUM_REQUESTS):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            sys.exit(f"{path}: {response.status} {answer.decode()[:500]}")
    connection.close()


JOURNEYS = {
    "infer": Journey("one HTTP infer request", infer, "Model.submit"),
    "chat": Journey("one streamed chat answer", chat, "OpenAiHttp._chats"),
    "candidate": Journey("one optimise candidate", candidate, "Attempts._checked", True),
}


def count_calls(journey: Journey) -> Counter[Called]:
    counts: Counter[Called] = Counter()
    with tempfile.TemporaryDirectory() as name:
        scratch, hook, found = (Path(name) / each for each in ("scratch", "hook", "found"))
        for folder in (scratch, hook, found):
            folder.mkdir()
        constants = f"PACKAGE, FLUSH_S, VARIABLE = {str(PACKAGE)!r}, {FLUSH_S}, {VARIABLE!r}\n"
        constants += f"SKIPS_SERVERS = {journey.skips_servers}\n"
        (hook / "sitecustomize.py").write_text(constants + HOOK)
        path = os.pathsep.join([str(hook), str(ROOT)])
        journey.run(scratch, {**os.environ, "PYTHONPATH": path, VARIABLE: str(found)})
        for file in found.glob("*.json"):
            for source, qualified, line, count in json.loads(file.read_text()):
                counts[Called(Path(source), qualified, line)] += count
    return counts


def path_of(journey: Journey) -> dict[Called, int]:
    """Return the functions on the path, with their lines."""
    counts = count_calls(journey)
    anchors = [count for called, count in counts.items() if called.name == journey.anchor]
    if not anchors:
        sys.exit(f"{journey.title}: {journey.anchor} was never called; was it renamed?")
    trees = {file: ast.parse(file.read_text()) for file in {called.file for called in counts}}
    lines = {
        (file, first_line(node)): (node.end_lineno or 0) - first_line(node) + 1
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {
        called: lines[called.file, called.line]
        for called, count in counts.items()
        # Templates may fail to match once, and tests of the hardware come on top.
        if count >= 0.9 * anchors[0] and (called.file, called.line) in lines
    }


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("journey", nargs="*", choices=tuple(JOURNEYS), help="default: all")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    args = parser.parse_args()
    for name in args.journey or JOURNEYS:
        path = path_of(JOURNEYS[name])
        files = {called.file for called in path}
        if args.list:
            for called, lines in sorted(path.items(), key=lambda row: (row[0].file, row[0].line)):
                print(f"  {called.file.relative_to(ROOT)}:{called.line} {called.name} ({lines})")
        num_module_lines = sum(file.read_text().count("\n") for file in files)
        print(
            f"{JOURNEYS[name].title}: {len(path)} functions, {sum(path.values()):,} path lines"
            f" (goal {MAX_PATH_LINES:,}), in {len(files)} modules of {num_module_lines:,} lines"
            f" (goal {MAX_MODULE_LINES:,})",
            flush=True,
        )


if __name__ == "__main__":
    main()
