"""Options of `penstock.bench` and `penstock bench`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import TIME, Flag, option

LOAD, SLO, TIMES = "Load", "SLO and comparison", "Duration"
INPUTS, SERVER, GENERATOR = "Inputs", "Server", "Load generator"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to send, for how long, and what must hold. Empty texts and None are not given."""

    concurrency: str = option(
        "",
        Flag(
            LOAD,
            "Closed loop: keep N requests in flight",
            "1:64 doubles from 1 to 64; 1,8,32 are three levels. Choose it to compare with "
            "perf_analyzer. Use --rate for latency targets: real users do not wait for each other.",
            metavar="N",
            default="1, if no other load is given",
        ),
    )
    rate: str = option(
        "",
        Flag(
            LOAD,
            "Open loop: send N requests per second",
            "100:1600 doubles; 100,200,500 are three levels. Choose it for latency targets: slow "
            "answers do not slow the arrivals.",
            metavar="N",
            default="none",
        ),
    )
    max_rate: bool = option(
        False,
        Flag(
            LOAD,
            "Find the highest rate that meets --slo",
            "The answer comes with its confidence interval. Use it to decide how many servers you "
            "need.",
        ),
    )
    find_knee: bool = option(
        False,
        Flag(
            LOAD,
            "Find where more concurrency stops helping",
            "Doubles the concurrency until throughput no longer grows. Use it to learn what a "
            "server can do before you set an SLO.",
        ),
    )
    arrivals: str = option(
        "",
        Flag(
            LOAD,
            "Arrival process of requests at a rate",
            "Choose gamma with --cv for bursts, constant for clients that send by a clock.",
            choices=("poisson", "constant", "gamma"),
            default="as in --slo, or poisson",
        ),
    )
    cv: float | None = option(
        None,
        Flag(
            LOAD,
            "Coefficient of variation of gamma arrivals",
            "The standard deviation of the gaps over their mean; 1 is poisson. Raise it when your "
            "traffic comes in bursts.",
            metavar="NUMBER",
            default="1",
            low=0.01,
            high=100,
        ),
    )
    ramp: str = option(
        "",
        Flag(
            LOAD,
            "Raise the rate from A to B over --duration",
            "One level. Use it to see at which rate latency starts to grow.",
            metavar="A:B",
            default="none",
        ),
    )
    steps: str = option(
        "",
        Flag(
            LOAD,
            "Several rates in one level, each for a time",
            "As in 100:10s,500:5s,100:10s. Use it to see how a server takes a burst and recovers.",
            metavar="RATE:TIME,…",
            default="none",
        ),
    )
    trace: str = option(
        "",
        Flag(
            LOAD,
            "Replay recorded arrivals, CSV or JSONL",
            "For language models also the lengths. Use it when you have a trace: no arrival "
            "process is as real.",
            metavar="FILE",
            default="none",
        ),
    )
    rate_scale: float | None = option(
        None,
        Flag(
            LOAD,
            "Factor for the rate of --trace",
            "Lower it when the trace comes from a larger service than yours; its shape stays.",
            metavar="NUMBER",
            default="1",
            low=1e-9,
        ),
    )
    slo: str = option(
        "",
        Flag(
            SLO,
            "Latency target, e.g. 'p99 < 20 ms at 200/s'",
            "Give it to get a verdict; its rate is the load if no other is given.",
            metavar="SLO",
            default="none",
        ),
    )
    gate: bool = option(
        False,
        Flag(
            SLO,
            "Exit with 2 when the SLO or the baseline is missed",
            "Use it in CI: it fails when the SLO is missed or, with --baseline, when a figure "
            "became worse.",
        ),
    )
    baseline: str = option(
        "",
        Flag(
            SLO,
            "Saved run to compare with, by a two-sample test",
            "Give it when a change must not make the model slower.",
            metavar="RUN.JSON",
            default="none",
        ),
    )
    tolerance: float | None = option(
        None,
        Flag(
            SLO,
            "Slowdown in percent that --baseline allows",
            "Lower it where machines are quiet, raise it where they are not.",
            metavar="PERCENT",
            default="5",
            low=0,
            high=1000,
        ),
    )
    price: float | None = option(
        None,
        Flag(
            SLO,
            "Price of the server per hour, in any currency",
            "Give it to see the cost of a million answers, or when the SLO limits it.",
            metavar="NUMBER",
            default="none",
            low=1e-9,
        ),
    )
    duration: str = option(
        "",
        Flag(
            TIMES,
            "Time limit per level, e.g. 30s",
            "Raise it when the report says that an interval is too wide.",
            metavar=TIME,
            default="10s; a trace or steps run to their end",
        ),
    )
    precision: float = option(
        5.0,
        Flag(
            TIMES,
            "Confidence interval that ends a level, in ± percent",
            "A level ends early, after a third of its time, once the 95 % interval of the deciding "
            "percentile is this narrow. Choose 0 to measure the whole time, when rare stalls "
            "matter.",
            metavar="PERCENT",
            low=0,
            high=100,
        ),
    )
    warm_up: str = option(
        "10s",
        Flag(
            TIMES,
            "Longest wait until latency is steady",
            "0s measures from the first request. Raise it for models that compile while they run.",
            metavar=TIME,
        ),
    )
    timeout: str = option(
        "60s",
        Flag(
            TIMES,
            "Time after which a request has failed",
            "Raise it for slow models; lower it to what your clients wait for.",
            metavar=TIME,
        ),
    )
    data: str = option(
        "",
        Flag(
            INPUTS,
            "File or folder of representative inputs",
            ".npz, .npy, .jsonl, .json (as perf_analyzer has it), .csv, .parquet, .txt (one text "
            "per line) or a folder of images. Give it whenever time depends on the values.",
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
    batch_size: str = option(
        "1",
        Flag(
            INPUTS,
            "Rows in each request",
            "1:32 measures 1, 2, 4 … 32; 1:32:4 steps by 4; 1,8,32 are three sizes. Raise it when "
            "your clients send several rows at once.",
            metavar="N",
            short="-b",
        ),
    )
    lengths: str = option(
        "",
        Flag(
            INPUTS,
            "Sizes of variable dimensions, or prompt tokens",
            "128, uniform:16:512, normal:128:30, lognormal:100:900 (median and p99) or list:FILE. "
            "Give it when requests differ in size.",
            metavar="LENGTHS",
            default="1, or as in --data",
        ),
    )
    output_lengths: str = option(
        "",
        Flag(
            INPUTS,
            "Tokens to ask a language model for",
            "Written as for --lengths. Give it when answers differ in length.",
            metavar="LENGTHS",
            default="as in --data",
        ),
    )
    seed: int | None = option(
        None,
        Flag(
            INPUTS,
            "Random seed for arrival times and random inputs",
            "A new seed for each run keeps caches cold; the saved run contains it. Give it to send "
            "the same requests again.",
            metavar="NUMBER",
            default="a new one for each run",
            low=0,
            high=2**31 - 1,
        ),
    )
    model: str = option(
        "",
        Flag(
            SERVER,
            "Model to ask for, if MODEL does not name it",
            "Needed for repositories and for OpenAI servers with several models.",
            metavar="NAME",
            default="the only one",
        ),
    )
    version: str = option(
        "",
        Flag(
            SERVER,
            "Version of the model",
            "Give it when the highest version is not the one to measure.",
            metavar="V",
            default="the highest",
        ),
    )
    api_key: str = option(
        "",
        Flag(
            SERVER,
            "API key for the server",
            "Needed when the server asks for one. Prefer PENSTOCK_API_KEY: other users of the "
            "machine can see flags.",
            metavar="KEY",
            default="none",
            variable="PENSTOCK_API_KEY",
        ),
    )
    tensors: str = option(
        "",
        Flag(
            SERVER,
            "Encoding of tensors in v2 over HTTP",
            "Choose json when your clients send JSON.",
            choices=("binary", "json"),
            default="binary",
        ),
    )
    api: str = option(
        "",
        Flag(
            SERVER,
            "OpenAI endpoint to ask",
            "Choose completions for base models without a chat template.",
            choices=("chat", "completions"),
            default="chat",
        ),
    )
    extra: str = option(
        "",
        Flag(
            SERVER,
            "Further fields of OpenAI requests, as JSON",
            "As in '{\"ignore_eos\": true}', which gives answers of the length asked for. Use it "
            "when the server has parameters of its own.",
            metavar="JSON",
            default="none",
        ),
    )
    body: str = option(
        "",
        Flag(
            SERVER,
            "Request body for a plain URL",
            "{name} is replaced by a field of --data; @FILE reads the body from a file. Needed "
            "when the server speaks neither v2 nor OpenAI.",
            metavar="TEMPLATE",
            default="none",
        ),
    )
    method: str = option(
        "",
        Flag(
            SERVER,
            "HTTP method for a plain URL",
            "Change it when the server expects another method.",
            choices=("GET", "POST", "PUT"),
            default="POST with --body, else GET",
        ),
    )
    header: tuple[str, ...] = option(
        (),
        Flag(
            SERVER,
            "Header of each HTTP request",
            "Give it when a proxy or the server needs one. Repeatable.",
            metavar="'NAME: VALUE'",
            default="none",
            short="-H",
        ),
    )
    max_connections: int | None = option(
        None,
        Flag(
            GENERATOR,
            "Limit on connections per process",
            "Raise it when the report says that requests waited for a connection.",
            metavar="N",
            default="1024, or the highest concurrency",
            low=1,
            high=60000,
        ),
    )
    processes: int = option(
        1,
        Flag(
            GENERATOR,
            "Processes that send requests",
            "Raise it when the report says that the generator was the bottleneck and CPU cores are "
            "idle.",
            metavar="N",
            low=1,
            high=256,
        ),
    )
