"""Nothing that was found out is found out again, whenever the run was killed."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.optimizer.journal import FILE, Journal
from penstock.optimizer.workspace import WriteFailed


class Finding(msgspec.Struct):
    value: float
    by_size: dict[int, float] = {}


def never() -> Finding:
    raise AssertionError("it is known")


def test_what_is_known_is_not_computed_again(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        first = journal.remember("times", "a", Finding, lambda: Finding(1.5, {8: 0.25}))
        assert journal.remember("times", "a", Finding, never) == first
    with Journal(tmp_path) as journal:
        assert journal.remember("times", "a", Finding, never) == Finding(1.5, {8: 0.25})
        assert (journal.num_measured, journal.num_remembered) == (0, 1)


def test_what_is_asked_twice_was_remembered_once(tmp_path: Path) -> None:
    for expected in (0, 1):
        with Journal(tmp_path) as journal:
            for _ in range(3):
                journal.remember("a", "x", Finding, lambda: Finding(1))
            assert journal.num_remembered == expected


def test_a_failure_that_may_pass_is_not_kept(tmp_path: Path) -> None:
    def fail() -> Finding:
        raise BackendFailed("no port was free")

    with Journal(tmp_path) as journal:
        with pytest.raises(BackendFailed):
            journal.remember("served", "x", Finding, fail, passing=(PenstockError,))
        found = journal.remember(
            "served", "x", Finding, lambda: Finding(1), passing=(PenstockError,)
        )
        assert found.value == 1


def test_how_often_something_was_begun(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with Journal(tmp_path) as journal:
            assert journal.count("build begun", "x") == expected


def test_kind_and_key_both_matter(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for number, (kind, key) in enumerate([("a", "x"), ("a", "y"), ("b", "x")]):
            found = journal.remember(kind, key, Finding, lambda n=number: Finding(n))
            assert found.value == number


def test_what_is_not_finite_survives(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.remember("a", "x", Finding, lambda: Finding(float("inf")))
    with Journal(tmp_path) as journal:
        assert journal.remember("a", "x", Finding, never).value == float("inf")


def test_a_failure_is_a_finding(tmp_path: Path) -> None:
    def fail() -> Finding:
        raise BackendFailed("no kernel")

    for compute in (fail, never):
        with Journal(tmp_path) as journal, pytest.raises(BackendFailed, match="no kernel"):
            journal.remember("build", "x", Finding, compute)


def test_a_wrong_wish_is_not(tmp_path: Path) -> None:
    def refuse() -> Finding:
        raise ConfigError(["--eval: no such module"])

    with Journal(tmp_path) as journal:
        with pytest.raises(ConfigError):
            journal.remember("a", "x", Finding, refuse)
        assert journal.remember("a", "x", Finding, lambda: Finding(1)).value == 1


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.remember("a", "x", Finding, lambda: Finding(1))
    whole = (tmp_path / FILE).read_bytes()
    for end in range(len(whole)):
        (tmp_path / FILE).write_bytes(whole[:end])
        with Journal(tmp_path) as journal:
            assert journal.remember("a", "x", Finding, lambda: Finding(1)).value == 1
        assert (tmp_path / FILE).read_bytes().count(b"\n") == 2


def test_what_may_pass_is_no_finding(tmp_path: Path) -> None:
    class Passing(BackendFailed):
        pass

    def fail(kind: type[BackendFailed]) -> int:
        raise kind("it did not work")

    with Journal(tmp_path) as journal:
        for _ in range(2):
            with pytest.raises(Passing):
                journal.remember("a", "x", int, lambda: fail(Passing), passing=(Passing,))
        assert journal.remember("a", "x", int, lambda: 3, passing=(Passing,)) == 3
        with pytest.raises(BackendFailed):
            journal.remember("a", "y", int, lambda: fail(BackendFailed), passing=(Passing,))
        with pytest.raises(BackendFailed, match="it did not work"):
            journal.remember("a", "y", int, lambda: 3, passing=(Passing,))


def test_a_line_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("something else\n")
    with pytest.raises(ConfigError, match=f"{FILE}:1: not a line of a journal"):
        Journal(tmp_path)


def test_two_runs_cannot_write_to_one(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(ConfigError, match="another run is writing"):
        Journal(tmp_path)


def test_killed_while_writing(tmp_path: Path) -> None:
    """Whatever was handed out before SIGKILL is known afterwards."""
    code = textwrap.dedent("""
        import sys, pathlib
        from penstock.optimizer.journal import Journal
        with Journal(pathlib.Path(sys.argv[1])) as journal:
            for number in range(10**6):
                journal.remember("a", str(number), int, lambda: number)
                print(number, flush=True)
    """)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        last = [int(child.stdout.readline()) for _ in range(40)][-1]
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        with Journal(tmp_path) as journal:
            for number in range(last + 1):
                assert journal.remember("a", str(number), int, never) == number


def test_a_disturbed_value_serves_this_process_and_no_other(tmp_path: Path) -> None:
    def is_calm(found: Finding) -> bool:
        return found.value < 2

    with Journal(tmp_path) as journal:
        first = journal.remember("served", "a", Finding, lambda: Finding(3), is_reusable=is_calm)
        assert journal.remember("served", "a", Finding, never, is_reusable=is_calm) == first
    with Journal(tmp_path) as journal:
        again = journal.remember("served", "a", Finding, lambda: Finding(1), is_reusable=is_calm)
        assert again == Finding(1)
        assert (journal.num_measured, journal.num_remembered) == (1, 0)
    with Journal(tmp_path) as journal:
        assert journal.remember("served", "a", Finding, never, is_reusable=is_calm) == Finding(1)


def test_what_is_forgotten_is_measured_again(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for kind in ("served", "facts"):
            journal.remember(kind, "a", Finding, lambda: Finding(1))
        journal.forget(["served"])
        assert journal.remember("served", "a", Finding, lambda: Finding(2)) == Finding(2)
        journal.forget(["served"])
    with Journal(tmp_path) as journal:
        assert journal.remember("served", "a", Finding, lambda: Finding(3)) == Finding(3)
        assert journal.remember("facts", "a", Finding, never) == Finding(1)


def test_a_fresh_journal_knows_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.remember("facts", "a", Finding, lambda: Finding(1))
    with Journal(tmp_path, is_fresh=True) as journal:
        assert journal.remember("facts", "a", Finding, lambda: Finding(2)) == Finding(2)
    with Journal(tmp_path) as journal:
        assert journal.remember("facts", "a", Finding, never) == Finding(2)


@pytest.mark.parametrize(("speed_s", "is_kept"), [(0.011, True), (0.02, False), (0.005, False)])
def test_timings_of_another_machine_speed_are_discarded(
    tmp_path: Path, speed_s: float, is_kept: bool
) -> None:
    with Journal(tmp_path, speed_s=0.01) as journal:
        for kind in ("times", "served", "facts"):
            journal.remember(kind, "a", Finding, lambda: Finding(1))
    with Journal(tmp_path, speed_s=speed_s) as journal:
        assert journal.num_discarded == (0 if is_kept else 2)
        found = journal.remember("times", "a", Finding, lambda: Finding(2))
        assert found == Finding(1 if is_kept else 2)
        assert journal.remember("facts", "a", Finding, never) == Finding(1)


def test_when_the_oldest_reused_finding_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at, key in ((100.0, "a"), (200.0, "b")):
        monkeypatch.setattr("time.time", lambda at=at: at)
        with Journal(tmp_path) as journal:
            journal.remember("facts", key, Finding, lambda: Finding(1))
            assert journal.oldest_at is None
    with Journal(tmp_path) as journal:
        journal.remember("facts", "b", Finding, never)
        assert journal.oldest_at == 200.0
        journal.remember("facts", "a", Finding, never)
        assert journal.oldest_at == 100.0


def test_a_line_that_cannot_be_written_is_told_and_leaves_the_others_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path) as journal:
        journal.remember("times", "a", Finding, lambda: Finding(1))
        before = (tmp_path / FILE).read_bytes()

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(WriteFailed, match="No space left on device") as caught:
                journal.remember("times", "b", Finding, lambda: Finding(2))
    assert "run the same command again" in str(caught.value)
    assert (tmp_path / FILE).read_bytes() == before
    with Journal(tmp_path) as journal:
        assert journal.remember("times", "a", Finding, never).value == 1
        assert journal.remember("times", "b", Finding, lambda: Finding(3)).value == 3
