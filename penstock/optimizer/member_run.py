"""Runs of ensembles: measure the ensemble on the user's data, optimise the member where requests
spend most of their time by the search for any model, and judge and prove it in the ensemble."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import (
    bottleneck,
    data_checks,
    ensemble_answers,
    evidence,
    folders,
    measured_ensemble,
    subject,
)
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.evidence import Evidence
from penstock.optimizer.measured_ensemble import EnsembleFiles, MeasuredEnsemble
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import (
    NextOption,
    Optimization,
    ServedMeasurement,
)
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.served import ServedBench
from penstock.optimizer.subject import Subject
from penstock.optimizer.tensor_run import TensorRun
from penstock.repository import layout, versions
from penstock.repository import manifest as manifests
from penstock.repository.model_source import resolve
from penstock.serving.input_statistics import KEY

# Below the run's folder.
CAPTURE, MEMBER, SERVED, COMMITTED = "capture", "member", "ensembles", "ensemble"
KIND = "ensemble"
REFUSED = {
    "preprocess": "make it a step of the ensemble",
    "postprocess": "make it a step of the ensemble",
    "calibration": "ranges come from a part of --data, by the steps before the member",
}


class MemberRun(TensorRun):
    def check(self) -> None:
        plan = self.plan
        problems = [
            f"{key}: does not apply to an ensemble: {advice}"
            for key, advice in REFUSED.items()
            if getattr(plan, key)
        ]
        if not plan.data:
            needed = "an ensemble needs representative inputs, to find its bottleneck with"
            problems.append(f"data: {needed}; give --data or --from-live")
        if problems:
            raise ConfigError(problems)

    def open(self, target: Path) -> Subject:
        """Write the ensemble and its members beside each other: a repository."""
        files = measured_ensemble.take(self.plan.model, target.parent)
        if files.config.name != self.plan.name:
            expected = f"an ensemble keeps its name, '{files.config.name}'"
            raise ConfigError([f"name: '{self.plan.name}': {expected}"])
        bottleneck.check_asked(files, self.plan.member)
        outputs = [spec.name for spec in files.config.outputs]
        data_checks.check_output_names(self.plan.outputs, outputs)
        self._check_out(files)
        build = Build(Candidate(), target, files.config)
        text = measured_ensemble.describe(files)
        return Subject(build, KIND, subject.digest_of(target.parent), text)

    def files(self, subject: Subject) -> Path:
        return subject.build.folder.parent

    def place(self, subject: Subject, folder: Path) -> Build:
        if not folder.is_dir():
            draft = folder.with_name(f".{folder.name}")
            shutil.rmtree(draft, ignore_errors=True)
            folders.link_tree(self.files(subject), draft)
            os.rename(draft, folder)
        config = measured_ensemble.read(folder, self.plan.name).config
        return Build(Candidate(), folder / self.plan.name, config)

    def uses_gpu(self, subject: Subject) -> bool:
        return _files(subject).uses_gpu

    def narrowed(self, run: RunContext) -> RunContext:
        plan, files = run.plan, _files(run.subject)
        measured = self._measured(run, files)
        name = bottleneck.choose(files, measured.members, plan.member)
        why = "as asked for" if plan.member else "the bottleneck"
        share = bottleneck.share_text(measured.members, name)
        run.notes.append(f"member '{name}' is optimised, {why}: {share}")
        run.tell(f"inputs of '{name}'")
        asked = run.samples
        rows = ensemble_answers.captured(files, name, asked.rows, run.folder / CAPTURE)
        others_s = sum(each.compute_s for key, each in measured.members.items() if key != name)
        member_plan = replace(
            plan,
            model=str(files.root / name),
            name=name,
            slo=measured_ensemble.member_slo(plan.slo, others_s),
        )
        around = MeasuredEnsemble(files, name, plan.slo, asked, run.folder / SERVED)
        opened = _open_member(member_plan, run.folder / MEMBER / name)
        samples = replace(asked, rows=rows, non_finite=())
        return replace(run, plan=member_plan, subject=opened, samples=samples, ensemble=around)

    def _measured(self, run: RunContext, files: EnsembleFiles) -> ServedMeasurement:
        """Measure the ensemble as it came, at the SLO's load."""
        run.tell("time of each member")
        plan = replace(run.plan, duration_s=run.budget.planned.level_s)
        bench = ServedBench(plan, run.rows, run.tell)

        def measure() -> ServedMeasurement:
            try:
                return bench.measure([files.build])[0]
            except BackendFailed as error:
                raise ConfigError([f"{files.config.name}: cannot be measured: {error}"]) from error

        return run.journal.remember("members", "", ServedMeasurement, measure)

    def describe(self, run: RunContext, found: Optimization) -> None:
        if run.ensemble is not None:
            self.describe_bottleneck(run.ensemble.files, found)

    def describe_bottleneck(self, files: EnsembleFiles, found: Optimization) -> None:
        """Name the bottleneck of an ensemble that misses its SLO."""
        after = found.after
        if after is None or not after.members or found.outcome == "kept":
            return
        name = bottleneck.slowest(after.members)
        found.binding = f"member '{name}' ({bottleneck.share_text(after.members, name)})"
        if found.outcome not in ("missed", "refused"):
            return
        problem = bottleneck.problem_of(files, name)
        if problem:
            text = f"the bottleneck is now '{name}', {problem}"
        elif name == found.member:
            text = f"the bottleneck is still '{name}'"
        else:
            text = f"the bottleneck is now '{name}': run the same command on the new version"
        found.next_options.insert(0, NextOption("bottleneck", text))

    # The repository.

    def _check_out(self, files: EnsembleFiles) -> None:
        """Check that the repository for the version has no other models of the members' names."""
        if self._is_own_repository:
            return
        problems = []
        for name, config in files.members.items():
            there = Path(self.plan.out) / name
            if there.is_dir() and not _is_same(there, files.root / name / config.version):
                advice = "is not the ensemble's member; choose another repository"
                problems.append(f"out: {there} {advice}")
        if problems:
            raise ConfigError(problems)

    @property
    def _is_own_repository(self) -> bool:
        source = resolve(self.plan.model).path
        home = source.parent if source.name == self.plan.name else source.parent.parent
        return home.resolve() == Path(self.plan.out).resolve()

    def commit(self, build: Build, found: Optimization, key: str) -> None:
        """Add the member's version and then the ensemble's, with the other members if they are not
        there. The evidence is the ensemble's; the member's names it."""
        out, root = Path(self.plan.out), Path(found.work) / "original"
        files = measured_ensemble.read(root, self.plan.name)
        own = evidence.evidence(build, found, key)
        home = Path(found.work) / COMMITTED / found.name
        shutil.rmtree(home, ignore_errors=True)
        folders.write(Build(Candidate(), root / found.name, files.config), files.config, home)
        whole = Build(build.candidate, home, folders.read_config(home))

        def prepare() -> Evidence:
            for name in files.members:
                if name != found.member and not (out / name).exists():
                    _copy_atomically(root / name, out / name)
            version = self._commit_member(build, found, own, root)
            return {"batch_times": None, KEY: None, "member": {found.member: version}}

        evidence.commit(whole, found, key, prepare)

    def _commit_member(self, build: Build, found: Optimization, made: Evidence, root: Path) -> str:
        """Return the version that the ensemble runs."""
        out, name = Path(self.plan.out), found.member
        folder = out / name
        if not build.candidate.steps:
            if not folder.exists():
                _copy_atomically(root / name, folder)
            return _served_version(folder)
        # Only the ensemble was measured, and only it keeps a promise.
        made = made | {"outcome": None, "measured": None, "original": None, "ensemble": found.name}
        made.pop("slo")
        version = evidence.committed(folder, made)
        version = version or versions.commit(out, name, build.version_folder, build.config, made)
        if version != (served := _served_version(folder)):
            ways = f"penstock repo promote {out} {name} {version}"
            found.notes.append(f"{folder} serves version {served}, not the new one: {ways}")
        return version


def _is_same(folder: Path, version: Path) -> bool:
    """Whether a model's folder serves this version, or one that was optimised for an ensemble."""
    newest = layout.chosen(folder, layout.read_message(folder), [])[-1]
    found = manifests.read(folder / newest)
    if found is not None and found.evidence.get("ensemble"):
        return True
    return subject.digest_of(folder / newest) == subject.digest_of(version)


def _files(subject: Subject) -> EnsembleFiles:
    return measured_ensemble.read(subject.build.folder.parent, subject.build.config.name)


def _open_member(plan: Plan, folder: Path) -> Subject:
    """Open the member as any version of a repository; the user's data is not its own."""
    shutil.rmtree(folder, ignore_errors=True)
    return subject.open_subject(replace(plan, data=""), folder)


def _served_version(folder: Path) -> str:
    return layout.chosen(folder, layout.read_message(folder), [])[-1]


def _copy_atomically(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    os.rename(draft, target)
