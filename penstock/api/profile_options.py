"""Options of `penstock.profile` and `penstock profile`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import Flag, option

INPUTS, RUNS = "Inputs", "Measurement"


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Which batch is profiled, and how often it runs."""

    model: str = option(
        "",
        Flag(
            RUNS,
            "Model to profile, if MODEL is a repository",
            "Needed when the repository holds several models.",
            metavar="NAME",
            default="the only one",
        ),
    )
    batch_size: int = option(
        1,
        Flag(
            INPUTS,
            "Rows in the batch that is profiled",
            "Raise it to what the server really batches, which penstock explain shows: small and "
            "large batches have different bottlenecks.",
            metavar="N",
            low=1,
            short="-b",
        ),
    )
    data: str = option(
        "",
        Flag(
            INPUTS,
            "File or folder of representative inputs",
            ".npz, .npy, .jsonl, .json, .csv, .parquet or a folder of images. Give it when time "
            "depends on values or on lengths.",
            metavar="PATH",
            default="random values of the model's signature",
        ),
    )
    data_name: str = option(
        "",
        Flag(
            INPUTS,
            "Input that .npy files and images are for",
            "Needed when the model has several inputs.",
            metavar="INPUT",
            default="the only input",
        ),
    )
    lengths: str = option(
        "",
        Flag(
            INPUTS,
            "Sizes of variable dimensions, such as 128",
            "Give it for text models without --data: one token says nothing about fifty.",
            metavar="LENGTHS",
            default="1, or as in --data",
        ),
    )
    seed: int = option(
        0,
        Flag(
            INPUTS,
            "Random seed for inputs and the choice of examples",
            "Change it to see whether the answer depends on them.",
            metavar="NUMBER",
            low=0,
            high=2**31 - 1,
        ),
    )
    threads: int | None = option(
        None,
        Flag(
            RUNS,
            "Threads of the instance",
            "Change it to see what one of several smaller instances would do.",
            metavar="N",
            default="as configured",
            low=1,
            high=1024,
        ),
    )
    runs: int = option(
        20,
        Flag(
            RUNS,
            "Runs whose medians are shown",
            "Raise it where the machine is not quiet.",
            metavar="N",
            low=3,
            high=10_000,
        ),
    )
    chrome_trace: str = option(
        "",
        Flag(
            "Output",
            "Write a trace for ui.perfetto.dev to FILE",
            "Use it to see the order of operators and the gaps between them.",
            metavar="FILE",
            default="none",
            aliases=("--trace",),
        ),
    )
