"""Penstock and Triton in turns: what is asked, where it goes on, where it ends. Runs are fake."""

import argparse
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
SHARES = (0.80, 0.85, 0.90, 0.95, 1.00, 1.05)
PORTS = {"penstock": 1001, "triton": 1002}
# A second: rates that are kept, by model.
CAPACITY = {"penstock": 1000.0, "x1_0us": 600.0, "x2_0us": 900.0, "x2_2000us": 850.0}
TURN_S = 4.0
PROBES_S = 8 * TURN_S


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import beside_triton
    import rate_ladder

    for module in (beside_triton, rate_ladder):
        monkeypatch.setattr(module, "SHARES", SHARES)
    return beside_triton


class Servers:
    """In place of `bench`: what servers of these capacities would have answered."""

    def __init__(self, beside, folder: Path) -> None:
        self.beside = beside
        self.folder = folder
        self.capacity = dict(CAPACITY)
        self.elapsed_s = 0.0
        self.asked: list[tuple[str, str, int]] = []
        # Ways that measure nothing.
        self.broken: set[str] = set()

    def comparison(self, **given):
        wishes = {"device": "cpu", "tiny": True, "shards": 1, "generators": 1, "rounds": 2}
        wishes |= {"limit_s": 1e6, "again": False, "work": self.folder}
        args = argparse.Namespace(**wishes | {"out": self.folder / "found.json"} | given)
        self.elapsed_s = 0.0
        self.asked = []
        comparison = self.beside.Comparison(args, lambda: self.elapsed_s)
        comparison.bench = self.bench
        for name, port in PORTS.items():
            log = self.folder / f"{name}.log"
            log.write_text("a line\n")
            comparison.servers[name] = self.beside.Server(name, [], port, log)
        return comparison

    def bench(self, address: str, flags, expected_s: float, seed: int = 0):
        self.elapsed_s += TURN_S
        model = address.rpartition("/")[2]
        way = model.partition("_")[2] or "penstock"
        self.asked.append((model, " ".join(flags[:2]), seed))
        if way in self.broken:
            return None
        capacity = self.capacity[way]
        if flags[0] == "--concurrency":
            return figures(capacity, 10.0)
        rate = float(flags[1])
        # Just above it requests wait a little too long, far above it for seconds.
        p99_ms = 50.0 if rate <= capacity else 200.0 if rate < 1.07 * capacity else 2000.0
        return figures(rate, p99_ms)


def figures(per_s: float, p99_ms: float) -> dict:
    return {"per_s": per_s, "p99_ms": p99_ms, "rows_per_batch": 4.0, "num_failed": 0}


def measured(comparison) -> dict:
    comparison.probe()
    comparison.climb()
    return comparison.found


@pytest.fixture
def servers(beside, tmp_path: Path) -> Servers:
    return Servers(beside, tmp_path)


def turns(found: dict) -> list[tuple[int, str, float, str]]:
    return [(each["round"], each["size"], each["share"], each["side"]) for each in found["levels"]]


