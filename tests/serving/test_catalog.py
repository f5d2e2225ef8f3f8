"""Loading, swapping and unloading models, with workers on strings."""

import asyncio
import contextlib
import gc
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from doubles import FakeGpus, Puppets, RecordingSink, settle

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.errors import ConfigError, NotFound, NotReady, QuotaExceeded
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.fleet import Fleet
from penstock.serving.quotas import Quota
from penstock.types import Request, TensorSpec, from_array
from penstock.wire.frames import SplitRule

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (1,)),),
    outputs=(TensorSpec("y", "INT64", (1,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    memory=MemoryPolicy(spill_bytes=1 << 12),
)
GIB = 1 << 30
BROKEN = replace(CONFIG, options={"null.a_ms": "soon"})


def ask(value: int) -> Request:
    return Request(RecordingSink(), [from_array("x", "INT64", np.array([[value]]))], 0.0)


class Stage:
    """`fails` says what the next starts of workers end with, None for those that succeed."""

    def __init__(self) -> None:
        self.puppets = Puppets()
        self.fails: list[Exception | None] = []
        self.gpus = FakeGpus(10 * GIB, 10 * GIB)
        # What each worker takes of the first of them as soon as it is started.
        self.taken_bytes = 0
        self.catalog = Catalog(start_life=self._start, fleet=Fleet(0.0, self.gpus))

    def _start(self, loop, on_death):
        error = self.fails.pop(0) if self.fails else None
        if error is not None:
            raise error
        self.gpus.used_bytes[0] += self.taken_bytes
        return self.puppets(loop, on_death)

    async def act(self, change) -> None:
        """Carry out a change while the workers do what they are told."""
        task = asyncio.ensure_future(change)
        while not task.done():
            await self.puppets.step_all()
            await asyncio.sleep(0)
        await task

    async def load(self, *configs: ModelConfig, **problems: list[str]) -> None:
        await self.act(self.catalog.load(RepositoryScan(list(configs), problems)))


def run(scenario) -> None:
    async def main() -> None:
        stage = Stage()
        await scenario(stage)
        await stage.act(stage.catalog.close())
        assert stage.puppets.alive == []

    asyncio.run(main())


async def until(is_so) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


def step(life) -> bool:
    """Let one worker do what it was told, and no other."""
    if life.has_work:
        life.step()
    return True


def states(catalog: Catalog, *names: str) -> list[tuple[str, str, str]]:
    return [(e.name, e.version, e.state) for e in catalog.index(names)]


def test_the_highest_version_answers_unless_one_is_named():
    async def scenario(stage):
        await stage.load(CONFIG, replace(CONFIG, version="10"), replace(CONFIG, version="9"))
        assert stage.catalog.find("echo").config.version == "10"
        assert stage.catalog.find("echo", "9").config.version == "9"
        assert stage.catalog.versions("echo") == ["1", "9", "10"]
        with pytest.raises(NotFound, match="'echo' version 2 is not found; loaded: 1, 9, 10"):
            stage.catalog.find("echo", "2")
        with pytest.raises(NotFound, match="unknown model: 'other' is not found; loaded: echo$"):
            stage.catalog.find("other")
        await stage.load(*(replace(CONFIG, name=f"m{number:02}") for number in range(12)))
        with pytest.raises(NotFound, match=r"loaded: echo, m00, .*, m08 and 3 more$"):
            stage.catalog.find("other")

    run(scenario)


def test_one_bad_model_does_not_disturb_the_others():
    async def scenario(stage):
        await stage.load(CONFIG, replace(BROKEN, name="bad"), unread=["config.pbtxt: nonsense"])
        assert stage.catalog.find("echo").is_ready
        assert not stage.catalog.is_ready
        with pytest.raises(NotReady, match="'unread' could not be loaded: config.pbtxt: nonsense"):
            stage.catalog.find("unread")
        with pytest.raises(NotReady, match="'soon' is not a number"):
            stage.catalog.find_all("bad")
        await stage.act(stage.catalog.unload("bad"))
        with pytest.raises(NotFound):
            stage.catalog.find("bad")
        await stage.load(replace(BROKEN, name="bad"))
        assert sorted(f.name for f in stage.catalog.failures) == ["bad", "unread"]
        assert states(stage.catalog, "echo", "idle") == [
            ("bad", "", "UNAVAILABLE"),
            ("echo", "1", "READY"),
            ("idle", "", ""),
            ("unread", "", "UNAVAILABLE"),
        ]

    run(scenario)


def test_a_reload_switches_in_one_step_and_loses_nothing():
    async def scenario(stage):
        await stage.load(CONFIG)
        old = stage.catalog.find("echo")
        running, waiting = ask(1), ask(2)
        old.submit(running)
        await settle()
        old.submit(waiting)
        await stage.load(replace(CONFIG, version="2"))
        new = stage.catalog.find("echo")
        assert new is not old and new.config.version == "2"
        assert stage.catalog.versions("echo") == ["2"]
        for _ in range(50):
            await stage.puppets.step_all()
        assert running.sink.error is waiting.sink.error is None
        assert len(stage.puppets.alive) == 1, "the old worker has left"

    run(scenario)


def test_a_failed_reload_keeps_the_old_model():
    async def scenario(stage):
        await stage.load(CONFIG)
        old = stage.catalog.find("echo")
        await stage.load(CONFIG, replace(BROKEN, version="2"))
        assert stage.catalog.find("echo") is old and old.is_ready
        assert stage.catalog.is_ready, "what is served still is"
        assert "'soon' is not a number" in stage.catalog.failure("echo").problems[0]
        await stage.load(CONFIG)
        assert stage.catalog.failure("echo") is None

    run(scenario)


def test_unloading_answers_what_was_admitted_first():
    async def scenario(stage):
        await stage.load(CONFIG)
        model = stage.catalog.find("echo")
        running = ask(1)
        model.submit(running)
        await settle()
        await stage.act(stage.catalog.unload("echo"))
        with pytest.raises(NotFound):
            stage.catalog.find("echo")
        for _ in range(20):
            await stage.puppets.step_all()
        assert running.sink.error is None
        assert stage.puppets.alive == []
        await stage.act(stage.catalog.unload("never loaded"))

    run(scenario)


def test_loads_and_unloads_of_one_model_do_not_race():
    async def scenario(stage):
        changes = []
        for number in range(1, 6):
            config = replace(CONFIG, version=str(number))
            changes.append(stage.catalog.load(RepositoryScan([config])))
            changes.append(stage.catalog.unload("echo"))
        changes.append(stage.catalog.load(RepositoryScan([replace(CONFIG, version="6")])))
        await stage.act(asyncio.gather(*changes))
        assert stage.catalog.versions("echo") == ["6"]
        assert stage.catalog.find("echo").is_ready

    run(scenario)


NO_PROCESS = BlockingIOError(11, "Resource temporarily unavailable")


def test_a_worker_that_gets_no_process_is_tried_again():
    async def scenario(stage):
        stage.fails = [None, NO_PROCESS]
        await stage.load(CONFIG, replace(CONFIG, version="2"))
        assert stage.catalog.versions("echo") == ["1", "2"]
        model = stage.catalog.find("echo")
        stage.fails = [NO_PROCESS, NO_PROCESS]
        stage.puppets.alive[-1].kill()
        await settle()
        assert not model.is_ready
        async with asyncio.timeout(60):
            while not model.is_ready:
                await stage.puppets.step_all()
                await asyncio.sleep(0.005)
        assert stage.fails == []

    run(scenario)


def test_workers_that_never_get_a_process_fail_the_load():
    async def scenario(stage):
        stage.fails = [None, NO_PROCESS, NO_PROCESS, NO_PROCESS]
        await stage.load(CONFIG, replace(CONFIG, version="2"))
        assert stage.catalog.failure("echo").problems == (
            "the worker could not be started ([Errno 11] Resource temporarily unavailable) "
            "while loading, 3 times; see the log",
        )
        assert stage.puppets.alive == [], "not even that of version 1"

    run(scenario)


def test_a_load_that_fails_in_an_unknown_way_leaves_no_worker():
    async def scenario(stage):
        stage.fails = [None, ValueError("unheard of")]
        with pytest.raises(ExceptionGroup):
            await stage.load(CONFIG, replace(CONFIG, version="2"))
        assert stage.puppets.alive == []
        assert list(stage.catalog) == []

    run(scenario)


def on_gpus(num_gib: int, *devices: str, version: str = "1", name: str = "echo") -> ModelConfig:
    config = replace(CONFIG, name=name, version=version, gpu_memory_bytes=num_gib * GIB)
    return config.on(devices)


def test_a_model_runs_on_every_gpu_at_the_same_time():
    async def scenario(stage):
        await stage.load(on_gpus(2, "cuda", "cuda"))
        model = stage.catalog.find("echo")
        assert [each.device for each in model.host.instances] == ["cuda:0", "cuda:1"]
        assert [each.ready.built["device"] for each in model.host.instances] == ["cuda:0", "cuda:1"]
        requests = [ask(number) for number in range(16)]
        for request in requests:
            model.submit(request)
        await settle()
        assert [len(each.batches) for each in model.workers] == [2, 2], "each got 2 of 4 batches"
        await stage.puppets.step_all()
        answers = [request.sink.outputs[0]["y"].tolist() for request in requests]
        assert answers == [[[number]] for number in range(16)]
        instances = model.explain().instances
        assert [each.device for each in instances] == ["cuda:0", "cuda:1"]

    run(scenario)


def test_a_gpu_that_has_nothing_comes_first():
    async def scenario(stage):
        await stage.load(on_gpus(2, "cuda", "cuda"))
        model = stage.catalog.find("echo")
        for number in range(3):
            model.submit(ask(number))
            await settle()
        assert [len(each.batches) for each in model.workers] == [2, 1]
        await stage.puppets.step_all()

    run(scenario)


def test_a_worker_that_died_comes_back_on_its_gpu():
    async def scenario(stage):
        await stage.load(on_gpus(1, "cuda:1", "cuda:0"))
        model = stage.catalog.find("echo")
        stage.puppets.alive[0].kill()
        await stage.puppets.step_all()
        assert model.host.instances[0].num_restarts == 1
        assert model.host.instances[0].ready.built["device"] == "cuda:1"

    run(scenario)


def test_what_workers_measured_is_told_instance_by_instance():
    async def scenario(stage):
        options = {"null.gpu_memory_bytes": str(3 * GIB)}
        await stage.load(replace(on_gpus(1, "cuda", "cpu"), options=options))
        [pending] = stage.catalog.pending()
        told = [(each.index, each.device, each.gpu_memory_bytes) for each in pending.processes]
        assert told == [(0, "cuda:0", 3 * GIB), (1, "cuda:1", 3 * GIB), (2, "cpu", 0)]
        instances = stage.catalog.find("echo").explain().instances
        assert [each.gpu_memory_bytes for each in instances] == [3 * GIB, 3 * GIB, 0]

    run(scenario)


def test_a_model_that_does_not_fit_is_not_started_and_the_others_are():
    async def scenario(stage):
        await stage.load(on_gpus(6, "cuda:0"), on_gpus(6, "cuda:0", name="other"))
        assert [model.config.name for model in stage.catalog] == ["echo"]
        [failure] = stage.catalog.failures
        assert failure.name == "other"
        assert "12.0 GiB of memory would be needed and 10.0 GiB can be had" in failure.problems[0]
        assert len(stage.puppets.alive) == 1

    run(scenario)


def test_a_reload_needs_room_for_both_versions_and_the_old_one_stays_without_it():
    async def scenario(stage):
        await stage.load(on_gpus(6, "cuda:0"))
        stage.gpus.used_bytes[0] = 6 * GIB
        await stage.load(on_gpus(5, "cuda:0", version="2"))
        assert "GPU 0" in stage.catalog.failure("echo").problems[0]
        assert stage.catalog.versions("echo") == ["1"]
        assert stage.catalog.find("echo").is_ready
        await stage.load(on_gpus(4, "cuda:0", version="2"))
        assert stage.catalog.versions("echo") == ["2"]
        assert stage.catalog.failure("echo") is None

    run(scenario)


def test_loads_at_the_same_time_do_not_get_the_same_memory():
    async def scenario(stage):
        stage.taken_bytes = 4 * GIB
        names = ["a", "b", "c"]
        loads = [
            stage.catalog.load(RepositoryScan([on_gpus(4, "cuda:0", name=name)])) for name in names
        ]
        await stage.act(asyncio.gather(*loads))
        assert len(list(stage.catalog)) == 2
        assert len(stage.catalog.failures) == 1
        # What was promised is given back: the driver tells what is taken.
        stage.gpus.used_bytes[0] = 0
        await stage.load(on_gpus(10, "cuda:0", name="d"))
        assert stage.catalog.find("d").is_ready

    run(scenario)


def test_what_is_loading_counts_once_whether_promised_or_taken():
    async def scenario(stage):
        stage.taken_bytes = 5 * GIB
        names = ["a", "b"]
        loads = [
            stage.catalog.load(RepositoryScan([on_gpus(5, "cuda:0", name=name)])) for name in names
        ]
        await stage.act(asyncio.gather(*loads))
        assert [model.config.name for model in stage.catalog] == names

    run(scenario)


def test_a_model_that_is_ready_has_its_memory_though_others_of_its_load_have_not():
    async def scenario(stage):
        stage.taken_bytes = 4 * GIB
        both = [on_gpus(3, "cuda:0", name=name) for name in ("a", "c")]
        loading = asyncio.ensure_future(stage.catalog.load(RepositoryScan(both)))
        await until(lambda: len(stage.puppets.alive) == 2)
        stage.gpus.used_bytes[0] = 3 * GIB
        quick = stage.puppets.alive[0]
        await until(lambda: step(quick) and len(list(stage.catalog)) == 1)
        later = asyncio.ensure_future(
            stage.catalog.load(RepositoryScan([on_gpus(4, "cuda:0", name="b")]))
        )
        await until(lambda: len(stage.puppets.alive) == 3)
        assert not loading.done()
        await stage.act(asyncio.gather(loading, later))
        assert sorted(model.config.name for model in stage.catalog) == ["a", "b", "c"]

    run(scenario)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """The garbage collector of a server may not look at a model that is unloaded for hours. pytest
    keeps what is logged, so nothing is."""
    gc.collect()
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


def holdings() -> tuple[int, int, int]:
    """Objects that the collector knows, mappings and descriptors of this process."""
    maps = Path("/proc/self/maps").read_text().count("\n")
    return len(gc.get_objects()), maps, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("config", [CONFIG, BROKEN], ids=["loads", "cannot be loaded"])
def test_cycles_of_unload_and_load_leave_nothing_behind(config):
    """With real workers, whose sockets, pidfds and segments count too."""

    async def main() -> None:
        catalog = Catalog()
        models: list[weakref.ref] = []
        counts = []
        for _ in range(6):
            await catalog.load(RepositoryScan([config]))
            models += [weakref.ref(model) for model in catalog]
            await catalog.unload("echo")
            while asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.sleep(0.01)
            counts.append(holdings())
        assert [model() for model in models] == [None] * len(models)
        assert bool(models) is (config is CONFIG)
        (first_objects, *first), (last_objects, *last) = counts[1], counts[-1]
        assert first == last, "mappings and descriptors"
        assert last_objects - first_objects < 40, "of four cycles"
        await catalog.close()

    with without_collector():
        asyncio.run(main())


def test_requests_count_whether_or_not_there_is_such_a_model(caplog):
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG)
        catalog.quotas.replace({b"team-a": Quota(requests_per_s=2)})
        for caller in (b"team-a", b"team-b"):
            catalog.count_request(caller, 0.0, "nobody")
            catalog.count_request(caller, 0.0, "echo", "1")
        for name in ("nobody", "echo"):
            with pytest.raises(QuotaExceeded, match="may send 2 requests/s"):
                catalog.count_request(b"team-a", 0.0, name)
        catalog.count_request(b"team-b", 0.0, "echo")
        catalog.count_request(b"team-a", 0.5, "echo")
        assert catalog.find("echo").metrics.num_refused["quota"] == 1

    run(scenario)
    assert "overloaded" not in caplog.text


def test_a_model_that_loads_is_not_ready_instead_of_unknown():
    async def scenario(stage):
        stage.catalog.announce(RepositoryScan([CONFIG]))
        with pytest.raises(NotReady, match="model 'echo' is loading"):
            stage.catalog.find("echo")
        with pytest.raises(NotFound, match="loaded: none"):
            stage.catalog.find("other")
        loading = asyncio.ensure_future(stage.catalog.load(RepositoryScan([CONFIG])))
        await settle()
        with pytest.raises(NotReady, match="model 'echo' is loading"):
            stage.catalog.find("echo", "1")
        await stage.act(loading)
        assert stage.catalog.find("echo").is_ready
        await stage.act(stage.catalog.unload("echo"))
        with pytest.raises(NotFound):
            stage.catalog.find("echo")

    run(scenario)


def test_a_closed_catalog_says_that_the_server_shuts_down():
    """A request at the end of a drain is refused; its model was not unknown."""

    async def scenario():
        catalog = Catalog()
        with pytest.raises(NotFound):
            catalog.find("echo")
        await catalog.close()
        with pytest.raises(NotReady, match="the server is shutting down"):
            catalog.find("echo")

    asyncio.run(scenario())


# A switch: load, commit, take over


V2 = replace(CONFIG, version="2")


class Ledger:
    """Counts commits; each waits until it may end, and then fails if it shall."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_begun = self.num_ended = 0
        self.may_end = asyncio.Event()
        self._error = error

    async def commit(self) -> None:
        self.num_begun += 1
        await self.may_end.wait()
        self.num_ended += 1
        if self._error is not None:
            raise self._error

    @staticmethod
    async def commit_at_once() -> None:
        pass


def test_a_switch_commits_when_the_new_version_is_ready_and_before_it_serves():
    async def scenario(stage):
        await stage.load(CONFIG)
        ledger = Ledger()
        switching = asyncio.ensure_future(
            stage.act(stage.catalog.switch(RepositoryScan([V2]), ledger.commit))
        )
        await until(lambda: ledger.num_begun)
        assert stage.catalog.versions("echo") == ["1"]
        assert stage.catalog.find("echo").is_ready
        ledger.may_end.set()
        await switching
        assert stage.catalog.versions("echo") == ["2"]
        assert ledger.num_ended == 1
        await until(lambda: len(stage.puppets.alive) == 1)

    run(scenario)


@pytest.mark.parametrize("cause", ["files", "worker", "commit"])
def test_a_switch_that_fails_changes_nothing(cause):
    async def scenario(stage):
        await stage.load(CONFIG)
        ledger = Ledger(NotReady("the disk is gone") if cause == "commit" else None)
        ledger.may_end.set()
        found = RepositoryScan([V2])
        if cause == "files":
            found = RepositoryScan([], {"echo": ["2/model.onnx: no such file"]})
        elif cause == "worker":
            found = RepositoryScan([replace(BROKEN, version="2")])
        expected = NotReady if cause == "commit" else ConfigError
        with pytest.raises(expected):
            await stage.act(stage.catalog.switch(found, ledger.commit))
        assert ledger.num_begun == (cause == "commit")
        assert stage.catalog.versions("echo") == ["1"]
        assert stage.catalog.is_ready and stage.catalog.failure("echo") is None
        await until(lambda: len(stage.puppets.alive) == 1)
        await stage.act(stage.catalog.switch(RepositoryScan([V2]), Ledger.commit_at_once))
        assert stage.catalog.versions("echo") == ["2"]

    run(scenario)


def test_a_switch_that_is_cancelled_before_its_commit_changes_nothing():
    async def scenario(stage):
        await stage.load(CONFIG)
        ledger = Ledger()
        switching = asyncio.ensure_future(stage.catalog.switch(RepositoryScan([V2]), ledger.commit))
        await until(lambda: len(stage.puppets.alive) == 2)
        switching.cancel()
        await asyncio.wait([switching])
        assert switching.cancelled() and ledger.num_begun == 0
        assert stage.catalog.versions("echo") == ["1"]
        await until(lambda: len(stage.puppets.alive) == 1)

    run(scenario)


@pytest.mark.parametrize("error", [None, NotReady("the disk is gone")])
def test_a_switch_that_is_cancelled_during_its_commit_ends_it(error, caplog):
    async def scenario(stage):
        await stage.load(CONFIG)
        ledger = Ledger(error)
        switching = asyncio.ensure_future(stage.catalog.switch(RepositoryScan([V2]), ledger.commit))
        while not ledger.num_begun:
            await stage.puppets.step_all()
            await asyncio.sleep(0)
        for _ in range(2):
            switching.cancel()
            await asyncio.sleep(0)
        assert not switching.done()
        ledger.may_end.set()
        while not switching.done():
            await stage.puppets.step_all()
            await asyncio.sleep(0)
        assert switching.cancelled() and ledger.num_ended == 1
        assert stage.catalog.versions("echo") == (["2"] if error is None else ["1"])
        assert ("the disk is gone" in caplog.text) == (error is not None)

    run(scenario)


# Rollouts


def split_rule(share: float, mode: str = "canary", rollout: int = 1) -> SplitRule:
    return SplitRule(rollout, mode, "2", share=share, header="v")


async def send(stage: Stage, value: int, headers: dict[bytes, bytes] | None = None) -> Request:
    """As a protocol does."""
    request = ask(value)
    model, split = stage.catalog.choose("echo", "", headers or {})
    if split is not None:
        split.watch(request, model)
    model.submit(request)
    return request


def test_a_candidate_is_loaded_beside_the_served_version():
    async def scenario(stage):
        await stage.load(CONFIG)
        await stage.act(stage.catalog.add_candidate(V2))
        catalog = stage.catalog
        assert catalog.find("echo").config.version == "1"
        assert catalog.versions("echo") == ["1"]
        assert [each.config.version for each in catalog] == ["1", "2"]
        with pytest.raises(NotFound, match="version 2 is a shadow"):
            catalog.find("echo", "2")
        assert await catalog.split("echo", split_rule(0.0, "shadow"))
        with pytest.raises(NotFound, match="version 2 is a shadow"):
            catalog.find("echo", "2")
        assert await catalog.split("echo", split_rule(1.0))
        assert catalog.find("echo", "2").config.version == "2"
        assert catalog.find("echo").config.version == "1"
        assert catalog.choose("echo", "", {})[0].config.version == "2"
        model, split = catalog.choose("echo", "1", {})
        assert (model.config.version, split) == ("1", None)
        await stage.act(catalog.drop_candidate("echo"))

    run(scenario)


def test_a_candidate_that_cannot_be_loaded_changes_nothing():
    async def scenario(stage):
        await stage.load(CONFIG)
        with pytest.raises(ConfigError, match="'soon' is not a number"):
            await stage.act(stage.catalog.add_candidate(replace(BROKEN, version="2")))
        assert [each.config.version for each in stage.catalog] == ["1"]
        assert stage.catalog.is_ready
        with pytest.raises(NotFound):
            await stage.act(stage.catalog.add_candidate(replace(CONFIG, name="other")))

    run(scenario)


def test_a_candidate_without_workers_does_not_make_the_server_unready():
    async def scenario(stage):
        await stage.load(CONFIG)
        await stage.act(stage.catalog.add_candidate(V2))
        await stage.catalog.split("echo", split_rule(1.0))
        stage.puppets.alive[1].kill()
        await settle()
        candidate = stage.catalog.find("echo", "2")
        assert not candidate.is_ready and stage.catalog.is_ready
        model, split = stage.catalog.choose("echo", "", {})
        assert model.config.version == "1"
        assert split.counts.num_fallbacks == 1
        await stage.puppets.step_all()

    run(scenario)


@pytest.mark.parametrize("promotes", [True, False])
def test_the_end_of_a_rollout_loses_nothing(promotes: bool):
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG)
        await stage.act(catalog.add_candidate(V2))
        await catalog.split("echo", split_rule(0.5))
        requests = [
            await send(stage, number, {b"v": (b"stable", b"candidate")[number % 2]})
            for number in range(10)
        ]
        promote = partial(catalog.promote_candidate, commit=Ledger.commit_at_once)
        await stage.act((promote if promotes else catalog.drop_candidate)("echo"))
        kept = "2" if promotes else "1"
        assert catalog.find("echo").config.version == kept
        assert catalog.versions("echo") == [kept]
        assert not catalog.splits and not catalog.rules
        later = await send(stage, 11)
        for _ in range(50):
            await stage.puppets.step_all()
        answers = [each.sink.inner.outputs[0]["y"][0, 0] for each in requests]
        assert answers == list(range(10))
        assert later.sink.outputs[0]["y"][0, 0] == 11
        assert len(stage.puppets.alive) == 1, "the other worker has left"

    run(scenario)


def test_counts_are_kept_while_the_share_rises():
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG)
        await stage.act(catalog.add_candidate(V2))
        for share in (0.05, 0.25):
            await catalog.split("echo", split_rule(share))
            request = await send(stage, 1, {b"v": b"candidate"})
            await stage.puppets.step_all()
            assert request.is_done
        assert catalog.splits["echo"].counts.candidate.num_requests == 2
        await stage.act(catalog.drop_candidate("echo"))

    run(scenario)


@pytest.mark.parametrize("is_unloaded", [True, False])
def test_a_load_or_unload_ends_a_rollout(is_unloaded: bool):
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG)
        await stage.act(catalog.add_candidate(V2))
        await catalog.split("echo", split_rule(0.5))
        if is_unloaded:
            await stage.act(catalog.unload("echo"))
        else:
            await stage.load(CONFIG)
        assert not await catalog.split("echo", split_rule(0.7))
        with pytest.raises(NotFound):
            await stage.act(catalog.promote_candidate("echo", Ledger.commit_at_once))
        for _ in range(50):
            await stage.puppets.step_all()
        assert len(stage.puppets.alive) == 1 - is_unloaded

    run(scenario)


def test_a_version_that_is_served_already_can_be_the_candidate_and_stays():
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG, replace(CONFIG, version="3"))
        await stage.act(catalog.add_candidate(CONFIG))
        await catalog.split("echo", SplitRule(1, "canary", "1", share=1.0))
        assert len(stage.puppets.alive) == 2
        assert [each.config.version for each in catalog] == ["1", "3"]
        assert catalog.choose("echo", "", {})[0].config.version == "1"
        await stage.act(catalog.drop_candidate("echo"))
        assert catalog.versions("echo") == ["1", "3"]
        await stage.puppets.step_all()
        assert len(stage.puppets.alive) == 2

    run(scenario)


def test_mirrors_are_not_counted_as_requests():
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG)
        await stage.act(catalog.add_candidate(V2))
        rule = split_rule(0.0, "shadow")
        rule.mirrored_per_s = 1e6
        await catalog.split("echo", rule)
        for number in range(5):
            await send(stage, number)
            await stage.puppets.step_all()
        counts = catalog.splits["echo"].counts
        assert (counts.num_mirrored, counts.num_compared, counts.num_disagreeing) == (5, 5, 0)
        stable, candidate = (each.metrics for each in catalog)
        assert (stable.num_success, candidate.num_success) == (5, 0)
        assert candidate.phases["request"].count == 0
        assert candidate.num_inferences == candidate.num_executions == 5
        stage.puppets.alive[1].kill()
        await settle()
        await stage.act(catalog.drop_candidate("echo"))
        assert sum(candidate.num_failures.values()) == 0

    run(scenario)


def test_a_promotion_that_cannot_be_committed_leaves_the_split_as_it_is():
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG)
        await stage.act(catalog.add_candidate(V2))
        await catalog.split("echo", split_rule(0.5))
        ledger = Ledger(NotReady("the disk is gone"))
        ledger.may_end.set()
        with pytest.raises(NotReady):
            await stage.act(catalog.promote_candidate("echo", ledger.commit))
        assert catalog.find("echo").config.version == "1"
        assert catalog.choose("echo", "2", {})[0].is_ready
        assert catalog.rules["echo"].share == 0.5

    run(scenario)


def test_a_served_version_that_is_promoted_stays_loaded_and_others_leave():
    async def scenario(stage):
        catalog = stage.catalog
        await stage.load(CONFIG, replace(CONFIG, version="3"))
        await stage.act(catalog.add_candidate(CONFIG))
        await catalog.split("echo", SplitRule(1, "canary", "1", share=0.5))
        await stage.act(catalog.promote_candidate("echo", Ledger.commit_at_once))
        assert catalog.versions("echo") == ["1"]
        await until(lambda: len(stage.puppets.alive) == 1 or any(map(step, stage.puppets.alive)))
        assert catalog.find("echo").is_ready

    run(scenario)
