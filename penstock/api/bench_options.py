"""Options of `penstock.bench` and `penstock bench`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import DATA_NAME, PRICE, TIME, flags_of, number, text

load_flag, slo_flag, time_flag = map(flags_of, ("Load", "SLO and comparison", "Duration"))
input_flag, server_flag, generator_flag = map(flags_of, ("Inputs", "Server", "Load generator"))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to send, for how long, and what must hold. Empty texts and None are not given."""

    concurrency: str = load_flag(
        "Closed loop: keep N requests in flight",
        "1:64 doubles from 1 to 64; 1,8,32 are three levels. Choose it to compare with "
        "perf_analyzer. Use --rate for latency targets: real users do not wait for each other.",
        **text("N", "1, if no other load is given"),
    )
    rate: str = load_flag(
        "Open loop: send N requests per second",
        "100:1600 doubles; 100,200,500 are three levels. Choose it for latency targets: slow "
        "answers do not slow the arrivals.",
        metavar="N",
    )
    max_rate: bool = load_flag(
        "Find the highest rate that meets --slo",
        "The answer comes with its confidence interval. Use it to decide how many servers you "
        "need.",
        value=False,
    )
    find_knee: bool = load_flag(
        "Find where more concurrency stops helping",
        "Doubles the concurrency until throughput no longer grows. Use it to learn what a server "
        "can do before you set an SLO.",
        value=False,
    )
    arrivals: str = load_flag(
        "Arrival process of requests at a rate",
        "Choose gamma with --cv for bursts, constant for clients that send by a clock.",
        default="as in --slo, or poisson",
        choices=("poisson", "constant", "gamma"),
    )
    cv: float | None = load_flag(
        "Coefficient of variation of gamma arrivals",
        "The standard deviation of the gaps over their mean; 1 is poisson. Raise it when your "
        "traffic comes in bursts.",
        **number(None, "NUMBER", 0.01, 100, default="1"),
    )
    ramp: str = load_flag(
        "Raise the rate from A to B over --duration",
        "One level. Use it to see at which rate latency starts to grow.",
        metavar="A:B",
    )
    steps: str = load_flag(
        "Several rates in one level, each for a time",
        "As in 100:10s,500:5s,100:10s. Use it to see how a server takes a burst and recovers.",
        metavar="RATE:TIME,…",
    )
    trace: str = load_flag(
        "Replay recorded arrivals, CSV or JSONL",
        "For language models also the lengths. Use it when you have a trace: no arrival process is "
        "as real.",
        metavar="FILE",
    )
    rate_scale: float | None = load_flag(
        "Factor for the rate of --trace",
        "Lower it when the trace comes from a larger service than yours; its shape stays.",
        **number(None, "NUMBER", 1e-9, default="1"),
    )
    replay: str = load_flag(
        "Replay recorded requests at their times",
        "A recording of penstock serve --record. Answers are compared with the recorded ones. Use "
        "it to try a change on real traffic.",
        metavar="RECORDING",
    )
    speed: float | None = load_flag(
        "Factor for the speed of --replay",
        "2 sends everything in half the time. Raise it to see how much more of the same traffic a "
        "server takes, or to make up for the share that was recorded.",
        **number(None, "NUMBER", 1e-9, default="1"),
    )
    slo: str = slo_flag(
        "Latency target, e.g. 'p99 < 20 ms at 200/s'",
        "Give it to get a verdict; its rate is the load if no other is given.",
        metavar="SLO",
    )
    gate: bool = slo_flag(
        "Exit with 2 when the SLO or the baseline is missed",
        "Use it in CI: it fails when the SLO is missed or, with --baseline, when a figure became "
        "worse.",
        value=False,
    )
    baseline: str = slo_flag(
        "Saved run to compare with, by a two-sample test",
        "Give it when a change must not make the model slower.",
        metavar="RUN.JSON",
    )
    tolerance: float | None = slo_flag(
        "Slowdown in percent that --baseline allows",
        "Lower it where machines are quiet, raise it where they are not.",
        **number(None, "PERCENT", 0, 1000, default="5"),
    )
    price: float | None = slo_flag(**PRICE)
    duration: str = time_flag(
        "Time limit per level, e.g. 30s",
        "Raise it when the report says that an interval is too wide.",
        **text(TIME, "10s; a trace or steps run to their end"),
    )
    precision: float = time_flag(
        "Confidence interval that ends a level, in ± percent",
        "A level ends early, after a third of its time, once the 95 % interval of the deciding "
        "percentile is this narrow. Choose 0 to measure the whole time, when rare stalls matter.",
        **number(5.0, "PERCENT", 0, 100),
    )
    warm_up: str = time_flag(
        "Longest wait until latency is steady",
        "0s measures from the first request. Raise it for models that compile while they run.",
        **text(TIME, value="10s"),
    )
    timeout: str = time_flag(
        "Time after which a request has failed",
        "Raise it for slow models; lower it to what your clients wait for.",
        **text(TIME, value="60s"),
    )
    data: str = input_flag(
        "File or folder of representative inputs",
        ".npz, .npy, .jsonl, .json (as perf_analyzer has it), .csv, .parquet, .txt (one text per "
        "line) or a folder of images. Give it whenever time depends on the values.",
        **text("PATH", "random values of the model's signature"),
    )
    data_name: str = input_flag(**DATA_NAME)
    batch_size: str = input_flag(
        "Rows in each request",
        "1:32 measures 1, 2, 4 … 32; 1:32:4 steps by 4; 1,8,32 are three sizes. Raise it when your "
        "clients send several rows at once.",
        **text("N", value="1"),
        short="-b",
    )
    lengths: str = input_flag(
        "Sizes of variable dimensions, or prompt tokens",
        "128, uniform:16:512, normal:128:30, lognormal:100:900 (median and p99) or list:FILE. Give "
        "it when requests differ in size.",
        **text("LENGTHS", "1, or as in --data"),
    )
    output_lengths: str = input_flag(
        "Tokens to ask a language model for",
        "Written as for --lengths. Give it when answers differ in length.",
        **text("LENGTHS", "as in --data"),
    )
    seed: int | None = input_flag(
        "Random seed for arrival times and random inputs",
        "A new seed for each run keeps caches cold; the saved run contains it. Give it to send the "
        "same requests again.",
        **number(None, "NUMBER", 0, 2**31 - 1, default="a new one for each run"),
    )
    model: str = server_flag(
        "Model to ask for, if MODEL does not name it",
        "Needed for repositories and for OpenAI servers with several models.",
        **text("NAME", "the only one"),
    )
    version: str = server_flag(
        "Version of the model",
        "Give it when the highest version is not the one to measure.",
        **text("V", "the highest"),
    )
    api_key: str = server_flag(
        "API key for the server",
        "Needed when the server asks for one. Prefer PENSTOCK_API_KEY: other users of the machine "
        "can see flags.",
        metavar="KEY",
        variable="PENSTOCK_API_KEY",
    )
    tensors: str = server_flag(
        "Encoding of tensors in v2 over HTTP",
        "Choose json when your clients send JSON.",
        default="binary",
        choices=("binary", "json"),
    )
    shared_memory: bool = server_flag(
        "Put inputs into memory shared with the server",
        "v2 over HTTP, with a server on this machine that was started with --shared-memory: "
        "requests only name their inputs, and the network carries no tensors to the server. Use it "
        "when your clients do the same, as with perf_analyzer's --shared-memory=system.",
        value=False,
    )
    api: str = server_flag(
        "OpenAI endpoint to ask",
        "Choose completions for base models without a chat template.",
        default="chat",
        choices=("chat", "completions"),
    )
    extra: str = server_flag(
        "Further fields of OpenAI requests, as JSON",
        "As in '{\"ignore_eos\": true}', which gives answers of the length asked for. Use it when "
        "the server has parameters of its own.",
        metavar="JSON",
    )
    body: str = server_flag(
        "Request body for a plain URL",
        "{name} is replaced by a field of --data; @FILE reads the body from a file. Needed when "
        "the server speaks neither v2 nor OpenAI.",
        metavar="TEMPLATE",
    )
    method: str = server_flag(
        "HTTP method for a plain URL",
        "Change it when the server expects another method.",
        default="POST with --body, else GET",
        choices=("GET", "POST", "PUT"),
    )
    header: tuple[str, ...] = server_flag(
        "Header of each HTTP request",
        "Give it when a proxy or the server needs one. Repeatable.",
        value=(),
        metavar="'NAME: VALUE'",
        short="-H",
    )
    max_connections: int | None = generator_flag(
        "Limit on connections per process",
        "Raise it when the report says that requests waited for a connection.",
        **number(None, "N", 1, 60000, default="1024, or the highest concurrency"),
    )
    processes: int = generator_flag(
        "Processes that send requests",
        "Raise it when the report says that the generator was the bottleneck and CPU cores are "
        "idle.",
        **number(1, "N", 1, 256),
    )
