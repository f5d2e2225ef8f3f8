"""The actions on versions, as the management API has them: what is served is what the disk says."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from committed_versions import add_version, evidence

from penstock.errors import InvalidRequest, NotAllowed, NotFound, NotReady
from penstock.operate import promotion
from penstock.operate.rollouts import Rollouts
from penstock.operate.version_actions import ACTIONS, VersionActions
from penstock.optimizer.this_machine import read_machine
from penstock.repository import history, layout, versions
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.serving.supervisor import ThreadLife


def here() -> dict[str, Any]:
    return evidence(hardware=msgspec.to_builtins(read_machine()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Version 1 is served, 2 is good, 3 has evidence from elsewhere."""
    root = tmp_path / "models"
    add_version(root, made=here())
    versions.promote(root, "model", "1")
    add_version(root, made=here())
    add_version(root)
    return root


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **options: object) -> None:
        asyncio.run(test(*args, **options))

    return run


@asynccontextmanager
async def managed(
    path: Path, is_explicit: bool = True, *others: Path
) -> AsyncIterator[ManagementApi]:
    """A server of this repository and of others."""
    catalog = Catalog(ThreadLife)
    control = Control(catalog, str(path), is_explicit, others=tuple(map(str, others)))
    await catalog.load(control.sources.read())
    management = ManagementApi(catalog, control, Lifecycle())
    names = {b"k": "ada", b"": "anonymous"}
    rollouts = Rollouts(catalog, management.control)
    management.add(VersionActions(management, names.__getitem__, rollouts).answers)
    try:
        yield management
    finally:
        await catalog.close()


async def ask(management: ManagementApi, action: str, **parameters: Any) -> Any:
    name = parameters.pop("name", "model")
    call = ManagementCall(action, name, parameters=parameters, caller=b"k")
    return msgspec.json.decode(await management.answer(call))


def loaded(management: ManagementApi) -> list[str]:
    return management.catalog.versions("model")


def on_disk(root: Path) -> list[str]:
    return versions.served_versions(root / "model")


@in_loop
async def test_a_promotion_and_its_rollback_are_served_and_on_disk(root: Path) -> None:
    async with managed(root) as management:
        assert set(ACTIONS) <= set(management.actions)
        event = await ask(management, "promote", version="2", reason="faster")
        assert (event["kind"], event["actor"], event["reason"]) == ("promoted", "ada", "faster")
        assert loaded(management) == on_disk(root) == ["2"]
        event = await ask(management, "rollback", reason="slow")
        assert (event["kind"], event["version"], event["previous"]) == ("rolled back", "1", ["2"])
        assert loaded(management) == on_disk(root) == ["1"]
        assert (await ask(management, "history"))[-1] == event
        with pytest.raises(InvalidRequest, match="no version that was served before 1"):
            await ask(management, "rollback")


@in_loop
async def test_a_model_of_another_repository_is_changed_there(root: Path, tmp_path: Path) -> None:
    add_version(tmp_path / "first", made=here(), name="other")
    async with managed(tmp_path / "first", True, root) as management:
        await ask(management, "promote", version="2")
        assert loaded(management) == on_disk(root) == ["2"]
        assert [each["kind"] for each in await ask(management, "history")] == ["promoted"] * 2
        pruned = await ask(management, "prune", keep=1)
        assert "2" in pruned["kept"] and not (tmp_path / "first" / "model").exists()
        assert (await ask(management, "rollback"))["version"] == "1"


@in_loop
async def test_the_evidence_gate_applies_and_force_overrides_it(root: Path) -> None:
    async with managed(root) as management:
        with pytest.raises(InvalidRequest, match="from other hardware: CPU EPYC"):
            await ask(management, "promote", version="3")
        assert loaded(management) == on_disk(root) == ["1"]
        event = await ask(management, "promote", version="3", force="a test")
        assert (event["kind"], event["figures"]["force"]) == ("forced", "a test")
        assert loaded(management) == on_disk(root) == ["3"]


@in_loop
async def test_a_version_that_does_not_load_leaves_disk_and_server(root: Path) -> None:
    text = (root / "model" / "config.pbtxt").read_text()
    bad = root / "model" / "2" / "weights"
    bad.write_bytes(b"Weights")
    async with managed(root) as management:
        with pytest.raises(InvalidRequest, match="failed to load 'model/2'"):
            await ask(management, "promote", version="2")
        assert loaded(management) == on_disk(root) == ["1"]
        assert (root / "model" / "config.pbtxt").read_text() == text
        last = history.read(root / "model")[-1]
        assert (last.kind, last.version, last.previous, last.actor) == (
            "failed",
            "2",
            ("1",),
            "ada",
        )
        assert "differs from what was committed" in last.reason
        assert management.catalog.is_ready
        bad.write_bytes(b"weights")
        await ask(management, "promote", version="2")
        assert loaded(management) == on_disk(root) == ["2"]


@in_loop
async def test_a_disk_that_cannot_be_written_leaves_the_server(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: promotion.Change) -> None:
        raise promotion.cannot_write(self.root, self.name, OSError(30, "Read-only file system"))

    async with managed(root) as management:
        monkeypatch.setattr(promotion.Change, "apply", refuse)
        with pytest.raises(InvalidRequest, match="Read-only file system"):
            await ask(management, "promote", version="2")
        assert loaded(management) == on_disk(root) == ["1"]
        assert len(history.read(root / "model")) == 1, "it could be loaded"


@in_loop
async def test_an_unloaded_model_is_loaded_by_its_promotion(root: Path) -> None:
    async with managed(root) as management:
        await management.catalog.unload("model")
        await ask(management, "promote", version="2")
        assert loaded(management) == ["2"]


