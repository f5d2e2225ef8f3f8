"""Rollouts of a catalog whose workers are on strings, with a repository on disk."""

import asyncio
import math
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink, settle

from penstock.errors import InvalidRequest, NotFound, StorageFull
from penstock.operate import promotion
from penstock.operate.promotion import Grounds
from penstock.operate.rollout_judge import RolloutJudge, RolloutVerdict
from penstock.operate.rollout_measures import RolloutReading
from penstock.operate.rollout_records import unfinished
from penstock.operate.rollout_state import RolloutPlan
from penstock.operate.rollouts import Rollouts
from penstock.repository import history, layout, versions
from penstock.repository.history import HistoryEvent
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.types import Request, from_array

# An SLO that no request misses, whatever else the machine does.
CONFIG = """
parameters {{ key: "penstock.slo" value {{ string_value: "p99 < 100s" }} }}
backend: "null" max_batch_size: 4
input {{ name: "x" data_type: TYPE_INT32 dims: {size} }}
output {{ name: "y" data_type: TYPE_INT32 dims: {size} }}
{more}
"""
FAILS = 'parameters { key: "null.fail_on" value { string_value: "7" } }'
PLAN = RolloutPlan(steps=(0.5, 1.0), step_s=5.0, force="a test", mirrored_per_s=1e6)


def add_version(root: Path, version: str, more: str = "", size: int = 1) -> None:
    folder = root / "m" / version
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG.format(size=size, more=more))


