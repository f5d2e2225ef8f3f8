"""Does lm-eval find the same through Penstock as with transformers in its own process?

    python benchmarks/llm/lm_eval_scores.py           about ten minutes on two quiet cores
    python benchmarks/llm/lm_eval_scores.py --tiny    three questions of each kind: does it run?

Model: SmolLM2-135M-Instruct, written out as a Hugging Face folder in FP32 once and read from there
by both. lm-eval asks it about tasks of its own kinds (`eval_tasks.py`), made of film reviews:
- hf: `--model hf`, transformers in FP32, one question after the other;
- tokens: `--model local-completions` at `penstock serve`, prompts as lists of tokens, eight in a
  request;
- texts: the same with prompts as texts, four requests at once;
- remote: as tokens, with the tokenizer that lm-eval finds at the server, and none beside it;
- hf chat, chat: questions as chats, to `hf` and `local-chat-completions`.

What must hold, set before measuring; the script fails otherwise:
- every log-likelihood is within 1e-3 of that of `hf`, and is or is not the most likely text alike;
- every generated text is the same;
- scores are the same: accuracies exactly, perplexities to 1e-4 of their size.

lm-eval is installed under `.bench/` on first use, and asks nobody outside this machine. What was
found in one way is kept as long as questions and code are the same; `--again` begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import eval_tasks
import fetch
from eval_tasks import ENDINGS, OPINIONS, PERPLEXITY
from rich.console import Console
from rich.table import Table
from rivals.environment import Environment, InstallError, ensure, publishable
from serving import Server
from smollm2 import FOLDER, RESULTS, ROOT

LM_EVAL = ["0.4.13"]
NEEDED = ["transformers==5.22.2", "accelerate", "aiohttp", "tenacity", "gguf"]
TOLERANCE, SAME_SCORE = 1e-3, 1e-4
NUM_TINY = 3
KEPT = "kept.json"
ALL = (ENDINGS, PERPLEXITY, OPINIONS)
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """To ask a model: lm-eval's name of it, and how."""

    name: str
    kind: str
    # Of lm-eval's `--model_args`, beside what all ways of this kind have.
    args: Mapping[str, object]
    tasks: Sequence[str] = ALL
    batch_size: int = 1
    is_chat: bool = False
    # Whose answers it is held to; empty: nobody's.
    like: str = ""


WAYS = (
    Way("hf", "hf", {}),
    Way("tokens", "local-completions", {"tokenized_requests": True}, batch_size=8, like="hf"),
    Way(
        "texts", "local-completions", {"tokenized_requests": False, "num_concurrent": 4}, like="hf"
    ),
    Way(
        "remote",
        "local-completions",
        {"tokenizer_backend": "auto"},
        (PERPLEXITY, OPINIONS),
        8,
        like="hf",
    ),  # fmt: skip
    Way("hf chat", "hf", {}, (OPINIONS,), is_chat=True),
    Way("chat", "local-chat-completions", {}, (OPINIONS,), is_chat=True, like="hf chat"),
)


def main() -> int:
    args = parse_arguments()
    try:
        path = fetch.smollm2()
        theirs = environment()
        eval_tasks.write(args.work / "tasks", NUM_TINY if args.tiny else None)
    except (fetch.FetchFailed, InstallError) as error:
        raise SystemExit(str(error)) from None
    folder = as_folder(path, theirs)
    console = Console(width=None if sys.stdout.isatty() else 140)
    runs: dict[str, Run] = {}
    for way in WAYS:
        if not way.like:
            runs[way.name] = run(way, args, theirs, folder, "")
    with Server(console, folder) as server:
        for way in WAYS:
            if way.like:
                runs[way.name] = run(way, args, theirs, folder, server.address)
    found = found_of(runs, theirs, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table_of(found))
    for problem in found["problems"]:
        print(problem)
    print(f"written: {args.out}")
    return 1 if found["problems"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a few questions of each kind")
    parser.add_argument("--again", action="store_true", help="nothing is kept of what was found")
    parser.add_argument(
        "--work", type=Path, default=FOLDER / "lm-eval", help="tasks and what lm-eval writes"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "llm_lm_eval.json")
    return parser.parse_args()


def environment() -> Environment:
    """Of lm-eval, with the torch that we have. InstallError says why not."""
    return ensure("lm-eval", "lm_eval", LM_EVAL, NEEDED, runtime="torch")


def as_folder(path: Path, theirs: Environment) -> Path:
    """Written once, wholly or not at all."""
    folder = path.with_name("SmolLM2-135M-Instruct")
    if not folder.exists():
        draft = path.with_name("SmolLM2-135M-Instruct.part")
        shutil.rmtree(draft, ignore_errors=True)
        script = Path(__file__).with_name("hf_folder.py")
        subprocess.run([str(theirs.python), str(script), str(path), str(draft)], check=True)
        draft.rename(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Run:
    way: Way
    took_s: float
    scores: Mapping[str, Mapping[str, float]]
    # By task, in the order of its questions: one answer, or one for each choice.
    answers: Mapping[str, list[list[Any]]]


def run(way: Way, args: argparse.Namespace, theirs: Environment, folder: Path, address: str) -> Run:
    out = args.work / "runs" / way.name.replace(" ", "-")
    kept = out / KEPT
    key = key_of(way, args, theirs)
    if not args.again and kept.exists():
        known = json.loads(kept.read_text())
        if known["key"] == key:
            return run_of(way, out, known["seconds"])
    shutil.rmtree(out, ignore_errors=True)
    command = [
        str(theirs.python), "-m", "lm_eval", "--model", way.kind,
        "--model_args", ",".join(f"{k}={v}" for k, v in model_args(way, folder, address).items()),
        "--tasks", ",".join(way.tasks), "--include_path", str(args.work / "tasks"),
        "--batch_size", str(way.batch_size), "--device", "cpu", "--log_samples",
        "--output_path", str(out),
    ]  # fmt: skip
    command += ["--apply_chat_template"] if way.is_chat else []
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(args.work / "cache")}
    print(f"{way.name}: {way.kind}, {', '.join(way.tasks)} ...", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False
    )
    took_s = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"lm-eval failed: {publishable(done.stderr[-3000:])}")
    print(f"{way.name}: {took_s:.0f} s", flush=True)
    found = run_of(way, out, took_s)
    kept.write_text(json.dumps({"key": key, "seconds": took_s}))
    return found