@in_loop
async def test_changes_at_once_come_one_after_the_other(root: Path) -> None:
    async with managed(root) as management:
        calls: list[Coroutine[Any, Any, Any]] = []
        for _ in range(4):
            calls += [ask(management, "promote", version=version) for version in "12"]
            calls.append(management.control.load("model"))
        await asyncio.gather(*calls)
        assert loaded(management) == on_disk(root)
        events = history.read(root / "model")
        assert len(events) == 9
        for before, after in zip(events, events[1:], strict=False):
            assert after.previous == (before.version,)
        assert loaded(management) == [events[-1].version]


@in_loop
async def test_versions_are_listed_compared_verified_and_pruned(root: Path) -> None:
    async with managed(root) as management:
        rows = await ask(management, "versions")
        assert [row["is_loaded"] for row in rows] == [True, False, False]
        diff = await ask(management, "diff", a="1", b="3")
        assert diff["notes"][0].startswith("hardware differs")
        assert {row["state"] for row in await ask(management, "verify")} == {"whole"}
        planned = await ask(management, "prune", keep=1, dry_run=True)
        assert (planned["removed"], planned["kept"]["1"]) == (["2"], "served, loaded by a server")
        assert (await ask(management, "prune", keep=1))["removed"] == ["2"]
        assert layout.version_folders(root / "model") == ["1", "3"]


CHANGES = [("promote", {"version": "2"}), ("rollback", {}), ("prune", {"keep": 1})]


@pytest.mark.parametrize("action, parameters", CHANGES)
@in_loop
async def test_changes_need_explicit_mode_and_a_server_that_stays(
    root: Path, action: str, parameters: dict[str, Any]
) -> None:
    async with managed(root, is_explicit=False) as management:
        with pytest.raises(NotAllowed, match="--model-control-mode explicit"):
            await ask(management, action, **parameters)
    async with managed(root) as management:
        management.lifecycle.is_loading = True
        with pytest.raises(NotReady, match="models are loading"):
            await ask(management, action, **parameters)
        management.lifecycle.drain()
        with pytest.raises(NotReady, match="shutting down"):
            await ask(management, action, **parameters)
    assert len(history.read(root / "model")) == 1


@in_loop
async def test_names_that_are_not_there_are_not_found(root: Path) -> None:
    async with managed(root) as management:
        for action, parameters in (*CHANGES, ("versions", {}), ("history", {}), ("verify", {})):
            with pytest.raises(NotFound, match="'other' is not in"):
                await ask(management, action, name="other", **parameters)
        for version in ("0", "9", "../model/2"):
            with pytest.raises(NotFound, match="there: 1, 2, 3"):
                await ask(management, "promote", version=version)


@pytest.mark.parametrize("field", ["step_s", "mirrored_per_s"])
@in_loop
async def test_a_zero_is_no_promotion_at_once(root: Path, field: str) -> None:
    """It must mean neither the default nor a promotion of all requests."""
    async with managed(root) as management:
        with pytest.raises(InvalidRequest, match=f"{field}: 0.0; expected a number above zero"):
            await ask(management, "promote", version="2", **{field: 0.0})
    assert len(history.read(root / "model")) == 1


@pytest.mark.parametrize(
    "field, value", [("canary", "5%"), ("shadow", True), ("steps", "5%"), ("header", "X-A")]
)
@in_loop
async def test_a_rollout_is_started_shown_and_stopped_by_a_rollback(
    root: Path, field: str, value: object
) -> None:
    async with managed(root) as management:
        with pytest.raises(NotFound, match="no rollout since the server started"):
            await ask(management, "rollout")
        event = await ask(management, "promote", version="2", reason="try", **{field: value})
        is_shadow = field == "shadow"
        assert event["kind"] == ("shadow started" if is_shadow else "canary started")
        assert (event["actor"], event["version"], event["previous"]) == ("ada", "2", ["1"])
        assert loaded(management) == ["1"]
        rows = await ask(management, "versions")
        assert [row["is_loaded"] for row in rows] == [True, True, False]
        state = await ask(management, "rollout")
        assert (state["decision"], state["candidate"]) == ("running", "2")
        assert state["share"] == (0 if is_shadow else 0.05)
        with pytest.raises(InvalidRequest, match="a rollout is running"):
            await ask(management, "promote", version="2")
        event = await ask(management, "rollback", reason="enough")
        assert event["kind"] == "rollout stopped"
        assert (await ask(management, "rollout"))["decision"] == "stopped"
        assert [each["kind"] for each in await ask(management, "history")][-1:] == [
            "rollout stopped"
        ]
        await ask(management, "promote", version="2")
        assert loaded(management) == ["2"]


@in_loop
async def test_a_rollback_of_rollouts_only_leaves_the_stable_version_alone(root: Path) -> None:
    """The rollout may have ended by itself a moment ago."""
    async with managed(root) as management:
        await ask(management, "promote", version="2")
        with pytest.raises(NotFound, match="no rollout is running"):
            await ask(management, "rollback", rollout_only=True)
        await ask(management, "promote", version="1", canary="5%")
        event = await ask(management, "rollback", rollout_only=True)
        assert event["kind"] == "rollout stopped"
        with pytest.raises(NotFound, match="that of version 1 was stopped"):
            await ask(management, "rollback", rollout_only=True)
        assert loaded(management) == on_disk(root) == ["2"]


@in_loop
async def test_a_model_by_itself_has_no_repository(root: Path) -> None:
    async with managed(root / "model") as management:
        with pytest.raises(InvalidRequest, match=f"give its repository, {root}"):
            await ask(management, "promote", version="2")