class Stage:
    """A server with model m, whose version 1 is served."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "m"
        add_version(root, "1")
        policy = "version_policy { specific { versions: 1 } }"
        (self.folder / "config.pbtxt").write_text(CONFIG.format(size=1, more=policy))
        self.root = root
        self.clock = FakeClock()
        self.puppets = Puppets()
        self.catalog = Catalog(self.puppets)
        self.control = Control(self.catalog, str(root), is_explicit=True)
        self.rollouts = Rollouts(self.catalog, self.control, self.clock)

    async def act(self, doing: Awaitable[object]) -> object:
        task = asyncio.ensure_future(doing)
        while not task.done():
            await self.puppets.step_all()
            await asyncio.sleep(0.001)
        return task.result()

    async def start(self, version: str = "2", plan: RolloutPlan = PLAN) -> object:
        return await self.act(self.rollouts.start("m", version, plan, "anne"))

    async def second(self, num_requests: int = 100, value: int = 7) -> list[Request]:
        """Serve requests, then let the rollouts look."""
        requests = await self.answer(num_requests, value)
        await self.act(self.rollouts.tick())
        return requests

    async def answer(self, num_requests: int = 100, value: int = 7) -> list[Request]:
        """Serve the requests of a second."""
        requests = []
        for _ in range(num_requests):
            inputs = [from_array("x", "INT32", np.array([[value]], np.int32))]
            request = Request(RecordingSink(), inputs, 0.0)
            model, split = self.catalog.choose("m", "", {})
            request.timings.received = asyncio.get_running_loop().time()
            if split is not None:
                split.watch(request, model)
            model.submit(request)
            requests.append(request)
        for _ in range(50):
            await self.puppets.step_all()
            if all(each.is_done for each in requests):
                break
        self.clock.advance(1.0)
        return requests

    async def until_ended(self, most: int = 60) -> int:
        for number in range(most):
            await self.second()
            if self.rollouts.state("m").decision != "running":
                return number
        raise AssertionError(self.rollouts.state("m"))

    def kinds(self) -> list[str]:
        return [each.kind for each in history.read(self.folder)]

    def served(self) -> list[str]:
        return layout.chosen(self.folder, layout.read_message(self.folder), [])


def error_of(request: Request) -> object:
    return getattr(request.sink, "inner", request.sink).error


def run(root: Path, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        stage = Stage(root)
        scan = layout.read(root)
        await stage.act(stage.catalog.load(RepositoryScan(scan.configs, scan.problems)))
        await scenario(stage)
        await stage.act(stage.catalog.close())
        assert stage.puppets.alive == []

    asyncio.run(main())


def test_a_good_candidate_is_promoted_in_memory_and_on_disk(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        event = await stage.start()
        assert (event.kind, event.version, event.previous) == ("canary started", "2", ("1",))
        assert event.actor == "anne"
        state = stage.rollouts.state("m")
        assert (state.decision, state.share, state.step) == ("running", 0.5, 0)
        await stage.until_ended()
        state = stage.rollouts.state("m")
        assert (state.decision, state.share) == ("promoted", 1.0)
        assert stage.served() == ["2"]
        assert stage.catalog.versions("m") == ["2"]
        assert stage.kinds() == ["canary started", "forced"]
        last = history.read(stage.folder)[-1]
        assert last.reason.startswith("a test: all checks hold (")
        assert last.figures["candidate_requests"] > 100
        assert {check["name"] for check in last.figures["checks"]} >= {"ready", "errors"}
        await stage.second()
        assert len(stage.puppets.alive) == 1

    run(tmp_path, scenario)


def test_each_step_is_in_the_history(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        plan = RolloutPlan(steps=(0.3, 0.6, 1.0), step_s=3.0, force="x", mirrored_per_s=1e6)
        await stage.start(plan=plan)
        await stage.until_ended()
        assert stage.kinds() == ["canary started", "canary step", "forced"]
        step = history.read(stage.folder)[1]
        assert step.reason.endswith("from 0.3 to 0.6 of the requests")
        assert step.figures["share"] == 0.6

    run(tmp_path, scenario)


def test_a_candidate_that_fails_is_rolled_back(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2", FAILS)
        await stage.start()
        seconds = await stage.until_ended()
        assert seconds < 10
        state = stage.rollouts.state("m")
        assert (state.decision, state.share) == ("rolled back", 0.0)
        assert "errors: " in state.reason
        assert stage.kinds() == ["canary started", "rolled back"]
        event = history.read(stage.folder)[-1]
        assert (event.version, event.previous) == ("1", ("2",))
        assert event.actor == "penstock"
        assert event.figures["share"] == 0.5
        assert "swap_s" in event.figures
        assert stage.served() == ["1"]
        assert [each for each in await stage.second() if error_of(each)] == []
        # It can be tried again.
        await stage.start()

    run(tmp_path, scenario)


def test_a_rollout_that_is_rolled_back_is_no_change_that_could_be_rolled_back(
    tmp_path: Path,
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2", FAILS)
        add_version(stage.root, "3")
        policy = "version_policy { specific { versions: [1, 3] } }"
        (stage.folder / "config.pbtxt").write_text(CONFIG.format(size=1, more=policy))
        await stage.act(stage.control.reload("m"))
        await stage.start()
        await stage.until_ended()
        assert stage.kinds() == ["canary started", "rolled back"]
        assert stage.served() == ["1", "3"]
        assert history.rollback_target(history.read(stage.folder), stage.served()) == ()

    run(tmp_path, scenario)


def test_a_shadow_is_compared_and_answers_nothing(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2", FAILS)
        plan = RolloutPlan(mode="shadow", steps=(), step_s=5.0, force="x", mirrored_per_s=1e6)
        event = await stage.start(plan=plan)
        assert event.kind == "shadow started"
        for _ in range(30):
            # One after the other: mirrors wait for nobody.
            for _ in range(5):
                requests = await stage.second(1)
                assert error_of(requests[0]) is None
            if stage.rollouts.state("m").decision != "running":
                break
        assert stage.rollouts.state("m").decision == "rolled back"
        assert stage.kinds()[-1] == "rolled back"

    run(tmp_path, scenario)


def test_a_candidate_that_crashes_is_rolled_back_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()
        for _ in range(10):
            if len(stage.puppets.alive) > 1:
                stage.puppets.alive[1].kill()
            await settle()
            requests = await stage.second(20)
            assert [each for each in requests if error_of(each)] == []
            if stage.rollouts.state("m").decision != "running":
                break
        state = stage.rollouts.state("m")
        assert state.decision == "rolled back"
        assert state.reason.startswith("ready: ")

    run(tmp_path, scenario)


def test_only_one_rollout_of_a_model_at_a_time(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        add_version(stage.root, "3")
        await stage.start()
        with pytest.raises(InvalidRequest, match="a rollout of 2 is running; stop it first"):
            await stage.start("3")

    run(tmp_path, scenario)


def test_an_operator_stops_a_rollout(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        with pytest.raises(NotFound, match="no rollout is running"):
            await stage.rollouts.stop("m")
        starting = asyncio.ensure_future(stage.rollouts.start("m", "2", PLAN))
        await asyncio.sleep(0)
        assert stage.rollouts.is_running("m")
        with pytest.raises(InvalidRequest, match="the candidate is still loading; stop"):
            await stage.rollouts.stop("m")
        await stage.act(starting)
        event = await stage.act(stage.rollouts.stop("m", "bob", "lunch"))
        assert (event.kind, event.actor) == ("rollout stopped", "bob")
        state = stage.rollouts.state("m")
        assert (state.decision, state.reason) == ("stopped", "stopped by bob: lunch")
        assert stage.catalog.versions("m") == ["1"]
        assert not stage.rollouts.is_running("m")

    run(tmp_path, scenario)


def test_a_reload_ends_a_rollout(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()
        await stage.act(stage.control.reload("m"))
        await stage.second()
        state = stage.rollouts.state("m")
        assert state.decision == "stopped"
        assert "loaded again" in state.reason
        assert stage.kinds() == ["canary started", "rollout stopped"]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("version", "force", "text"),
    [
        ("1", "x", "version 1 is served already"),
        ("2", "", "it has no evidence"),
        ("3", "x", r"input x is INT32 \[1\] and INT32 \[2\]; output y is INT32 \[1\] and"),
        ("4", "x", "failed to load 'm/4': .*soon"),
    ],
)
def test_what_cannot_be_rolled_out_is_refused(
    tmp_path: Path, version: str, force: str, text: str
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        add_version(stage.root, "3", size=2)
        slow = 'parameters { key: "null.a_ms" value { string_value: "soon" } }'
        add_version(stage.root, "4", slow)
        with pytest.raises(InvalidRequest, match=text):
            await stage.start(version, RolloutPlan(force=force))
        with pytest.raises(NotFound):
            await stage.start("9")
        assert stage.rollouts.states() == {}
        assert not stage.rollouts.is_running("m")
        assert stage.kinds() == []
        assert [each.config.version for each in stage.catalog] == ["1"]

    run(tmp_path, scenario)


def test_a_promotion_that_the_disk_refuses_ends_with_the_stable_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("penstock.repository.versions.promote", fail)
        await stage.until_ended()
        state = stage.rollouts.state("m")
        assert state.decision == "stopped"
        assert "version 2 could not be promoted: m: cannot be changed" in state.reason
        assert stage.catalog.versions("m") == ["1"]
        assert stage.served() == ["1"]

    run(tmp_path, scenario)


def test_a_canary_with_all_requests_is_promoted_once_its_checks_hold(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        plan = RolloutPlan(steps=(1.0,), step_s=5.0, force="x", mirrored_per_s=1e6)
        await stage.start(plan=plan)
        await stage.until_ended()
        assert stage.rollouts.state("m").decision == "promoted"

    run(tmp_path, scenario)


def test_a_version_that_is_promoted_while_its_rollout_starts_is_not_its_own_candidate(
    tmp_path: Path,
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        change = promotion.prepare(stage.root, "m", "2", Grounds(force="a test"))
        commit = asyncio.Event()
        switching = asyncio.ensure_future(stage.control.switch("m", "2", commit.wait))
        while len(stage.puppets.alive) < 2:
            await asyncio.sleep(0.001)
        starting = asyncio.ensure_future(stage.start())
        for _ in range(100):
            await asyncio.sleep(0.001)
        change.apply()
        commit.set()
        await stage.act(switching)
        with pytest.raises(InvalidRequest, match="loaded again or unloaded; start the rollout"):
            await starting
        assert stage.rollouts.states() == {}
        assert stage.catalog.versions("m") == stage.served() == ["2"]

    run(tmp_path, scenario)


def test_only_what_the_versions_do_during_the_rollout_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RolloutReading] = []

    def look(judge: RolloutJudge, reading: RolloutReading, now: float) -> RolloutVerdict:
        seen.append(reading)
        return RolloutVerdict("wait", "", ())

    monkeypatch.setattr(RolloutJudge, "tick", look)

    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        policy = "version_policy { all {} }"
        (stage.folder / "config.pbtxt").write_text(CONFIG.format(size=1, more=policy))
        await stage.act(stage.control.reload("m"))
        await stage.second()
        stage.catalog.find("m", "1").metrics.num_deaths["crash"] = 9
        stage.catalog.find("m", "2").metrics.num_deaths["crash"] = 1
        await stage.start("1")
        await stage.second(0)
        stage.catalog.find("m", "2").metrics.num_deaths["crash"] = 3
        await stage.second()
        assert (seen[0].stable_deaths, seen[0].candidate_deaths) == (0, 0)
        assert seen[0].stable_batches == {}
        assert (seen[1].stable_deaths, seen[1].candidate_deaths) == (2, 0)
        assert 0 < sum(size * count for size, (count, _) in seen[1].stable_batches.items()) < 200

    run(tmp_path, scenario)


def test_a_rollout_that_cannot_be_judged_does_not_leave_others_unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick, judges = RolloutJudge.tick, []

    def fail_at_first(judge: RolloutJudge, *arguments: object) -> RolloutVerdict:
        judges.append(judge)
        if judge is judges[0]:
            raise AssertionError("a bug")
        return tick(judge, *arguments)

    monkeypatch.setattr(RolloutJudge, "tick", fail_at_first)

    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2", FAILS)
        shutil.copytree(stage.folder, stage.root / "a")
        await stage.act(stage.control.reload("a"))
        await stage.act(stage.rollouts.start("a", "2", PLAN))
        await stage.start()
        assert await stage.until_ended() < 10
        assert stage.rollouts.state("a").decision == "running"

    run(tmp_path, scenario)


def test_a_history_that_cannot_be_written_does_not_keep_others_from_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()
        await stage.rollouts.close()
        started = history.read(stage.folder)[0]
        for name in ("a", "z"):
            shutil.copytree(stage.folder, stage.root / name)
            history.append(stage.root / name, started)
        append = history.append

        def fail_first(folder: Path, event: HistoryEvent) -> None:
            if folder.name == "a":
                raise OSError(30, "Read-only file system")
            append(folder, event)

        monkeypatch.setattr("penstock.repository.history.append", fail_first)
        await Rollouts(stage.catalog, stage.control).recover()
        assert "server restarted" in history.read(stage.root / "z")[-1].reason

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "number, told, kind",
    [
        (30, "m: cannot be changed: .*Read-only file system", InvalidRequest),
        (28, "No space left on device; free some space", StorageFull),
    ],
)
def test_a_repository_that_cannot_be_written_starts_no_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: str, kind: type[Exception]
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")

        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("penstock.repository.history.append", fail)
        with pytest.raises(kind, match=told):
            await stage.start()
        assert stage.rollouts.states() == {} and not stage.rollouts.is_running("m")
        assert stage.catalog.versions("m") == ["1"]

    run(tmp_path, scenario)


def test_a_model_that_is_loaded_again_meanwhile_gets_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")

        async def refuse(*_: object) -> bool:
            return False

        monkeypatch.setattr(stage.catalog, "split", refuse)
        with pytest.raises(InvalidRequest, match="m: the model was loaded again or unloaded"):
            await stage.start()
        assert stage.rollouts.states() == {} and not stage.rollouts.is_running("m")
        assert stage.kinds() == ["canary started", "rollout stopped"]

    run(tmp_path, scenario)


class SlowDisk:
    """Promotions of versions wait on their thread until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._promote = versions.promote
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr("penstock.repository.versions.promote", self.promote)

    def promote(self, *args: object) -> object:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return self._promote(*args)

    async def until_begun(self, stage: Stage) -> "asyncio.Task[None]":
        """Serve until a promotion has begun; return the tick that waits for it."""
        for _ in range(60):
            await stage.answer()
            looking = asyncio.ensure_future(stage.rollouts.tick())
            while not looking.done() and not self.has_begun.is_set():
                await asyncio.sleep(0.001)
            if self.has_begun.is_set():
                return looking
        raise AssertionError(stage.rollouts.state("m"))


