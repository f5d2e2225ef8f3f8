"""One page that needs nothing else, and whose first line is the verdict."""

import re

import msgspec
import pytest
from optimizer import made_optimizations as made

from penstock.optimizer import first_line
from penstock.optimizer.candidates import Candidate, Skip, Step
from penstock.optimizer.results import Optimization
from penstock.report import optimize as optimize_report

EVIL = "</script><img src=x onerror=alert(1)>"


def own_part(optimization: Optimization) -> str:
    """Without style and script."""
    text = optimize_report.page(optimization)
    return re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)


def seen(html: str) -> str:
    text = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    text = re.sub(r"</?i>", "", text)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'")


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("kept", "kept"),
        ("missed", "missed"),
        ("refused", "missed"),
        ("already-met", "kept"),
        ("without-data", "kept"),
        ("interrupted", "mixed"),
        ("nothing", "mixed"),
        ("unknown-figures", "missed"),
        ("served-otherwise", "missed"),
    ],
)
def test_the_first_line_is_the_verdict(name: str, style: str) -> None:
    optimization = made.MAKERS[name]()
    text = own_part(optimization)
    assert f'<main>\n<h1 class="verdict {style}">' in text
    begin = text.index("<main>")
    assert seen(text[begin:]).strip().startswith(first_line.headline(optimization))


def test_a_headline_that_was_written_down_is_kept() -> None:
    found = msgspec.structs.replace(made.kept(), headline="SLO kept: by all")
    assert seen(own_part(found)).count("SLO kept: by all") == 2


def test_notes_come_before_all_figures() -> None:
    text = seen(own_part(made.without_data()))
    assert text.index("No data was given: inputs were drawn") < text.index("Before and after")
    assert "Read this first" not in seen(own_part(made.kept()))


def test_the_page_loads_nothing() -> None:
    text = own_part(made.kept())
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", text)
    assert "default-src 'none'" in text


def test_names_cannot_become_code() -> None:
    found = made.kept()
    found.name = found.source = found.source_text = found.command = EVIL
    found.notes = [EVIL]
    found.tries[7].reason = found.tries[8].fallback[0].name = EVIL
    found.phases[1].label = EVIL
    found.skipped = [Skip("half", EVIL, Step("half", {EVIL: EVIL}))]
    text = own_part(found)
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 8


def test_every_plot_is_on_the_page() -> None:
    text = own_part(made.kept())
    plots = optimize_report.all_plots(made.kept())
    names = re.findall(r'data-plot="(\w+)"', text)
    assert sorted(names) == sorted(plots) and len(names) == 8
    assert text.count("<svg ") == 8


def test_what_was_tried_is_told_by_stage_with_its_gates_and_steps() -> None:
    text = own_part(made.kept())
    assert text.count('<tr class="head">') == 12 == text.count("<details><summary>gates")
    assert text.count('class="chip error">rejected<') == 2
    assert text.count('class="chip chosen">chosen<') == 1
    words = seen(text)
    for part in (
        "built FP32: no MatMul is quantised",
        "quantised: 34 MatMul",
        "exact binomial on discordant pairs",
        "Step('int8-dynamic', {'per_channel': 'yes'}),",
        "half(datatype=FP16) no fast FP16 instructions",
        "/classifier/Gemm Gemm 21 % 4.00 us",
        "87 % of the time is MatMul, compute-bound",
        f"penstock serve models/.optimize/reviews/0123456789abcdef/builds/{made.CHOSEN.key}",
    ):
        assert part in words


def test_a_step_is_recommended_only_where_the_profile_is_of_the_chosen_model() -> None:
    found = made.kept()
    assert "at most 2.4x" not in own_part(found) and "at most 1.2x" not in own_part(found)
    found.profiled = made.QUANTISED.key
    # INT8 is what it has.
    assert "Next: encode is 20 % of a request: at most 1.2x" in own_part(found)
    assert "at most 2.4x" not in own_part(found)


def test_what_the_gate_did_not_check_follows_the_verdict() -> None:
    text = own_part(made.disturbed())
    assert text.index("</h1>") < text.index("output &#39;embedding&#39;") < text.index("<dt>SLO")
    assert "not checked" not in own_part(made.kept())


def test_layers_of_the_chosen_are_named_or_else_all() -> None:
    found = made.kept()
    found.tries[7].fallback = found.tries[8].fallback[:1]
    assert own_part(found).count("/encoder/layer.0/attention/query/MatMul") == 1
    found.chosen = made.FUSED
    assert own_part(found).count("/encoder/layer.0/attention/query/MatMul") == 2


def test_record_and_commands() -> None:
    words = seen(own_part(made.kept()))
    for part in (
        "penstock optimize hf/minilm-reviews --data reviews.npz --out models",
        "penstock serve models",
        "--max-rate",
        "Example CPU 9000, 4 cores, 16.0 GiB",
        "avx2, f16c, avx512_vnni",
        "onnxruntime 1.24.0",
        made.CHOSEN.key,
        "0.400 per hour",
        "12 candidates in 6 min 52 s, 31 measurements and 4 remembered from an earlier run",
    ):
        assert part in words


def test_what_is_not_there_has_no_heading() -> None:
    def headings(optimization: Optimization) -> list[str]:
        return re.findall("<h2>(.*?)</h2>", own_part(optimization))

    assert headings(made.nothing()) == ["Read this first", "Do it again", "Record"]
    assert headings(made.already_met()) == [
        "The original",
        "Speed and accuracy",
        "What was tried",
        "Do it again",
        "Record",
    ]
    assert headings(made.kept()) == [
        "Step by step",
        "Before and after",
        "Speed and accuracy",
        "Profile of onnx-export → transformer-fusion(heads=12)",
        "What was tried",
        "Layers kept in float",
        "Not tried",
        "Do it again",
        "Record",
    ]


def test_a_language_model_has_a_page_in_its_own_words() -> None:
    text = own_part(made.text())
    words = seen(text)
    for part in (
        "p99 first token",
        "Rate and time to the first token",
        "openai+http://127.0.0.1:8000/v1",
        "penstock serve models",
        "next-token distribution",
        "penstock.tpot_ms",
        "only GPUs multiply in it",
    ):
        assert part in words
    assert "rows a batch" not in words and "Predicted" not in words and "nan" not in words.lower()


def test_a_step_that_the_budget_cut_off_is_no_error_on_the_page() -> None:
    found = made.kept()
    reason = "cut off by the time budget: no answer within 5 s"
    found.tries = [
        found.tries[0],
        made.attempt(Candidate((Step("other"),)), "compile", "cut off", reason),
    ]
    text = own_part(found)
    assert '<span class="chip note">cut off</span>' in text and reason in text
    assert ">failed<" not in text
