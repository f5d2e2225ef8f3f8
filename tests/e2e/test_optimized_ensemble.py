"""An ensemble optimised from start to end, and served from the repository that is left."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from optimizer import small_ensembles
from served import Served

from penstock.errors import ConfigError
from penstock.optimizer import run
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization
from penstock.report import optimize as report
from penstock.repository import manifest


def optimize(plan: Plan) -> Optimization:
    return run.optimize(plan, lambda progress: None, "penstock optimize …")


@pytest.mark.slow
def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    """The same command again resumes."""
    plan = small_ensembles.plan_of(tmp_path)
    found = optimize(plan)
    assert found.member == "net" and found.name == "whole" and found.version == "1"
    assert found.held_out is not None and found.held_out.metric == "top1"
    assert found.held_out.original > 0.7
    assert found.before is not None and set(found.before.members) == {"parse", "net"}
    assert "The time of each member" in report.page(found)
    whole = manifest.read(Path(plan.out) / "whole" / "1")
    assert whole is not None and whole.evidence["slo"] == "p99 < 2s at 20/s poisson"
    assert whole.evidence["lineage"]["source"] == "ensemble of 'parse' and 'net'"
    # Served measurements that other programs disturbed are repeated.
    assert optimize(plan).num_remembered > 0
    with (
        Served(Path(plan.out)) as server,
        httpclient.InferenceServerClient(server.address) as client,
    ):
        for row in small_ensembles.rows(4):
            text = httpclient.InferInput("TEXT", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[small_ensembles.text_of(row).encode()]], object))
            scores = client.infer("whole", [text]).as_numpy("SCORES")
            np.testing.assert_allclose(scores, small_ensembles.answers(row[None]), atol=1e-4)


@pytest.mark.slow
def test_the_bottleneck_is_a_python_model(tmp_path: Path) -> None:
    plan = small_ensembles.plan_of(tmp_path, member="")
    path = Path(plan.model).parent / "parse" / "1" / "model.py"
    path.write_text(path.read_text().replace("return [", "import time; time.sleep(0.05); return ["))
    with pytest.raises(ConfigError) as caught:
        optimize(plan)
    first, second, third = caught.value.problems
    assert first.startswith("the bottleneck is 'parse', a Python model")
    assert "'parse' has" in second and "'net' has" in second and third.startswith("--member net")
