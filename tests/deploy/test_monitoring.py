"""Alerts and dashboards: every expression runs in a real Prometheus that scrapes real servers, and
every alert fires when it should and not otherwise."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from prometheus import Prometheus, promtool, running
from rollout_load import EXPLICIT, add_versions, promote
from served import Served, null_model

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
ALERTS, ALERTS_TEST = FOLDER / "alerts.yaml", FOLDER / "alerts_test.yaml"
BOARDS = sorted((FOLDER / "grafana").glob("*.json"))
DOCS = Path(__file__).parents[2] / "docs" / "observability.md"
OPERATE = DOCS.parent / "operate.md"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in RULES if "alert" in rule]
# What Grafana puts in place of its variables.
VARIABLES = {"$__rate_interval": "10s"} | dict.fromkeys(
    ("$job", "$instance", "$model", "$version", "$gpu"), ".*"
)
METRIC = re.compile(r"\b(?:penstock[:_]|nv_)[a-z_:]+")
# Panels without data on the machine of this test, and why.
NO_GPU, NO_ENERGY = "no GPU", "no readable energy counter"
NO_EVIDENCE = "no version has evidence with data"
WITHOUT_DATA = {
    "Drift of inputs": NO_EVIDENCE,
    "Inputs outside of the known range": NO_EVIDENCE,
    "Penstock GPUs": NO_GPU,
    "Joules per answer": NO_ENERGY,
    "Energy by model": NO_ENERGY,
    "Models without a ready instance": "a number even if there is none",
}
# Panels with data while a rollout is running only.
OF_ROLLOUTS = ("Share of the candidate", "Rows on which versions disagree")
RUNNING = 'penstock_rollout_state{decision="running"}'
SLO = 'parameters {{ key: "penstock.slo" value {{ string_value: "{}" }} }}'
PADDED = """
parameters { key: "penstock.pad" value { string_value: "x[0]=0" } }
"""
RECORDED = """
parameters { key: "penstock.record_share" value { string_value: "1" } }
"""
SCRAPE_S = 25.0


def panels(board: dict) -> list[dict]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


QUERIES = [
    pytest.param(
        board, panel["title"], target["expr"], id=f"{path.stem}-{panel['id']}{target['refId']}"
    )
    for path in BOARDS
    for board in [read(path)]
    for panel in panels(board)
    for target in panel["targets"]
]


# Files


def test_there_are_boards_for_servers_models_texts_and_gpus() -> None:
    assert [path.stem for path in BOARDS] == ["gpus", "language-models", "model", "overview"]
    assert len(QUERIES) > 60
    uids = [read(path)["uid"] for path in BOARDS]
    assert len(set(uids)) == len(uids)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_board_can_be_imported_anywhere(path: Path) -> None:
    board = read(path)
    variables = {each["name"] for each in board["templating"]["list"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables, f"{panel['title']} uses {used}"
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, "panels overlap"


def documented() -> str:
    """The documentation with its braces written out."""
    text = DOCS.read_text()
    for match in re.finditer(r"([a-z_]+)\{([a-z_,]+)\}([a-z_]*)", text):
        text += " ".join(f" {match[1]}{each}{match[3]} " for each in match[2].split(","))
    return text + (DOCS.parent / "gpus.md").read_text()


def test_expressions_use_metrics_that_are_documented() -> None:
    text = documented()
    expressions = [rule["expr"] for rule in RULES] + [param.values[2] for param in QUERIES]
    for name in {name for each in expressions for name in METRIC.findall(each)}:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in text or family in text, f"{name} is not in docs/observability.md"


def test_alerts_say_what_happens_and_what_to_do() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"].keys() == {"summary", "description"}
    documented = OPERATE.read_text()
    assert [name for name in NAMES if f"`{name}`" not in documented] == []


# promtool


@pytest.mark.verify
def test_rules_are_valid() -> None:
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.verify
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    done = promtool("test", "rules", ALERTS_TEST)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.verify
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["never fires", "always fires"])
def test_the_tests_of_alerts_notice_a_wrong_one(tmp_path: Path, name: str, change: str) -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule["expr"] = "vector(0) > 1" if change == "never fires" else "vector(1)"
                rule.pop("for", None)
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    tests = yaml.safe_load(ALERTS_TEST.read_text())
    tests["tests"] = [each for each in tests["tests"] if name in json.dumps(each)]
    (tmp_path / "alerts_test.yaml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", tmp_path / "alerts_test.yaml")
    assert done.returncode != 0
    assert name in done.stdout + done.stderr


# A real Prometheus


class Clients:
    """Threads that send requests until they are stopped."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.num_answered = 0

    def keep_asking(self, url: str, body: dict, pause_s: float = 0.01) -> None:
        def ask() -> None:
            while not self._is_over.wait(pause_s):
                request = urllib.request.Request(url, json.dumps(body).encode())
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        self.num_answered += answer.status == 200
                        answer.read()
                except urllib.error.HTTPError as error:
                    error.close()

        self._threads.append(threading.Thread(target=ask))
        self._threads[-1].start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def row(value: float, size: int = 1, datatype: str = "INT32") -> dict:
    tensor = {"name": "x", "datatype": datatype, "shape": [1, size], "data": [value] * size}
    return {"inputs": [tensor]}


