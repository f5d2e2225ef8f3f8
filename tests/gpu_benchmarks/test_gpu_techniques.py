"""Gains are ratios of two rows of one run, beside what guides say."""

import math
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def techniques(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import techniques

    return techniques


def row(waited: float, device: float, host: float) -> dict[str, float]:
    return {"waited_ms": waited, "device_per_s": device, "host_per_s": host}


def made(**rows: dict[str, dict[str, float]]) -> dict:
    named = {name.replace("__", ", ").replace("_", " "): each for name, each in rows.items()}
    return {"model": "m", "techniques": {name: {"batches": b} for name, b in named.items()}}


def test_every_claim_with_a_figure_names_its_source(techniques) -> None:
    for claim in techniques.CLAIMS.values():
        assert claim.text and (claim.low is None) == (claim.high is None)
        if claim.low is not None:
            assert 1 < claim.low <= claim.high
            assert urlparse(claim.source).scheme == "https"


def test_every_step_is_of_a_technique_with_a_claim(techniques) -> None:
    assert {step.technique for step in techniques.STEPS} <= techniques.CLAIMS.keys()


def test_a_gain_is_one_row_over_the_one_before(techniques) -> None:
    found = made(
        fp32_eager={"1": row(8.0, 100, 90), "256": row(30.0, 5000, 4000)},
        fp16_eager={"1": row(4.0, 250, 200), "256": row(10.0, 15000, 9000)},
    )
    (gain,) = techniques.gains(found)
    assert (gain.technique, gain.label) == ("half", "fp32 eager → fp16 eager")
    assert (gain.alone, gain.largest) == (2.0, 3.0)


def test_what_the_host_feeds_is_compared_host_fed(techniques) -> None:
    fed = {"fp16 fused, graphs": 300, "fp16 fused, graphs, one slot": 200}
    found = {
        "techniques": {
            name: {"batches": {"1": row(1.0, 1000, rate / 10), "256": row(1.0, 1000, rate)}}
            for name, rate in fed.items()
        }
    }
    found["techniques"]["fp16 fused, graphs, pageable"] = {
        "batches": {"1": {"host_per_s": 16}, "256": {"host_per_s": 100}}
    }
    gains = {each.technique: each for each in techniques.gains(found)}
    assert (gains["pinned"].alone, gains["pinned"].largest) == (1.25, 2.0)
    # Large batches are copied while others compute; small ones are several at a time.
    assert math.isnan(gains["overlap"].alone) and gains["overlap"].largest == 1.5
    assert gains["instances"].alone == 1.5 and math.isnan(gains["instances"].largest)


def test_batching_is_one_row_at_several_sizes(techniques) -> None:
    loads = {"checked": {"error": 0.0}, "1 short": row(1, 9, 9), "1": row(1, 10, 9)}
    found = made(packed_BF16__CUDA_graphs=loads | {"32": row(2, 200, 9), "full": row(9, 800, 9)})
    gains = techniques.gains(found)
    assert [(each.technique, each.largest) for each in gains] == [
        ("batching", 20.0),
        ("batching", 4.0),
    ]
    assert gains[0].label.endswith("batch 1 → 32")


def test_dynamic_batching_is_two_servers_and_how_busy_the_gpu_was(techniques) -> None:
    base = "fp16 channels-last, graphs"
    rates = {"served one by one": (900.0, 0.31), "served in batches": (3600.0, 0.97)}
    found = {
        "techniques": {
            f"{base}, {name}": {"batches": {"128 clients": {"served_per_s": rate, **extra}}}
            for name, (rate, share) in rates.items()
            for extra in [{"utilization": share}]
        }
    }
    (gain,) = techniques.gains(found)
    assert gain.technique == "batching" and gain.largest == 4 and math.isnan(gain.alone)
    assert gain.label.endswith("(GPU busy 31% → 97%)")
    for each in found["techniques"].values():
        del each["batches"]["128 clients"]["utilization"]
    assert techniques.gains(found)[0].label.endswith("→ served in batches")


def test_of_several_steps_the_one_that_gave_most_is_shown(techniques) -> None:
    found = made(
        fp32_eager={"1": row(8.0, 100, 90)},
        fp16_eager={"1": row(4.0, 250, 200)},
        bf16_eager={"1": row(5.0, 250, 200)},
    )
    best = techniques.best_gain(found, "half")
    assert best.label == "fp32 eager → fp16 eager" and best.best == best.largest == 2.5
    assert techniques.best_gain(found, "int8") is None


def test_every_row_of_a_step_is_a_row_of_a_network(techniques) -> None:
    pytest.importorskip("torch")
    import bert
    import models

    rows = {name for model in models.MODELS.values() for name in model.techniques}
    rows |= bert.TECHNIQUES.keys()
    named = {name for step in techniques.STEPS for name in (step.before, step.after)}
    named |= {name for chain in techniques.CHAINS for name in chain} | {*techniques.BATCHED}
    assert named <= rows


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("resnet50", {"fused", "int8", "channels-last"}),
        ("efficientnet_b0", {"fused", "int8", "channels-last"}),
        ("detector", {"fused", "int8", "channels-last"}),
        ("vit_b", {"transformer", "fp8"}),
        ("bert-large", {"packing", "fp8"}),
    ],
)
def test_every_network_has_a_step_of_each_technique_it_can_use(techniques, model, wanted) -> None:
    pytest.importorskip("torch")
    import bert
    import models

    asked = models.MODELS[model].techniques if model in models.MODELS else bert.TECHNIQUES
    all_of = {"tf32", "half", "compile", "graphs", "batching", "pinned", "overlap", "instances"}
    loads = {"1": row(1.0, 1, 1) | {"served_per_s": 1.0}, "32": row(1.0, 2, 2)}
    served = {"128 clients": {"served_per_s": 1.0}}
    found = {
        "techniques": {
            name: {"batches": served if each.num_clients else loads} for name, each in asked.items()
        }
    }
    assert {gain.technique for gain in techniques.gains(found)} == all_of | wanted


def test_what_failed_or_is_missing_gives_no_gain(techniques) -> None:
    found = made(fp32_eager={"1": row(8.0, 100, 90)})
    found["techniques"]["fp16 eager"] = {"error": "out of memory"}
    assert techniques.gains(found) == []
    found["techniques"]["fp16 eager"] = {"batches": {"1": {"host_per_s": 0.0}}}
    assert techniques.gains(found) == []


def test_of_two_rows_before_the_first_that_is_there_counts(techniques) -> None:
    slow, fast = {"1": row(4.0, 1, 1)}, {"1": row(2.0, 2, 2)}
    found = made(fp16_eager=slow, fp16_compile=fast)
    assert [each.label for each in techniques.gains(found)] == ["fp16 eager → fp16 compile"]
    found["techniques"]["fp16 channels-last"] = {"batches": {"1": row(3.0, 1, 1)}}
    labels = [each.label for each in techniques.gains(found) if each.technique == "compile"]
    assert labels == ["fp16 channels-last → fp16 compile"]


def test_the_waterfall_has_the_rows_that_are_there(techniques) -> None:
    some = {"1": row(1.0, 1, 1)}
    found = made(padded_FP32=some, padded_BF16=some, packed_BF16__CUDA_graphs=some, other=some)
    assert list(techniques.chain(found)) == [
        "padded FP32",
        "padded BF16",
        "packed BF16, CUDA graphs",
    ]
