"""Runs of ensembles: what is refused, and what is committed. `tests/e2e/test_optimized_ensemble.py`
has one from start to end."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from optimizer import made_optimizations, small_ensembles

from penstock.errors import ConfigError
from penstock.optimizer import folders, measured_ensemble, run
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.machine import Machine
from penstock.optimizer.member_run import MemberRun
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import MemberTime, Optimization
from penstock.repository import layout, manifest
from penstock.repository.model_source import is_ensemble

MACHINE = Machine("a processor", 2, 1 << 34, ())
LOST = Candidate((Step("half", {"datatype": "BF16"}),))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return small_ensembles.plan_of(tmp_path)


def optimize(plan: Plan) -> Optimization:
    return run.optimize(plan, lambda progress: None, "penstock optimize …")


def made_run(plan: Plan) -> MemberRun:
    return MemberRun(plan, lambda progress: None, "", 0.0, "today", MACHINE)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": ""}, "data: an ensemble needs representative inputs"),
        ({"preprocess": "a:b"}, "preprocess: does not apply to an ensemble"),
        ({"calibration": "more.npz"}, "calibration: does not apply"),
        ({"member": "third"}, "member: 'third' is not a member of the ensemble"),
        ({"name": "other"}, "an ensemble keeps its name, 'whole'"),
        ({"outputs": ("LOGITS",)}, "no output 'LOGITS'; it has 'SCORES'"),
    ],
)
def test_plans_that_do_not_fit(plan: Plan, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        optimize(replace(plan, **changes))


def test_data_of_other_inputs(plan: Plan, tmp_path: Path) -> None:
    data = small_ensembles.write_data(tmp_path / "other.jsonl", name="NUMBERS")
    with pytest.raises(ConfigError, match="'NUMBERS'.*TEXT|TEXT.*NUMBERS"):
        optimize(replace(plan, data=data))


def test_a_member_of_a_model_without_members(plan: Plan) -> None:
    net = replace(plan, model=str(Path(plan.model).parent / "net"), name="net")
    with pytest.raises(ConfigError, match="net is not an ensemble"):
        optimize(net)
    assert is_ensemble(plan.model) and is_ensemble(f"{plan.model}/1")
    assert not is_ensemble(net.model) and not is_ensemble("nothing")


def test_other_models_in_the_repository_are_not_replaced(plan: Plan) -> None:
    out = Path(plan.out)
    shutil.copytree(Path(plan.model).parent / "parse", out / "parse")
    path = out / "parse" / "1" / "model.py"
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match="parse is not the ensemble's member"):
        made_run(plan).open(Path(plan.out) / "work" / "whole")


def committed(plan: Plan, tmp_path: Path, candidate: Candidate) -> Optimization:
    """Commit a run that chose a candidate."""
    work = tmp_path / "work"
    files = measured_ensemble.take(plan.model, work / "original")
    config = folders.read_config(files.root / "net")
    home = work / "builds" / candidate.key / "net"
    folders.write(Build(Candidate(), files.root / "net", config), config, home)
    found = made_optimizations.kept()
    found.name, found.member, found.out = "whole", "net", plan.out
    found.chosen, found.work, found.version = candidate, str(work), ""
    build = Build(candidate, home, folders.read_config(home))
    made_run(plan).commit(build, found, "key")
    return found


def test_the_member_and_the_ensemble_are_committed(plan: Plan, tmp_path: Path) -> None:
    found = committed(plan, tmp_path, LOST)
    out = Path(plan.out)
    assert found.version == "1" and not found.uncommitted
    assert sorted(each.name for each in out.iterdir()) == ["net", "parse", "whole"]
    whole, net = manifest.read(out / "whole" / "1"), manifest.read(out / "net" / "1")
    assert whole is not None and net is not None
    assert whole.evidence["member"] == {"net": "1"}
    assert whole.evidence["slo"] and whole.evidence["measured"]
    assert not whole.evidence["batch_times"] and not whole.evidence["input_statistics"]
    # It promises nothing: it was measured in the ensemble.
    assert "slo" not in net.evidence and not net.evidence["measured"]
    assert net.evidence["ensemble"] == "whole" and net.evidence["lineage"]["steps"]
    assert not layout.read(out).problems
    # A run that was killed after its commit adds nothing.
    assert committed(plan, tmp_path / "again", LOST).version == "1"
    assert layout.version_folders(out / "net") == ["1"]


def test_in_its_own_repository_versions_are_added(plan: Plan, tmp_path: Path) -> None:
    plan = replace(plan, out=str(Path(plan.model).parent))
    found = committed(plan, tmp_path, LOST)
    out = Path(plan.out)
    assert found.version == "2"
    assert layout.version_folders(out / "net") == ["1", "2"]
    assert layout.version_folders(out / "parse") == ["1"]


def test_without_a_new_member_the_ensemble_names_the_old_one(plan: Plan, tmp_path: Path) -> None:
    found = committed(plan, tmp_path, Candidate())
    whole = manifest.read(Path(plan.out) / "whole" / found.version)
    assert whole is not None and whole.evidence["member"] == {"net": "1"}
    assert manifest.read(Path(plan.out) / "net" / "1") is None


def test_a_member_whose_new_version_is_not_served(plan: Plan, tmp_path: Path) -> None:
    plan = replace(plan, out=str(Path(plan.model).parent))
    with (Path(plan.out) / "net" / "config.pbtxt").open("a") as file:
        file.write("version_policy { specific { versions: 1 } }")
    found = committed(plan, tmp_path, LOST)
    assert any("penstock repo promote" in note and "net 2" in note for note in found.notes)


def test_the_next_bottleneck_is_named(plan: Plan, tmp_path: Path) -> None:
    files = measured_ensemble.take(plan.model, tmp_path / "taken")
    found = made_optimizations.kept()
    found.outcome, found.member = "missed", "net"
    assert found.after is not None
    found.after.members = {"parse": MemberTime(0.0, 0.003, 1.0), "net": MemberTime(0.0, 0.001, 1.0)}
    made_run(plan).describe_bottleneck(files, found)
    assert found.binding.startswith("member 'parse' (75 % of the members' time")
    assert found.next_options[0].text.startswith("the bottleneck is now 'parse', a Python model")
    found.after.members["net"].queue_s = 1.0
    made_run(plan).describe_bottleneck(files, found)
    assert found.next_options[0].text.startswith("the bottleneck is still 'net'")
