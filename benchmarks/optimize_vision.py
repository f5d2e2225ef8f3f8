"""Two convolutional models optimised, with everything that was tried and why it was kept or not.

    python benchmarks/optimize_vision.py                       both models, about twenty minutes
    python benchmarks/optimize_vision.py --models mnist_8

Fixed before anything was tuned:

- MobileNetV2 (ImageNet weights, exported to ONNX, FP32), SLO p99 < 100 ms at 20/s. Only 20 labelled
  photographs can be had, too few to judge by: agreement with the original on 480 crops of 22
  photographs, budget 3 %. The 20 labels are shown beside it and decide nothing.
- MNIST-8 (ONNX, its batch fixed at 1), SLO p99 < 10 ms at 300/s; top-1 on the official 10,000 test
  images, budget 0.5 %.

Both with --exhaustive, so that no step is left out because an earlier one was enough.

Goal: each model gets its table, and at least one INT8 candidate of at least one model is rejected
or slower, with the reason. A model whose files cannot be fetched is skipped and said so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from optimizing.cases import CASES, fetch, photographs, prepared_image
from optimizing.measure import optimized, repository_of, steps_text, tries, write
from rich.console import Console

from penstock.repository import layout

MODELS = ("mobilenet_v2", "mnist_8")
LOST = ("rejected", "slower", "failed")


def lost_int8(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Tries whose last step is an INT8 one, and that were not kept."""
    return [
        each
        for each in found["tries"]
        if each["outcome"] in LOST
        and any(step["pass_name"].startswith("int8") for step in each["candidate"]["steps"][-1:])
    ]


def labelled(model: Path) -> str:
    """Top-1 of an ONNX file on the photographs whose class is known."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    [given] = session.get_inputs()
    known = [(photo, label) for photo, label in photographs() if label is not None]
    answers = [
        session.run(None, {given.name: prepared_image(photo)[None]})[0].argmax()
        for photo, _ in known
    ]
    num_right = int(np.sum([a == label for a, (_, label) in zip(answers, known, strict=True)]))
    return f"{num_right} of {len(known)} labelled photographs right"


def chosen_file(folder: Path) -> Path | None:
    """The committed file, where it is ONNX."""
    artifact = Path(layout.read(folder).configs[-1].artifact)
    return artifact if artifact.suffix == ".onnx" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--duration", default="8s")
    options = parser.parse_args()
    console = Console(width=150)
    record: dict[str, Any] = {}
    num_lost = 0
    for name in options.models:
        try:
            case = CASES[name]()
        except fetch.FetchFailed as error:
            console.print(f"{name}: skipped: {error}")
            continue
        found = optimized(console, case, is_exhaustive=True, duration=options.duration)
        console.print(tries(found))
        lost = lost_int8(found)
        num_lost += len(lost)
        notes = [found["headline"], f"chosen: {steps_text(found['chosen'])}"]
        notes += [f"INT8 lost: {steps_text(e['candidate'])}: {e['reason']}" for e in lost]
        if name == "mobilenet_v2":
            notes.append(f"original: {labelled(Path(case.model))}")
            if file := chosen_file(repository_of(case) / name):
                notes.append(f"chosen: {labelled(file)}")
        for note in notes:
            console.print(note, highlight=False, markup=False)
        shown = [
            {"candidate": steps_text(e["candidate"]), "outcome": e["outcome"], "why": e["reason"]}
            for e in found["tries"]
        ]
        record[name] = {"slo": case.slo, "notes": notes, "tries": shown}
    if not record:
        raise SystemExit("no model could be fetched")
    print(write("optimize_vision", record))
    if not num_lost:
        raise SystemExit("INT8 lost nowhere: the goal was missed")


if __name__ == "__main__":
    main()
