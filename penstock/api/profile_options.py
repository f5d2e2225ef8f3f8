"""Options of `penstock.profile` and `penstock profile`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import DATA_NAME, flags_of, number, text

input_flag, run_flag, output_flag = map(flags_of, ("Inputs", "Measurement", "Output"))


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Which batch is profiled, and how often it runs."""

    model: str = run_flag(
        "Model to profile, if MODEL is a repository",
        "Needed when the repository holds several models.",
        **text("NAME", "the only one"),
    )
    batch_size: int = input_flag(
        "Rows in the batch that is profiled",
        "Raise it to what the server really batches, which penstock explain shows: small and large "
        "batches have different bottlenecks.",
        **number(1, "N", 1),
        short="-b",
    )
    data: str = input_flag(
        "File or folder of representative inputs",
        ".npz, .npy, .jsonl, .json, .csv, .parquet or a folder of images. Give it when time "
        "depends on values or on lengths.",
        **text("PATH", "random values of the model's signature"),
    )
    data_name: str = input_flag(**DATA_NAME)
    lengths: str = input_flag(
        "Sizes of variable dimensions, such as 128",
        "Give it for text models without --data: one token says nothing about fifty.",
        **text("LENGTHS", "1, or as in --data"),
    )
    seed: int = input_flag(
        "Random seed for inputs and the choice of examples",
        "Change it to see whether the answer depends on them.",
        **number(0, "NUMBER", 0, 2**31 - 1),
    )
    threads: int | None = run_flag(
        "Threads of the instance",
        "Change it to see what one of several smaller instances would do.",
        **number(None, "N", 1, 1024, default="as configured"),
    )
    runs: int = run_flag(
        "Runs whose medians are shown",
        "Raise it where the machine is not quiet.",
        **number(20, "N", 3, 10_000),
    )
    chrome_trace: str = output_flag(
        "Write a trace for ui.perfetto.dev to FILE",
        "Use it to see the order of operators and the gaps between them.",
        metavar="FILE",
        aliases=("--trace",),
    )
