"""Sequences behind a real server, driven by tritonclient as Triton's L0_sequence_batcher and its
sequence client examples do: each answer depends on the earlier requests of its sequence."""

import json
import os
import queue
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served
from tritonclient.utils import InferenceServerException
from waiting import wait_until

TENSORS = """
max_batch_size: %s instance_group { kind: KIND_CPU count: 1 }
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: %s }
"""
CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
# Keeps a sum for each row of its batches. Negative numbers kill its process.
SLOTS = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}
    def execute(self, requests):
        return [self.answer(row, request) for row, request in enumerate(requests)]
    def answer(self, row, request):
        def read(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0]
        if not read("READY"):
            return self.respond([0, 0, 0])
        assert request.correlation_id() == read("ID")
        assert bool(request.flags() & 1) == bool(read("START"))
        if read("x") < 0:
            os._exit(66)
        self.sums[row] = int(read("x")) + (0 if read("START") else self.sums[row])
        if read("END"):
            return self.respond([self.sums.pop(row), int(read("ID")), os.getpid()])
        return self.respond([self.sums[row], int(read("ID")), os.getpid()])
    def respond(self, values):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([values], np.int32))])
"""
SLOTS_CONFIG = f"""
backend: "python" {TENSORS % (2, 3)}
sequence_batching {{ direct {{ }} max_sequence_idle_microseconds: %d {CONTROLS} }}
"""
# The sum is a state; it begins with 100, from a file.
STATE = """
<ir_version: 8, opset_import: ["" : 17]>
state (int32[N, 1] x, int32[N, 1] sum) => (int32[N, 1] y, int32[N, 1] new_sum)
{ y = Add (x, sum) new_sum = Identity (y) }
"""
STATE_CONFIG = f"""
backend: "onnxruntime" {TENSORS % (4, 1)}
sequence_batching {{
  oldest {{ max_candidate_sequences: 3 max_queue_delay_microseconds: 1000 }}
  max_sequence_idle_microseconds: 60000000
  state {{ input_name: "sum" output_name: "new_sum" data_type: TYPE_INT32 dims: 1
    initial_state {{ name: "first" data_type: TYPE_INT32 dims: 1 data_file: "hundred" }} }} }}
