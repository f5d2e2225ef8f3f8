"""The page of a profile: whole in itself, the verdict first, names shown as they are."""

import re

from penstock.report import profile as profile_report


def text_of(html: str) -> str:
    body = html[html.index("<body") :]
    return re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)


def test_the_verdict_comes_first(profile) -> None:
    text = text_of(profile_report.page(profile, "penstock profile models/encoder"))
    first = re.sub(r"<[^>]*>", "", text[text.index("<h1") : text.index("</h1>")])
    assert "Compute-bound: 80 % of the time, most of it MatMul" in first
    assert "at most 2.5x" in first
    assert "penstock profile models/encoder" in text


def test_names_cannot_become_markup(profile) -> None:
    text = text_of(profile_report.page(profile))
    assert "<b>sum</b>" not in text
    assert "&lt;b&gt;sum&lt;/b&gt;" in text


def test_nothing_is_loaded_from_elsewhere(profile) -> None:
    html = profile_report.page(profile)
    text = text_of(html)
    assert not re.search(r"(src|href)=", text)
    assert "default-src 'none'" in html


def test_a_disturbed_profile_promises_nothing(profile) -> None:
    profile.disturbance = "the same run took from 10.0 ms to 30.0 ms"
    assert "next step" in text_of(profile_report.page(profile))
    profile.steps, profile.headroom, profile.limit_share = [], None, None
    text = text_of(profile_report.page(profile))
    assert (
        "next step" not in text and "at the peaks" not in text and "What could be done" not in text
    )