def text_of(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_both_are_asked_at_shares_of_the_better_closed_loop(servers: Servers) -> None:
    found = measured(servers.comparison())
    for size in ("small", "large"):
        assert found["ladders"][size]["variant"] == "2 instances"
        for share in (0.80, 0.85, 0.90):
            seen = [
                each for each in found["levels"] if (each["size"], each["share"]) == (size, share)
            ]
            assert len(seen) == 4
            assert {each["rate"] for each in seen} == {1000.0 * share}
    rated = [each for each in servers.asked if each[1].startswith("--rate")]
    # The way of Triton that answered most, and the same arrivals as Penstock in that round.
    assert {model for model, _, _ in rated} == {"small", "large", "small_x2_0us", "large_x2_0us"}
    assert len({seed for model, rate, seed in rated if rate == "--rate 800"}) == 2
    assert len({(model, rate, seed) for model, rate, seed in rated}) == len(rated)


def test_the_table_tells_closed_loops_and_what_was_kept(beside, servers: Servers) -> None:
    comparison = servers.comparison()
    text = text_of(beside.table_of(measured(comparison), comparison.ladder))
    ours, theirs = [line for line in text.splitlines() if "small" in line]
    # 900/s of 1,000 and 1,000; 0.95 and more were missed by one and 1.05 by both.
    assert [cell.strip() for cell in ours.split("│")[4:6]] == ["1,000", "1.11"]
    assert [cell.strip() for cell in ours.split("│")[-3:-1]] == ["1,000", "1.11"]
    assert [cell.strip() for cell in theirs.split("│")[4:6]] == ["900", ""]
    assert [cell.strip() for cell in theirs.split("│")[9:11]] == ["200, 200", "2,000, 2,000"]
    # 1.05 is not asked after a clear miss.
    assert [cell.strip() for cell in theirs.split("│")[11:-1]] == ["", "900", ""]


def test_the_same_command_goes_on(servers: Servers) -> None:
    whole = measured(servers.comparison(out=servers.folder / "whole.json"))
    first = measured(servers.comparison(limit_s=PROBES_S + 11 * TURN_S))
    assert 0 < len(first["levels"]) < len(whole["levels"])
    # Other closed loops by then: rates stay those that the file has.
    servers.capacity |= {"x1_0us": 5000.0, "penstock": 1001.0}
    comparison = servers.comparison()
    found = measured(comparison)
    assert turns(found) == turns(whole)
    assert found["ladders"] == whole["ladders"]
    assert len(servers.asked) == len(whole["levels"]) - len(first["levels"])
    assert not comparison.missing()


def test_more_rounds_are_added_to_those_that_are_there(servers: Servers) -> None:
    one = measured(servers.comparison(rounds=1))
    two = measured(servers.comparison(rounds=2))
    assert turns(two)[: len(turns(one))] == turns(one)
    assert {number for number, *_ in turns(two)[len(turns(one)) :]} == {2}


@pytest.mark.parametrize("num_turns", range(3, 12))
def test_a_cut_leaves_both_with_the_same_rates(servers: Servers, num_turns: int) -> None:
    servers.capacity = dict.fromkeys(CAPACITY, 1000.0)
    comparison = servers.comparison(limit_s=PROBES_S + num_turns * TURN_S)
    found = measured(comparison)
    assert servers.elapsed_s <= comparison.limit_s
    asked = {side: [turn[:3] for turn in turns(found) if turn[3] == side] for side in PORTS}
    assert asked["penstock"] == asked["triton"] != []


def test_a_level_is_in_the_file_at_once(servers: Servers) -> None:
    comparison = servers.comparison()
    comparison.probe()
    turn = comparison.missing()[0]
    comparison.take(turn)
    written = json.loads((servers.folder / "found.json").read_text())
    assert turns(written) == [(turn.round, turn.size, turn.share, turn.side)]


def test_no_rates_before_every_way_was_tried(beside, servers: Servers) -> None:
    probe_s = beside.TINY_LIMITS.probe
    found = measured(servers.comparison(limit_s=2 * TURN_S + probe_s))
    assert len(found["probes"]) == 3
    assert found["ladders"] == {} and found["levels"] == []
    found = measured(servers.comparison())
    assert set(found["ladders"]) == {"small", "large"}
    # Three were there.
    assert sum(flags.startswith("--concurrency") for _, flags, _ in servers.asked) == 5


def test_what_measures_nothing_counts_for_nothing(servers: Servers, capsys) -> None:
    comparison = servers.comparison(rounds=1)
    comparison.probe()
    servers.broken = set(CAPACITY)
    comparison.climb()
    assert comparison.found["levels"] == []
    assert "nothing was measured; its log:" in capsys.readouterr().out
    servers.broken = set()
    comparison.climb()
    assert not comparison.missing()


def test_a_way_that_answers_nothing_is_left_out_for_good(servers: Servers) -> None:
    servers.broken = {"x2_0us"}
    first = measured(servers.comparison(rounds=1))
    assert {each["variant"] for each in first["ladders"].values()} == {"2 instances, 2 ms"}
    servers.broken = set()
    found = measured(servers.comparison(rounds=2))
    assert found["ladders"] == first["ladders"]
    assert not any("x2_0us" in model for model, _, _ in servers.asked)


def test_files_of_other_settings_are_begun_anew(servers: Servers, capsys) -> None:
    measured(servers.comparison())
    path = servers.folder / "found.json"
    told = json.loads(path.read_text())
    del told["settings"]["shares"]
    path.write_text(json.dumps(told))
    comparison = servers.comparison()
    assert comparison.found["levels"] == [] and comparison.found["probes"] == {}
    assert "other settings" in capsys.readouterr().out
    # Nothing is lost before something is measured.
    assert json.loads(path.read_text()) == told


def test_only_large_batches_have_a_budget_of_tokens(servers: Servers) -> None:
    comparison = servers.comparison()
    budget = f'"penstock.max_tokens" value {{ string_value: "{comparison.scale.num_tokens}" }}'
    assert budget in comparison.config("large")
    assert "max_tokens" not in comparison.config("small")