def write_repository(root: Path) -> None:
    config = SLO.format("p99 < 1s") + RECORDED
    null_model(root, "echo", config=config, a_ms=5, fail_on=7, crash_on=9)
    add_versions(root, "good", "good")
    # It computes for longer than it may take, so most requests are refused.
    null_model(root, "slow", config=SLO.format("p99 < 60ms"), a_ms=50)
    folder = null_model(root, "padded", config=PADDED) / "padded" / "config.pbtxt"
    folder.write_text(folder.read_text().replace("dims: 1 }", "dims: -1 }"))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Two servers under load, one of them with a language model, scraped for SCRAPE_S."""
    pytest.importorskip("torch")
    from text_server import NAME, write_model

    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    slo = {"penstock.slo": "p99 ttft < 5s, p95 tpot < 2s"}
    text = write_model(tmp_path_factory.mktemp("text"), slo)
    recording = ("--record", str(tmp_path_factory.mktemp("recording")))
    clients = Clients()
    with (
        Served(root, "--shards", "2", "--price", "2.5", *EXPLICIT, *recording) as tensors,
        Served(text) as texts,
        running(
            [tensors.metrics_url.split("/")[2], texts.metrics_url.split("/")[2]], ALERTS
        ) as found,
    ):
        try:
            models = f"http://{tensors.address}/v2/models"
            for value in (1, 2, 7):
                clients.keep_asking(f"{models}/echo/infer", row(value))
            clients.keep_asking(f"{models}/echo/infer", row(9), pause_s=10)
            for size in (3, 11):
                clients.keep_asking(f"{models}/padded/infer", row(1, size))
            for _ in range(8):
                clients.keep_asking(f"{models}/slow/infer", row(1))
            promote(tensors, 2, canary="50%", step_s=600, mirrored_per_s=50)
            for _ in range(2):
                clients.keep_asking(f"{models}/m/infer", row(0.5, datatype="FP32"))
            body = {"model": NAME, "prompt": "the cat sat on the mat", "max_tokens": 20}
            clients.keep_asking(f"http://{texts.address}/v1/completions", body)
            time.sleep(SCRAPE_S)
            yield found
        finally:
            clients.stop()
        assert clients.num_answered > 100


def filled_in(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@pytest.mark.verify
@pytest.mark.parametrize(("board", "title", "expression"), QUERIES)
def test_a_query_of_a_board_runs(
    prometheus: Prometheus, board: dict, title: str, expression: str
) -> None:
    found = prometheus.query(filled_in(expression))
    # A busy machine may have made the candidate too slow.
    has_ended = title in OF_ROLLOUTS and not prometheus.query(RUNNING)
    if not has_ended and title not in WITHOUT_DATA and board["title"] not in WITHOUT_DATA:
        assert found, f"{title}: no data"
        assert any(each["value"][1] not in ("NaN", "+Inf") for each in found)


@pytest.mark.verify
def test_every_variable_of_a_board_has_values(prometheus: Prometheus) -> None:
    for path in BOARDS:
        for variable in read(path)["templating"]["list"]:
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.get("definition", ""))
            if match and variable["name"] != "gpu":
                assert prometheus.query(f"count by ({match[2]}) ({filled_in(match[1])})")


@pytest.mark.verify
def test_the_rules_evaluate_without_errors(prometheus: Prometheus) -> None:
    groups = prometheus.ask("rules")["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) == len(RULES)
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    for rule in RULES:
        prometheus.query(rule["expr"])


@pytest.mark.verify
def test_the_server_computes_the_burn_rates_of_the_rules(prometheus: Prometheus) -> None:
    """Windows are longer than the test, so both are those of all requests."""
    names = {(model, "latency") for model in ("echo", "m", "slow")}
    names |= {("smol", "ttft"), ("smol", "tpot")}
    for window in ("1h", "3d"):
        recorded = {
            (each["metric"]["model"], each["metric"]["metric"]): float(each["value"][1])
            for each in prometheus.query(f"model:slo_burn_rate:{window}")
        }
        own = {
            (each["metric"]["model"], each["metric"]["metric"]): float(each["value"][1])
            for each in prometheus.query(f'penstock_slo_burn_rate{{window="{window}"}}')
        }
        assert recorded.keys() == own.keys() == names
        for key in names:
            assert own[key] == pytest.approx(recorded[key], rel=0.25, abs=0.5)
        assert own["slow", "latency"] > 14.4 and own["smol", "ttft"] == 0


@pytest.mark.verify
def test_a_real_overload_pages(prometheus: Prometheus) -> None:
    ends = time.monotonic() + 60
    while True:
        firing = prometheus.query('ALERTS{alertstate="firing", alertname="PenstockSloBurnsFast"}')
        models = {each["metric"]["model"] for each in firing}
        if "slow" in models or time.monotonic() > ends:
            break
        time.sleep(1)
    assert "slow" in models