"""
MINUTE_US = 60_000_000


def add(root: Path, name: str, config: str, text: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    if "backend_utils" in text:
        (folder / "model.py").write_text(text)
    else:
        onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
        (root / name / "initial_state").mkdir()
        (root / name / "initial_state" / "hundred").write_bytes(np.int32(100).tobytes())


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    root = tmp_path_factory.mktemp("repository")
    add(root, "slots", SLOTS_CONFIG % MINUTE_US, SLOTS)
    add(root, "brief", SLOTS_CONFIG % 50_000, SLOTS)
    add(root, "state", STATE_CONFIG, STATE)
    direct = STATE_CONFIG.replace("oldest { max_candidate_sequences: 3 max", "direct { max")
    add(root, "rows", direct, STATE)
    with Served(root, "--shards", request.param, grpc=True) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(served: Served, request: pytest.FixtureRequest) -> Iterator:
    if request.param == "http":
        opened = httpclient.InferenceServerClient(served.address)
    else:
        opened = grpcclient.InferenceServerClient(served.grpc_address)
    yield opened
    opened.close()


@pytest.fixture
def grpc(served: Served) -> Iterator:
    with grpcclient.InferenceServerClient(served.grpc_address) as opened:
        yield opened


def tensor(client: object, value: int, rows: int = 1) -> object:
    library = grpcclient if isinstance(client, grpcclient.InferenceServerClient) else httpclient
    given = library.InferInput("x", [rows, 1], "INT32")
    given.set_data_from_numpy(np.full((rows, 1), value, np.int32))
    return given


def ask(client, model: str, id: int | str, value: int, flags: str = "", rows: int = 1) -> list[int]:
    """Send a request of a sequence; flags are of `se`, for start and end."""
    marks = {"sequence_start": "s" in flags, "sequence_end": "e" in flags}
    answer = client.infer(model, [tensor(client, value, rows)], sequence_id=id, **marks)
    return answer.as_numpy("y")[0].tolist()


def refusal(client, model: str, *args: object) -> str:
    with pytest.raises(InferenceServerException) as caught:
        ask(client, model, *args)
    return str(caught.value)


def test_the_extension_is_listed(client):
    found = client.get_server_metadata()
    names = found["extensions"] if isinstance(found, dict) else found.extensions
    assert {"sequence", "sequence(string_id)"} <= set(names)


def test_clients_see_neither_controls_nor_states(client):
    for model in ("slots", "state"):
        found = client.get_model_metadata(model)
        is_json = isinstance(found, dict)
        inputs = found["inputs"] if is_json else found.inputs
        assert [each["name"] if is_json else each.name for each in inputs] == ["x"]


def test_two_sequences_keep_their_own_sums(client):
    for one, other in ((7, 8), (2**63 - 1, "not a number")):
        model = "slots" if other == 8 else "state"
        first = 0 if model == "slots" else 100
        totals = dict.fromkeys((one, other), first)
        for step in range(1, 6):
            for id, value in ((one, step), (other, 10 * step)):
                flags = "s" * (step == 1) + "e" * (step == 5)
                totals[id] += value
                assert ask(client, model, id, value, flags)[0] == totals[id]


def test_a_start_begins_anew(client):
    assert ask(client, "state", "anew", 1, "s") == [101]
    assert ask(client, "state", "anew", 1) == [102]
    assert ask(client, "state", "anew", 5, "s") == [105]
    assert ask(client, "state", "anew", 5, "e") == [110]


def test_bad_requests_are_told_why_and_disturb_no_sequence(client):
    assert ask(client, "slots", 5, 1, "s")[0] == 1
    assert "must specify a non-zero or non-empty correlation ID" in refusal(client, "slots", 0, 1)
    assert "must specify the START flag on the first request" in refusal(client, "slots", 6, 1)
    assert "must specify batch-size 1" in refusal(client, "slots", 5, 1, "", 2)
    assert "expected an integer, its CORRID is UINT64" in refusal(client, "slots", "a", 1, "s")
    assert ask(client, "slots", 5, 1, "e")[0] == 2
    assert "must specify the START flag" in refusal(client, "slots", 5, 1)


@pytest.mark.parametrize("model", ["state", "rows"])
def test_a_stream_of_many_sequences_answers_each_in_order(grpc, model: str):
    answers: queue.SimpleQueue = queue.SimpleQueue()
    grpc.start_stream(lambda result, error: answers.put((result, error)))
    ids = [f"stream {number}" for number in range(1, 9)]
    for step in range(1, 6):
        for number, id in enumerate(ids, 1):
            grpc.async_stream_infer(
                model,
                [tensor(grpc, number * step)],
                sequence_id=id,
                sequence_start=step == 1,
                sequence_end=step == 5,
                request_id=id,
            )
    sums: dict[str, list[int]] = {}
    for _ in range(5 * len(ids)):
        result, error = answers.get(timeout=60)
        assert error is None
        sums.setdefault(result.get_response().id, []).append(int(result.as_numpy("y")[0, 0]))
    grpc.stop_stream()
    for number, id in enumerate(ids, 1):
        assert sums[id] == [100 + number * sum(range(1, step + 1)) for step in range(1, 6)]


def test_a_third_sequence_waits_for_one_of_two_slots(grpc):
    for id in (1, 2):
        ask(grpc, "slots", id, id, "s")
    answers: queue.SimpleQueue = queue.SimpleQueue()
    grpc.async_infer(
        "slots",
        [tensor(grpc, 3)],
        lambda result, error: answers.put((result, error)),
        sequence_id=3,
        sequence_start=True,
        sequence_end=True,
    )
    assert ask(grpc, "slots", 1, 10)[0] == 11
    assert answers.empty()
    assert ask(grpc, "slots", 1, 10, "e")[0] == 21
    result, error = answers.get(timeout=60)
    assert error is None
    assert result.as_numpy("y")[0, :2].tolist() == [3, 3]
    assert ask(grpc, "slots", 2, 10, "e")[0] == 12


def test_an_idle_sequence_ends_and_frees_its_slot(client):
    for id in (1, 2):
        ask(client, "brief", id, id, "s")
    assert ask(client, "brief", 3, 3, "se")[0] == 3, "it waited until one had ended"
    text = refusal(client, "brief", 1, 1)
    assert "ended after 0.05 s without a request" in text


@pytest.mark.parametrize("how", ["by its request", "from outside"])
def test_a_killed_worker_ends_its_sequences(client, how: str):
    _, _, pid = ask(client, "slots", 1, 1, "s")
    assert ask(client, "slots", 2, 2, "s")[2] == pid
    if how == "by its request":
        assert "sequence 1 lost: its worker" in refusal(client, "slots", 1, -pid)
    else:
        os.kill(pid, signal.SIGKILL)
    # The death may be noticed only by the next request. It is another one each time: two deaths
    # would quarantine it.
    text = refusal(client, "slots", 2, pid)
    assert "lost: its worker" in text
    text = refusal(client, "slots", 2, 1)
    assert "must specify the START flag" in text
    assert "the sequence was lost: its worker" in text
    total, _, new = ask(client, "slots", 2, 5, "se")
    assert total == 5
    assert new != pid


def test_metrics_and_explain_count_sequences(served: Served, grpc):
    ask(grpc, "slots", 1, 1, "s")
    wait_until(lambda: 'penstock_sequences{model="slots",version="1"} 1' in scrape(served))
    assert 'penstock_waiting_sequences{model="slots",version="1"} 0' in scrape(served)
    before = num_ended(served)
    ask(grpc, "slots", 1, 1, "e")
    wait_until(lambda: num_ended(served) == before + 1)
    with urllib.request.urlopen(f"http://{served.address}/v2/models/slots/explain") as answer:
        told = json.load(answer)
    assert told["mode"] == "sequences"
    assert any("sequences hold 2 slots" in note for note in told["notes"])


def scrape(served: Served) -> str:
    with urllib.request.urlopen(served.metrics_url) as answer:
        return answer.read().decode()


def num_ended(served: Served) -> float:
    line = r'penstock_ended_sequences\{model="slots",version="1",reason="end"\} (\d+)'
    found = re.search(line, scrape(served))
    assert found is not None
    return float(found[1])
