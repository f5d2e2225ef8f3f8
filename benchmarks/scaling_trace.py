"""Arrivals of a real service for experiments with scaling: the Azure LLM inference trace of
conversations (`../shared/data`) or, where it is not there, its arrivals per second, which are in
`data/`. Its rate is scaled by compressing time, so its shape stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.data.traces import read_trace

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "AzureLLMInferenceTrace_conv.csv"
PER_SECOND = ROOT / "benchmarks" / "data" / "azure_conv_per_second.txt"
SEED = 7


def read_arrivals(compression: float = 1.0) -> tuple[list[float], str]:
    """Return the arrival times in seconds, `compression` times as fast, and where they are from."""
    for folder in (ROOT, *ROOT.parents):
        file = folder / "shared" / "data" / WHOLE
        if file.is_file():
            return [time / compression for time in read_trace(file).times_s], WHOLE
    return [time / compression for time in resampled()], PER_SECOND.name


def resampled(first_s: int = 0, last_s: int | None = None) -> list[float]:
    """Return times with the trace's number of arrivals in each second, from 0 on."""
    lines = PER_SECOND.read_text().splitlines()
    counts = [int(each) for line in lines if not line.startswith("#") for each in line.split()]
    random = np.random.default_rng(SEED)
    times = [second + random.random(count) for second, count in enumerate(counts[first_s:last_s])]
    return np.sort(np.concatenate(times)).tolist()
