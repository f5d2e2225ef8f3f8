"""`penstock repo` as its users meet it: a folder or a running server, in words and as JSON."""

import json
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from committed_versions import add_version, evidence
from e2e.served import Served
from prefix_proxy import mounted

import penstock
from penstock.cli import main
from penstock.errors import CommandLineError, ConfigError, NotFound
from penstock.optimizer.this_machine import read_machine
from penstock.repository import history, layout, versions
from penstock.system.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--model-control-mode", "explicit", "--load-model", "*")


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        lines = self.stderr.splitlines()
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


def call(*arguments: str | Path, key: str = "") -> Ended:
    environment = {"COLUMNS": "160", "PENSTOCK_API_KEY": key}
    done = CliRunner(env=environment).invoke(main, ["repo", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Ended(done.exit_code, done.stdout, done.stderr)


def ok(*arguments: str | Path, key: str = "") -> str:
    done = call(*arguments, key=key)
    assert done.code == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def answer(*arguments: str | Path) -> Any:
    return json.loads(ok(*arguments, "--json", "-"))


def made_here(p99_s: float = 0.012, **changes: object) -> dict[str, Any]:
    machine = msgspec.to_builtins(read_machine())
    software = machine.pop("versions")
    return evidence(p99_s, **{"hardware": machine, "versions": software, **changes})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Version 1 is served, 2 is twice as fast, 3 has no evidence for this machine."""
    root = tmp_path / "models"
    add_version(root, made=made_here())
    versions.promote(root, "model", "1")
    add_version(root, b"other", made=made_here(0.006))
    add_version(root, made=evidence(0.001))
    return root


@pytest.fixture
def served(root: Path) -> Iterator[Served]:
    with Served(root, *FLAGS) as server:
        yield server


@pytest.fixture(params=["folder", "server"])
def source(request: pytest.FixtureRequest, root: Path) -> str:
    """What REPOSITORY may be."""
    if request.param == "folder":
        return str(root)
    return f"http://{request.getfixturevalue('served').address}"


def on_disk(root: Path) -> list[str]:
    return versions.served_versions(root / "model")


def test_versions_are_listed(source: str) -> None:
    head, *lines = ok("list", source).splitlines()
    assert head.split()[:4] == ["model", "version", "state", "outcome"]
    assert re.match(r"model +1 +served +kept +p99 < 20ms at 200/s poisson +12.0 ms", lines[0])
    assert "166/s" in lines[0] or "167/s" in lines[0]
    assert " 0.910 " in lines[0]
    rows = answer("list", source)
    assert [(row["model"], row["version"], row["is_served"]) for row in rows] == [
        ("model", "1", True),
        ("model", "2", False),
        ("model", "3", False),
    ]
    assert [row["is_loaded"] for row in rows] == ["http" in source, False, False]


def test_two_versions_are_compared(source: str) -> None:
    text = ok("diff", source, "model", "1", "2")
    assert re.search(r"^p99 +12.0 ms +6.00 ms +0.500x$", text, re.M)
    assert re.search(r"^weights +changed +7.00 B +5.00 B$", text, re.M)
    assert "steps of 1: int8(granularity=tensor) → fold" in text
    diff = answer("diff", source, "model", "1", "3")
    assert diff["notes"][0].startswith("hardware differs: ")


def test_a_version_is_promoted_and_rolled_back(source: str, root: Path) -> None:
    live = "serves now" if "http" in source else "is served from the next start or load on"
    text = ok("promote", source, "model", "2", "--reason", "twice as fast")
    assert text == f"model: version 2 {live}; before: 1\n"
    assert on_disk(root) == ["2"]
    text = ok("history", source, "model")
    last = text.splitlines()[-1]
    assert re.search(r"promoted +2 +1 +\S+ +twice as fast$", last)
    event = answer("rollback", source, "model", "--reason", "slow")
    assert (event["kind"], event["version"], event["reason"]) == ("rolled back", "1", "slow")
    assert on_disk(root) == ["1"]
    done = call("rollback", source, "model")
    assert done.code == ExitCode.FAILED and "no version that was served before 1" in done.errors[0]


def test_other_hardware_is_refused_unless_it_is_forced(source: str, root: Path) -> None:
    done = call("promote", source, "model", "3")
    assert done.code == ExitCode.FAILED
    assert "its evidence is from other hardware: CPU EPYC" in done.stderr
    assert "--force REASON" in done.stderr and on_disk(root) == ["1"]
    text = ok("promote", source, "model", "3", "--force", "a test")
    assert "forced: its evidence is from other hardware" in text
    assert "warning: onnx is " in text
    event = answer("history", source, "model")[-1]
    assert (event["kind"], event["figures"]["force"]) == ("forced", "a test")
    assert on_disk(root) == ["3"]


def test_versions_are_verified(source: str, root: Path) -> None:
    text = ok("verify", source)
    assert re.findall(r"whole|damaged", text) == ["whole"] * 3
    (root / "model" / "2" / "weights").write_bytes(b"OTHER")
    done = call("verify", source, "model")
    assert done.code == ExitCode.FAILED
    assert "model: 2/weights: differs from what was committed" in done.stdout
    done = call("verify", source, "model", "--json", "-")
    assert done.code == ExitCode.FAILED
    assert [row["state"] for row in json.loads(done.stdout)] == ["whole", "damaged", "whole"]


def test_old_versions_are_removed(source: str, root: Path) -> None:
    text = ok("prune", source, "model", "--keep", "1", "--dry-run")
    assert text.splitlines()[0].startswith("model: would be removed: 2 (")
    assert "  kept 3: the newest" in text
    assert len(layout.version_folders(root / "model")) == 3
    text = ok("prune", source, "model", "--keep", "1")
    assert text.splitlines()[0].startswith("model: removed: 2 (")
    assert layout.version_folders(root / "model") == ["1", "3"]
    assert "nothing to remove" in ok("prune", source, "model", "--keep", "1")
    assert answer("history", source, "model")[-1]["kind"] == "pruned"


ABSENT = (
    "history other",
    "diff other 1 2",
    "promote other 1",
    "rollback ../models/model",
    "verify ..",
    "prune other --keep 1",
    "promote model 0",
    "promote model ../model/2",
    "diff model 1 9",
    "diff model 1 ''",
)


def test_names_that_are_not_there_are_failures(source: str, root: Path) -> None:
    for arguments in map(shlex.split, ABSENT):
        command, *rest = arguments
        done = call(command, source, *rest)
        assert done.code == ExitCode.FAILED, (arguments, done.stdout)
        assert len(done.errors) == 1 and "Traceback" not in done.stderr, arguments
    assert on_disk(root) == ["1"]


def test_json_goes_to_a_file_beside_the_table(root: Path, tmp_path: Path) -> None:
    assert "model" in ok("list", root, "--json", tmp_path / "list.json")
    assert len(json.loads((tmp_path / "list.json").read_text())) == 3


def test_the_current_folder_is_the_default(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert len(answer("list")) == 3


def test_a_server_may_be_mounted_below_a_prefix(served: Served):
    with mounted(served.address, "/models") as url:
        assert [row["version"] for row in answer("list", url)] == ["1", "2", "3"]
        assert answer("history", f"{url}/", "model") == answer(
            "history", f"http://{served.address}", "model"
        )


# What REPOSITORY is not


@pytest.mark.parametrize(
    "repository, code, text",
    [
        ("nowhere", 1, "no such folder; expected a model repository"),
        ("models/model", 1, "is a model's folder; give its repository, "),
        ("models/model/1", 1, "is a version of a model; give its repository, "),
        ("http://127.0.0.1:1", 1, "the server cannot be reached: "),
        ("http://127.0.0.1:1/v2/models/model", 64, "names a model; give the server"),
        ("grpc://127.0.0.1:1", 64, "versions are managed over HTTP"),
        ("http://", 64, "expected http://host:port"),
        ("http://me:secret@127.0.0.1:1", 64, "the URL has a user or password"),
        ("ftp://host", 64, "expected http://host:port"),
        ("http://127.0.0.1:1/v1", 64, "unknown path; expected http://host:port[/PREFIX]/v2"),
    ],
)
@pytest.mark.parametrize("command", [["list"], ["promote", "model", "2"], ["verify"]])
def test_what_is_no_repository_is_told_what_to_give(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    repository: str,
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(root.parent)
    name, *rest = command
    done = call(name, repository, *rest)
    assert done.code == code and text in done.errors[0], done.stderr
    assert "secret" not in done.stderr


def test_a_port_that_speaks_something_else(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]

        def answer_once() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer_once)
        thread.start()
        done = call("history", f"http://127.0.0.1:{port}", "model")
        thread.join()
    assert done.code == 1 and "speaks no HTTP" in done.errors[0]


def test_a_key_without_the_scope_is_refused_with_what_is_needed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(
        '[[key]]\nname = "ada"\nsecret = "for-the-operator"\nscopes = ["admin"]\n'
        '[[key]]\nname = "app"\nsecret = "only-for-inference"\nscopes = ["infer"]\n'
    )
    with Served(root, *FLAGS, "--api-keys", str(tmp_path / "keys.toml")) as server:
        url = f"http://{server.address}"
        for command in (["list"], ["promote", "model", "2"], ["prune", "model", "--keep", "1"]):
            name, *rest = command
            done = call(name, url, *rest)
            assert "scope 'admin' by --api-key or PENSTOCK_API_KEY" in done.errors[0]
            done = call(name, url, *rest, "--api-key", "only-for-inference")
            assert "the API key has no scope 'admin'" in done.errors[0]
            assert "only-for-inference" not in done.stderr
        assert on_disk(root) == ["1"]
        assert "serves now" in ok("promote", url, "model", "2", key="for-the-operator")
        assert history.read(root / "model")[-1].actor == "ada"


def test_a_server_without_explicit_mode_says_how_to_start_it(root: Path) -> None:
    with Served(root) as server:
        done = call("promote", f"http://{server.address}", "model", "2")
    assert done.code == 1 and "--model-control-mode explicit" in done.errors[0]


# Rollouts


def test_a_rollout_needs_a_server(root: Path) -> None:
    for flags in (["--canary", "5%"], ["--shadow"], ["--canary", "5%", "--steps", "5%,25%"]):
        done = call("promote", root, "model", "2", *flags)
        assert done.code == ExitCode.USAGE
        assert "a rollout needs a running server; give the server's URL" in done.errors[0]
    assert on_disk(root) == ["1"]


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--canary", "fast"], "--canary 'fast' is not a share such as 5%"),
        (["--canary", "5"], "--canary '5' is not a share"),
        (["--canary", "0%"], "--canary '0%' is not a share"),
        (["--canary", "101%"], "--canary '101%' is not a share"),
        (["--canary", "5%", "--steps", "5%,x"], "--steps 'x' is not a share"),
        (["--canary", "5%", "--steps", "50%,25%"], "each share must exceed the one before"),
        (["--steps", "5%"], "--steps: only with --canary or --shadow"),
        (["--header", "X-A"], "--header: only with --canary or --shadow"),
        (["--canary", "5%", "--agreement", "0.9"], "--agreement '0.9' is not a share"),
    ],
)
def test_wrong_rollouts_are_wrong_usage(flags: list[str], text: str) -> None:
    done = call("promote", "http://127.0.0.1:1", "model", "2", *flags)
    assert done.code == ExitCode.USAGE and text in done.errors[0], done.stderr


def test_a_rollout_is_started_shown_and_stopped(root: Path, served: Served) -> None:
    url = f"http://{served.address}"
    assert call("rollout", url, "model").errors == [
        f"{url}: model: no rollout since the server started"
    ]
    text = ok("promote", url, "model", "2", "--canary", "20%", "--step-s", "5")
    assert "model: version 2: canary started: " in text
    state = answer("rollout", url, "model")
    assert (state["decision"], state["share"], state["candidate"]) == ("running", 0.2, "2")
    text = ok("rollout", url, "model")
    assert "model: canary of version 2 beside 1: running" in text
    assert "share of the requests: 20 %; steps: 20 %, 25 %, 50 %, 100 %" in text
    told = ok("rollback", url, "model", "--rollout-only", "--reason", "enough")
    assert "rollout stopped" in told
    assert "stopped" in ok("rollout", url, "model")
    done = call("rollback", url, "model", "--rollout-only")
    assert done.code == ExitCode.FAILED
    assert "model: no rollout is running; that of version 2 was stopped" in done.errors[0]
    assert on_disk(root) == ["1"]
    done = call("rollback", root, "model", "--rollout-only")
    assert done.code == ExitCode.USAGE and "needs a running server" in done.errors[0]
    done = call("rollout", root, "model")
    assert done.code == ExitCode.USAGE
    assert "a rollout needs a running server" in done.errors[0]


# Commands and functions


def test_a_wrong_command_gets_the_right_one(root: Path) -> None:
    assert "did you mean: penstock repo list" in call("lst").stderr
    assert f"such as: penstock repo list {root}" in call(root).stderr
    done = call("promote", root, "model")
    assert done.code == ExitCode.USAGE
    assert "VERSION is required, e.g. penstock repo promote models digits 2" in done.stderr


def test_a_file_has_no_versions(tmp_path: Path, write_identity: Any) -> None:
    file = write_identity(tmp_path / "model.onnx")
    done = call("list", file)
    assert done.code == 1 and "is an ONNX file, which has no versions" in done.errors[0]


def test_an_empty_folder_has_no_versions(tmp_path: Path) -> None:
    assert ok("list", tmp_path) == "no versions\n"


def test_models_by_themselves_are_listed_without_versions(root: Path) -> None:
    (root / "llama.gguf").write_bytes(b"GGUF")
    assert re.search(r"^llama +- +served", ok("list", root), re.M)
    assert [row["state"] for row in answer("verify", root)] == ["not committed", *["whole"] * 3]
    done = call("promote", root, "llama", "1")
    assert done.code == 1 and "has no versions" in done.errors[0]


def test_a_damaged_model_does_not_hide_the_others(root: Path) -> None:
    (root / "other" / "1").mkdir(parents=True)
    (root / "other" / "config.pbtxt").write_text("{{{")
    text = ok("list", root)
    assert re.search(r"^model +1 +served", text, re.M) and "other: config.pbtxt" in text


def test_what_terminals_would_interpret_is_not_printed(root: Path) -> None:
    ok("promote", root, "model", "2", "--reason", "\x1b[31mred\x07")
    text = ok("history", root, "model")
    assert "\x1b" not in text and "red" in text


def test_functions_return_values_that_print(root: Path) -> None:
    found = penstock.repo.list(root)
    assert [row.version for row in found.value] == ["1", "2", "3"]
    assert "12.0 ms" in str(found) and "12.0 ms" in found._repr_html_()
    assert penstock.repo.diff(root, "model", 1, 2).value.figures
    event = penstock.repo.promote(root, "model", 2, reason="twice as fast").value
    assert (event.version, event.reason) == ("2", "twice as fast")
    assert penstock.repo.rollback(root, "model").value.version == "1"
    assert len(penstock.repo.history(root, "model").value) == 3
    assert penstock.repo.prune(root, "model", 1, dry_run=True).value.removed == ["2"]
    assert {row.state for row in penstock.repo.verify(root).value} == {"whole"}


def test_functions_raise_what_is_wrong(root: Path) -> None:
    with pytest.raises(ConfigError, match="from other hardware"):
        penstock.repo.promote(root, "model", 3)
    with pytest.raises(NotFound):
        penstock.repo.history(root, "other")
    with pytest.raises(CommandLineError, match="at least 1"):
        penstock.repo.prune(root, "model", 0)
    with pytest.raises(TypeError, match="unknown option forse; did you mean force"):
        penstock.repo.promote(root, "model", 3, forse="x")  # type: ignore[call-arg]


# The documentation


def documented() -> list[list[str]]:
    """The `penstock repo` commands of docs/operate.md, in their order."""
    text = (ROOT / "docs" / "operate.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("penstock repo ")]


def test_the_commands_of_the_documentation_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, in a folder with a repository `models` and a server of it."""
    root = tmp_path / "models"
    for p99_s in (0.012, 0.006, 0.003):
        add_version(root, made=made_here(p99_s), name="digits")
    versions.promote(root, "digits", "1")
    monkeypatch.chdir(tmp_path)
    commands = documented()
    assert {command[0] for command in commands} == set(main.commands["repo"].commands)
    with Served(root, *FLAGS) as server:
        for command in commands:
            address = f"http://{server.address}"
            ok(*(word.replace("http://127.0.0.1:8000", address) for word in command))
