"""Options of `penstock.optimize` and `penstock optimize`. A plan file has the same keys."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import DATA_NAME, PRICE, TIME, flags_of, number, text

goal_flag, data_flag, run_flag = map(flags_of, ("Goal", "Data", "Run"))
step_flag = flags_of("Functions around the model")


@dataclass(frozen=True, slots=True)
class OptimizeOptions:
    """What must hold, on which data, how much may be tried. Empty texts and None: not given."""

    slo: str = goal_flag(
        "Latency target, e.g. 'p99 < 20 ms at 200/s'",
        "Language models: 'ttft p99 < 500 ms, tpot p99 < 100 ms at 2/s'. Needed here or in --plan.",
        **text("SLO", "-"),
    )
    accuracy: str = goal_flag(
        "Accuracy budget, e.g. 'top1 drop <= 0.5 %'",
        "Also 'score rise <= 2 % relative' and 'agreement drop <= 3 %'. Lower it when errors are "
        "expensive; a tighter budget needs more examples.",
        **text("BUDGET", "1 %, for language models 'kl rise <= 0.02'"),
    )
    out: str = goal_flag(
        "Model repository for the new version",
        "Created if it does not exist. Needed here or in --plan.",
        **text("REPOSITORY", "-"),
    )
    name: str = goal_flag(
        "Name of the model in the repository",
        "Give it when that name is taken or unclear.",
        **text("NAME", "the file's or folder's name"),
    )
    member: str = goal_flag(
        "Member to optimise, if MODEL is an ensemble",
        "Give it when the bottleneck cannot be optimised, or should stay as it is.",
        **text("NAME", "the bottleneck"),
    )
    device: str = goal_flag(
        "Device: auto, cpu, cuda (each GPU) or cuda:N",
        "auto runs PyTorch models on the GPUs, if there are any, and all others on the CPU. Choose "
        "cpu to optimise for servers without a GPU, cuda:N to keep other GPUs free.",
        **text("DEVICE", "auto"),
    )
    price: float | None = goal_flag(**PRICE)
    data: str = data_flag(
        "File or folder of representative inputs",
        ".npz, .npy, .jsonl, .json, .csv, .parquet, .txt (a text per line) or a folder of images. "
        "Give it whenever you can: without it, steps that may change answers are not tried. "
        "Language models need it.",
        **text("PATH", "random inputs"),
    )
    from_live: str = data_flag(
        "Recording of live traffic, instead of --data",
        "A folder of penstock serve --record: the latest 5,000 different rows are the data. Use it "
        "when inputs have drifted from what the version was optimised on.",
        **text("RECORDING", "-"),
    )
    data_name: str = data_flag(**DATA_NAME)
    labels: str = data_flag(
        "Array or field of --data with the labels",
        "Needed when it has another name.",
        **text("NAME", "label, labels or y"),
    )
    eval: str = data_flag(
        "Evaluator: outputs and labels to scores",
        "A function that returns one score per example. Give it when labels are not class numbers.",
        **text("PACKAGE.MODULE:FUNCTION", "top1 for class labels"),
    )
    calibration: str = data_flag(
        "Separate inputs for calibration",
        "Give it when INT8 ranges should come from other data.",
        **text("PATH", "a part of --data"),
    )
    outputs: str = data_flag(
        "Outputs whose answers matter",
        "Name them when others may change, such as intermediate tensors that no client reads.",
        **text("NAME,NAME", "all"),
    )
    preprocess: str = step_flag(
        "Function from requests to model inputs",
        "Tokenise or resize, for example. Give it to serve it with the model, covered by the SLO. "
        "Needs --data.",
        metavar="PACKAGE.MODULE:FUNCTION",
    )
    postprocess: str = step_flag(
        "Function from model outputs to responses",
        "Softmax or NMS, for example. Give it to serve it with the model, covered by the SLO and "
        "the accuracy gate. Needs --data.",
        metavar="PACKAGE.MODULE:FUNCTION",
    )
    budget: str = run_flag(
        "Time limit for the whole run, e.g. 10m",
        "Give it when you cannot wait for all steps; the best version found in time is saved. On a "
        "GPU a run takes at most 9 minutes unless you give more.",
        metavar=TIME,
    )
    duration: str = run_flag(
        "Time limit per measurement of a candidate",
        "Raise it when the report calls candidates equal and the difference matters to you.",
        **text(TIME, "10s"),
    )
    exhaustive: bool | None = run_flag(
        "Try every step, even after the SLO is met",
        "Otherwise the run ends with the first stage that meets the SLO, and skips steps that this "
        "hardware should not profit from. Choose it to see how fast the model can be.",
        value=None,
        default="off",
    )
    fresh: bool | None = run_flag(
        "Measure everything again",
        "Otherwise an earlier run of the same command resumes. Use it when the machine or its load "
        "has changed.",
        value=None,
        default="off",
    )
    seed: int | None = run_flag(
        "Random seed for data split and arrival times",
        "Change it to check that the choice does not depend on it.",
        **number(None, "NUMBER", 0, 2**31 - 1, default="0"),
    )
    plan: str = run_flag(
        "TOML file with these options",
        "Keys are named as the flags; flags override the file. Use it to keep the options in "
        "version control.",
        metavar="FILE",
    )
