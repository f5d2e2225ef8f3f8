"""Are the language models right: SmolLM2 in our engine beside transformers, token by token.

    python benchmarks/llm/agreement.py                           about forty minutes on two cores
    python benchmarks/llm/agreement.py --prompts 6 --tokens 16   does it run?

Model: SmolLM2-135M-Instruct, Q4_1, made FP32 by each side's own reader of the GGUF file; both on
the CPU in FP32. Prompts: 200, drawn from film reviews, as texts to be continued and as chats.
Each is continued by 128 tokens, always the most likely one, twice: alone, and in a mix with 19
others (`mixes.py`: random arrivals, prompts in parts, prefixes found in the cache, too few blocks
and so preemption, requests given up). transformers then computes its logits for the same tokens
(teacher forcing): up to the first place where it would go on otherwise, these tokens are what it
would have generated.

What must hold, set before measuring; the script fails otherwise:
- every logit of every token is within 5e-4 of transformers', alone and in mixes;
- at least 95 % of the prompts are continued identically, in either;
- wherever transformers would have chosen another token it is a tie: ours is less than 1e-3
  behind;
- mixes did what they are for: preempted, found prefixes, cut prompts, gave up requests.

Results are kept as they come (`.bench/llm/agreement`), and the same command goes on where it was as
long as the engine's code is the same. transformers is installed under `.bench/` on first use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import fetch
import numpy as np
import smollm2
import torch
from mixes import Mix, alone
from ours import Ours
from rich.console import Console
from rich.table import Table
from rivals.environment import Environment, InstallError, ensure
from smollm2 import FOLDER, RESULTS, ROOT, Prompt

TOLERANCE, TIE, SHARE = 5e-4, 1e-3, 0.95
MIX_SIZE = 20
SEED = 7
MODES = ("alone", "mixed")
STRESSES = ("num_given_up", "num_preemptions", "num_found_tokens", "num_prompts_in_parts")
TRANSFORMERS = ["5.22.2"]
ANSWERING = ("mixes", "ours", "reference", "smollm2")
Line = dict[str, Any]


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    try:
        comparison = Comparison(args)
    except (fetch.FetchFailed, InstallError) as error:
        raise SystemExit(str(error)) from None
    with comparison.reference:
        comparison.run()
    found = comparison.found()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 140).print(table_of(found))
    for problem in found["problems"]:
        print(problem)
    print(f"written: {args.out}")
    return 1 if found["problems"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=200, help="fewer for a quick look")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer; likewise")
    parser.add_argument(
        "--seed", type=int, default=SEED, help="another for other prompts and mixes"
    )
    parser.add_argument("--mix", type=int, default=MIX_SIZE, help="prompts that share an engine")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="fewer on a shared machine"
    )
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument(
        "--work", type=Path, default=FOLDER / "agreement", help="what was found yet"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "llm_agreement.json")
    return parser.parse_args()


def environment() -> Environment:
    """Of transformers, with the torch that we have. InstallError says why not."""
    needed = ["gguf", "accelerate"]
    return ensure("transformers", "transformers", TRANSFORMERS, needed, runtime="torch")


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self._num_tokens: int = args.tokens
        self._seed: int = args.seed
        path = fetch.smollm2()
        theirs = environment()
        self._versions = {
            "transformers": theirs.version,
            "torch": str(torch.__version__),
            "model": path.name,
        }
        self._ours = Ours.load(path)
        self._prompts = dict(enumerate(smollm2.prompts(self._ours.text, args.prompts, args.seed)))
        numbers = list(self._prompts)
        self._mixes = [numbers[at : at + args.mix] for at in range(0, len(numbers), args.mix)]
        self._settings = {
            "num_prompts": args.prompts,
            "num_tokens": args.tokens,
            "seed": args.seed,
            "mix_size": args.mix,
            "tolerance": TOLERANCE,
            "tie": TIE,
            "share": SHARE,
        }
        key = [args.tokens, args.seed, args.mix, args.prompts, self._versions, code_digest()]
        self._journal = Journal(args.work, key, args.again)
        self.reference = Reference(theirs.python, path, args.threads)

    def run(self) -> None:
        for number, prompt in self._prompts.items():
            if not self._journal.has("alone", number):
                began = time.monotonic()
                generated, logits = alone(self._ours, prompt, self._num_tokens)
                line = self._compared("alone", number, generated, logits)
                self._journal.add([line])
                _tell(f"alone {number + 1}/{len(self._prompts)}", line, began)
        for number, members in enumerate(self._mixes):
            if not self._journal.has("mix", number):
                began = time.monotonic()
                lines = self._mixed(number, members)
                self._journal.add(lines)
                _tell(f"mix {number + 1}/{len(self._mixes)}", lines[-1], began)

    def _mixed(self, number: int, members: Sequence[int]) -> list[Line]:
        chosen = {each: self._prompts[each] for each in members}
        mix = Mix(self._ours, chosen, self._num_tokens, self._seed * 1000 + number)
        lines = []
        for each in mix.run():
            if each.generated:
                mode = "given up" if each.is_given_up else "mixed"
                lines.append(self._compared(mode, each.prompt, each.generated, each.logits))
        stress = {"mode": "mix", "number": number, "room": asdict(mix.room), **asdict(mix.stress)}
        return [*lines, stress]

    def _compared(
        self, mode: str, number: int, generated: list[int], logits: Sequence[torch.Tensor]
    ) -> Line:
        prompt: Prompt = self._prompts[number]
        assert len(generated) == len(logits)
        found = self.reference.compared(prompt.tokens, generated, torch.stack(list(logits)).numpy())
        about = {"mode": mode, "number": number, "kind": prompt.kind}
        return {**about, "num_prompt": len(prompt.tokens), "generated": generated, **found}

    def found(self) -> dict[str, Any]:
        lines = self._journal.lines
        modes = {mode: totals([each for each in lines if each["mode"] == mode]) for mode in MODES}
        given_up = totals([each for each in lines if each["mode"] == "given up"])
        mixes = [each for each in lines if each["mode"] == "mix"]
        stress = {key: sum(each[key] for each in mixes) for key in (*STRESSES, "num_mixed_steps")}
        by_mode = [
            {each["number"]: each["generated"] for each in lines if each["mode"] == mode}
            for mode in MODES
        ]
        same = sum(tokens == by_mode[1].get(number) for number, tokens in by_mode[0].items())
        found = {
            "settings": self._settings,
            "versions": self._versions,
            **{mode: asdict(each) for mode, each in modes.items()},
            "given_up": asdict(given_up),
            "mixes": {"num": len(mixes), **stress},
            "same_alone_and_mixed": same / len(self._prompts),
        }
        problems = [p for mode, each in modes.items() for p in problems_of(mode, each)]
        problems += problems_of("given up", given_up)
        problems += [f"mixes: {key} is 0; expected more" for key in STRESSES if not stress[key]]
        return {**found, "problems": problems}


@dataclass(frozen=True, slots=True)
class Totals:
    num: int
    num_tokens: int
    num_identical: int
    largest_difference: float
    mean_difference: float
    largest_logit: float
    # Of tokens that transformers would not have chosen: how far they are behind its own.
    largest_margin: float
    # Each with its prompt, and where it was.
    others: list[Line]


def totals(lines: Sequence[Line]) -> Totals:
    others = [{"number": each["number"], **other} for each in lines for other in each["others"]]
    sizes = [len(each["generated"]) for each in lines]
    means = [each["mean_difference"] for each in lines]
    return Totals(
        len(lines),
        sum(sizes),
        sum(not each["others"] for each in lines),
        _largest([each["largest_difference"] for each in lines]),
        sum(map(float.__mul__, means, map(float, sizes))) / max(1, sum(sizes)),
        _largest([each["largest_logit"] for each in lines]),
        _largest([other["margin"] for other in others]),
        others,
    )


def _largest(values: Sequence[float]) -> float:
    """What is not a number is larger than all."""
    return float(np.max(values)) if values else 0.0


def problems_of(mode: str, found: Totals) -> Iterator[str]:
    if not found.largest_difference <= TOLERANCE:
        value = found.largest_difference
        yield f"{mode}: a logit differs by {value:.2g}; expected at most {TOLERANCE:g}"
    if found.num_identical < SHARE * found.num and mode in MODES:
        value = found.num_identical / found.num
        yield f"{mode}: {value:.1%} continued identically; expected at least {SHARE:.0%}"
    for other in found.others:
        if not other["margin"] < TIE:
            where = f"prompt {other['number']}, token {other['place']}"
            yield f"{mode}, {where}: {other['margin']:.2g} behind; expected a tie (< {TIE:g})"


class Journal:
    """Lines of JSON, kept as they come; begun anew where what they depend on has changed."""

    def __init__(self, folder: Path, key: Sequence[object], is_anew: bool) -> None:
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        self._path = folder / f"{name}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        if is_anew:
            self._path.unlink(missing_ok=True)
        text = self._path.read_text() if self._path.exists() else ""
        # A line that was not written to its end is computed again.
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._path.write_text(whole)
        self.lines: list[Line] = [each for line in whole.splitlines() for each in json.loads(line)]

    def has(self, mode: str, number: int) -> bool:
        return any(each["mode"] == mode and each["number"] == number for each in self.lines)

    def add(self, lines: list[Line]) -> None:
        """All of them or none."""
        with self._path.open("a") as file:
            file.write(json.dumps(lines) + "\n")
        self.lines += lines


def code_digest() -> str:
    """Of all that the answers depend on here."""
    here = [Path(__file__).with_name(f"{name}.py") for name in ANSWERING]
    files = [*sorted((ROOT / "penstock" / "llm").rglob("*.py")), *here]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


class Reference:
    """transformers in a process of its own, while it is entered."""

    def __init__(self, python: Path, model: Path, num_threads: int) -> None:
        script = Path(__file__).with_name("reference.py")
        self._command = [str(python), str(script), str(model), str(num_threads)]

    def __enter__(self) -> Reference:
        self._folder = tempfile.TemporaryDirectory(dir=FOLDER)
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=log, text=True
            )
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def compared(self, prompt: Sequence[int], generated: Sequence[int], logits: Any) -> Line:
        path = Path(self._folder.name) / "logits.npy"
        np.save(path, logits)
        asked = {"prompt": list(prompt), "generated": list(generated), "logits": str(path)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Line:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"transformers ended: {self._log.read_text()[-2000:]}")
        found: Line = json.loads(line)
        return found


def _tell(what: str, line: Line, began: float) -> None:
    told = f"{line['largest_difference']:.1e}" if "others" in line else json.dumps(line)
    others = f", {len(line['others'])} others" if line.get("others") else ""
    print(f"{what}: {time.monotonic() - began:.1f} s, {told}{others}", flush=True)


def table_of(found: dict[str, Any]) -> Table:
    table = Table("", "alone", "mixed")
    both = [found[mode] for mode in MODES]
    table.add_row("prompts", *(str(each["num"]) for each in both))
    table.add_row("tokens", *(f"{each['num_tokens']:,}" for each in both))
    shares = [each["num_identical"] / max(1, each["num"]) for each in both]
    table.add_row("continued identically", *(f"{share:.1%}" for share in shares))
    table.add_row("largest difference", *(f"{each['largest_difference']:.1e}" for each in both))
    table.add_row("mean difference", *(f"{each['mean_difference']:.1e}" for each in both))
    table.add_row("other tokens", *(str(len(each["others"])) for each in both))
    table.add_row("farthest behind", *(f"{each['largest_margin']:.1e}" for each in both))
    for key in STRESSES:
        table.add_row(key.removeprefix("num_").replace("_", " "), "", f"{found['mixes'][key]:,}")
    return table


if __name__ == "__main__":
    sys.exit(main())
