"""One version in Penstock and in a real Triton, as the benchmark serves it: tiny, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from rivals.environment import InstallError
from rivals.triton import Triton

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def test_both_give_the_same_answers_and_are_measured_in_turns(tmp_path: Path) -> None:
    try:
        Triton().prepare()
    except InstallError as error:
        pytest.skip(f"Triton cannot be installed here: {error}")
    out = tmp_path / "found.json"
    script = ROOT / "benchmarks" / "gpu" / "beside_triton.py"
    flags = ["--tiny", "--device", "cpu", "--rounds", "1", "--shards", "1"]
    flags += ["--work", str(tmp_path / "work"), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(script), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    asked: dict[tuple[str, float], dict[str, float]] = {}
    for each in found["levels"]:
        asked.setdefault((each["size"], each["share"]), {})[each["side"]] = each["rate"]
    for size, ladder in found["ladders"].items():
        # Higher ones may have been spared.
        assert asked[size, 0.7] == dict.fromkeys(("penstock", "triton"), ladder["rates"]["0.70"])
    assert set(found["ladders"]) == {"small", "large"}
    assert all(len(set(rates.values())) == 1 for rates in asked.values())
    assert max(found["difference"].values()) < 1e-3
    for size, max_batch in found["settings"]["max_batch"].items():
        probes = [each for key, each in found["probes"].items() if key.startswith(f"{size};")]
        assert len(probes) == 4
        # Lengths differ, and still they share batches, on both sides.
        assert all(1 < each["rows_per_batch"] <= max_batch for each in probes)
        assert not any(each["num_failed"] for each in probes)