def test_a_promotion_that_takes_long_does_not_hold_up_other_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        for name in ("a", "b"):
            shutil.copytree(stage.folder, stage.root / name)
            await stage.act(stage.control.reload(name))
            await stage.act(stage.rollouts.start(name, "2", PLAN))
        await stage.start()
        disk = SlowDisk(monkeypatch)
        promoting = await disk.until_begun(stage)
        await stage.act(stage.rollouts.stop("a"))
        await stage.act(stage.control.reload("b"))
        await stage.act(stage.rollouts.tick())
        decisions = {name: stage.rollouts.state(name).decision for name in ("a", "b", "m")}
        assert decisions == {"a": "stopped", "b": "stopped", "m": "running"}
        disk.may_end.set()
        await stage.act(promoting)
        assert stage.rollouts.state("m").decision == "promoted"

    run(tmp_path, scenario)


def test_a_server_that_stops_during_a_promotion_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()
        disk = SlowDisk(monkeypatch)
        looking = await disk.until_begun(stage)
        looking.cancel()
        closing = asyncio.ensure_future(stage.rollouts.close())
        await settle()
        disk.may_end.set()
        await stage.act(asyncio.wait([closing, looking]))
        assert stage.kinds() == ["canary started", "forced"]
        assert stage.rollouts.state("m").decision == "promoted"
        assert stage.catalog.versions("m") == stage.served() == ["2"]

    run(tmp_path, scenario)


