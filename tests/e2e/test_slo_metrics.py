"""What a real server counts for its SLO, with one shard and with two; all of it is documented."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served, null_model
from waiting import wait_until

DOCS = Path(__file__).parents[2] / "docs" / "observability.md"
SLO = 'parameters {{ key: "penstock.slo" value {{ string_value: "{}" }} }}'
# Rows of the documentation that stand for several names.
BRACES = re.compile(r"([a-z_]*)\{([a-z_,]+)\}([a-z_]*)")


@pytest.fixture(params=[1, 2])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    null_model(tmp_path, "slow", config=SLO.format("p99 < 20s"), a_ms=30)
    null_model(tmp_path, "plain", config=SLO.format("goodput >= 99 %"), fail_on=7)
    with Served(tmp_path, "--shards", str(request.param), "--price", "3.6") as server:
        wait_until(lambda: request.param == 1 or server.has_shards(request.param))
        yield server


def scrape(served: Served) -> dict[str, dict[str, float]]:
    """Values by name without the end of counters, and by the rest of the labels."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(served.get("/metrics")[1].decode()):
        for each in family.samples:
            rest = [v for k, v in each.labels.items() if k != "version"]
            name = each.name.removesuffix("_total")
            found.setdefault(name, {})[" ".join(rest)] = each.value
    return found


def documented() -> set[str]:
    """Names in the first column of the tables of the documentation."""
    rows = [line.split("|")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    found = set()
    for name in re.findall(r"`([^`]+)`", " ".join(rows)):
        match = BRACES.fullmatch(name)
        if match is None:
            found.add(name)
        else:
            found |= {match[1] + middle + match[3] for middle in match[2].split(",")}
    return found


def check_documented(served: Served) -> None:
    names = set(re.findall(r"^# TYPE (\S+)", served.get("/metrics")[1].decode(), re.M))
    assert len(names) > 30
    known = documented()
    assert {name for name in names if name not in known} == set()


def test_requests_and_misses_are_counted_wherever_they_ran(served: Served) -> None:
    for value in range(10):
        assert served.infer("slow", "x", "INT32", [value])[0] == 200
    for value in (1, 2, 3, 7):
        assert served.infer("plain", "x", "INT32", [value])[0] == (500 if value == 7 else 200)
    assert served.infer("plain", "nothing", "INT32", [1])[0] == 400
    found = scrape(served)
    assert found["penstock_slo_requests"] == {"slow latency": 10, "plain latency": 4}
    assert found["penstock_slo_bad_requests"] == {"slow latency": 0, "plain latency": 1}
    assert found["penstock_slo_objective"] == {"slow latency": 0.99, "plain latency": 0.99}
    assert found["penstock_slo_latency_seconds"] == {"slow latency": 20}
    assert found["penstock_busy_seconds"]["slow"] >= 0.3
    wait_until(lambda: "plain latency 5m" in scrape(served).get("penstock_slo_burn_rate", {}))
    wait_until(lambda: scrape(served)["penstock_slo_burn_rate"]["plain latency 5m"] > 24)
    found = scrape(served)
    assert found["penstock_slo_burn_rate"]["plain latency 5m"] == pytest.approx(25)
    assert found["penstock_slo_burn_rate"]["slow latency 3d"] == 0
    assert found["penstock_busy_ratio"]["slow"] > 0
    assert found["penstock_price_per_hour"] == {"slow": 1.8, "plain": 1.8}
    assert found["penstock_cost_per_million"].keys() == {"slow", "plain"}
    check_documented(served)