def run_of(way: Way, out: Path, took_s: float) -> Run:
    return Run(way, took_s, scores_of(out), {task: answers_of(out, task) for task in way.tasks})


def key_of(way: Way, args: argparse.Namespace, theirs: Environment) -> str:
    """Of all that the answers depend on."""
    rows = [(args.work / "tasks" / f"{task}.jsonl").read_text() for task in way.tasks]
    about = [eval_tasks.ABOUT[task] for task in way.tasks]
    key = json.dumps([rows, about, theirs.version, NEEDED, way.is_chat, dict(way.args)])
    digest = hashlib.sha256(key.encode())
    if way.like:
        for path in sorted((ROOT / "penstock").rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def model_args(way: Way, folder: Path, address: str) -> dict[str, object]:
    if way.kind == "hf":
        return {"pretrained": folder, "dtype": "float32", **way.args}
    path = "chat/completions" if way.is_chat else "completions"
    asked = {"model": folder.name, "base_url": f"http://{address}/v1/{path}"}
    if not way.is_chat and "tokenizer_backend" not in way.args:
        asked |= {"tokenizer": str(folder), "tokenizer_backend": "huggingface"}
    return {**asked, **way.args}


def scores_of(out: Path) -> dict[str, dict[str, float]]:
    (path,) = out.rglob("results_*.json")
    found = json.loads(path.read_text())["results"]
    return {
        task: {
            key.partition(",")[0]: value
            for key, value in about.items()
            if isinstance(value, float) and "stderr" not in key
        }
        for task, about in found.items()
    }


def answers_of(out: Path, task: str) -> list[list[Any]]:
    (path,) = out.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]


@dataclass(frozen=True, slots=True)
class Compared:
    """One task, asked in one way."""

    way: str
    task: str
    num: int
    scores: Mapping[str, float]
    expected: Mapping[str, float]
    # Of log-likelihoods; None where there are none.
    largest_difference: float | None
    # Generated texts, and whether a text was the most likely one, that are not the same.
    num_others: int


def compared(ours: Run, theirs: Run, task: str) -> Compared:
    differences: list[float] = []
    num_others = num = 0
    for mine, other in zip(ours.answers[task], theirs.answers[task], strict=True):
        for answer, right in zip(mine, other, strict=True):
            num += 1
            if task == OPINIONS:
                num_others += answer != right
            else:
                (likely, is_best), (other_likely, is_other_best) = told(answer), told(right)
                differences.append(abs(likely - other_likely))
                num_others += is_best != is_other_best
    # What is not a number is larger than all.
    largest = max(differences, key=lambda each: (each != each, each), default=None)
    return Compared(
        ours.way.name, task, num, ours.scores[task], theirs.scores[task], largest, num_others
    )


def told(answer: Sequence[Any]) -> tuple[float, str]:
    """A log-likelihood, and whether no text is more likely where that was told."""
    (found,) = answer
    likely, is_best = found if isinstance(found, list) else (found, "")
    return float(likely), str(is_best)


def found_of(runs: Mapping[str, Run], theirs: Environment, args: argparse.Namespace) -> Line:
    rows = [
        compared(each, runs[each.way.like], task)
        for each in runs.values()
        if each.way.like
        for task in each.way.tasks
    ]
    return {
        "versions": {"lm_eval": theirs.version, "others": NEEDED},
        "is_tiny": args.tiny,
        "tolerance": TOLERANCE,
        "seconds": {name: each.took_s for name, each in runs.items()},
        "rows": [asdict(each) for each in rows],
        "problems": [problem for each in rows for problem in problems_of(each)],
    }


def problems_of(row: Compared) -> list[str]:
    problems = []
    where = f"{row.way}, {row.task}"
    if not row.num:
        problems.append(f"{where}: nothing was compared")
    if row.largest_difference is not None and not row.largest_difference <= TOLERANCE:
        text = f"a log-likelihood differs by {row.largest_difference:.2g}"
        problems.append(f"{where}: {text}; expected at most {TOLERANCE:g}")
    if row.num_others:
        problems.append(f"{where}: {row.num_others} of {row.num} answers differ; expected none")
    for name, value in row.expected.items():
        allowed = SAME_SCORE * value if "perplexity" in name else 0.0
        if not abs(row.scores.get(name, float("nan")) - value) <= allowed:
            problems.append(f"{where}: {name} is {row.scores.get(name)}; expected {value}")
    return problems


def table_of(found: Line) -> Table:
    table = Table("way", "task", "answers", "score", "Penstock", "hf", "farthest", "others")
    for row in found["rows"]:
        far = row["largest_difference"]
        for name, value in row["expected"].items():
            table.add_row(
                row["way"], row["task"], str(row["num"]), name, f"{row['scores'][name]:.6g}",
                f"{value:.6g}", "" if far is None else f"{far:.1e}", str(row["num_others"]),
            )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