def test_a_reload_that_read_the_repository_before_a_promotion_does_not_undo_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()
        has_read, may_load, load = asyncio.Event(), asyncio.Event(), stage.catalog.load

        async def load_late(found: RepositoryScan, at_once: Collection[str] = ()) -> None:
            has_read.set()
            await may_load.wait()
            await load(found, at_once)

        monkeypatch.setattr(stage.catalog, "load", load_late)
        reloading = asyncio.ensure_future(stage.control.reload("m"))
        await has_read.wait()
        for _ in range(30):
            await stage.answer()
            looking = asyncio.ensure_future(stage.rollouts.tick())
            for _ in range(100):
                await asyncio.sleep(0.001)
                if looking.done():
                    break
            if not looking.done() or stage.rollouts.state("m").decision != "running":
                break
        may_load.set()
        await stage.act(asyncio.gather(reloading, looking))
        assert stage.catalog.versions("m") == stage.served()

    run(tmp_path, scenario)


def test_a_server_that_stops_or_was_killed_says_so_in_the_history(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()
        assert unfinished(history.read(stage.folder)) is not None
        # As the next server does, after a crash.
        other = Rollouts(stage.catalog, stage.control)
        await other.recover()
        await other.recover()
        event = history.read(stage.folder)[-1]
        assert stage.kinds() == ["canary started", "rollout stopped"]
        assert "the server restarted; the stable version is served" in event.reason
        await stage.rollouts.close()
        assert history.read(stage.folder)[-1].reason == "the server shut down"

    run(tmp_path, scenario)


def test_the_state_has_numbers_that_json_can_hold(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        add_version(stage.root, "2")
        await stage.start()
        for _ in range(5):
            await stage.second()
        state = stage.rollouts.state("m")
        assert all(math.isfinite(value) for value in state.figures.values())
        assert all(math.isfinite(check.e_value) for check in state.checks)
        assert state.figures["candidate_requests"] + state.figures["stable_requests"] == 500

    run(tmp_path, scenario)
