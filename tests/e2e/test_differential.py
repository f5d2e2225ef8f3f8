"""The same random requests to a real Triton and to Penstock, with the same repository: the same
status class, and the same bits."""

import contextlib
import http.client
import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import differential
import grpc
import numpy as np
import pytest
from differential import Answer, Call, Calls, Wrong
from real_triton import triton
from served import Served
from tritonclient.grpc import service_pb2 as pb

SEED = 20261115
NUM_VALID = 5000
NUM_IN_REGION = 1000
NUM_CLIENTS = 4
NUM_INVALID = 300
pytestmark = pytest.mark.verify
CLIENT_FAULTS = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "CANCELLED"}


class Peer:
    """One server, by both protocols, over connections that stay open."""

    def __init__(self, port: int, grpc_address: str) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self._channel = grpc.insecure_channel(grpc_address)
        self._infer = self._channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda data: data,
            response_deserializer=pb.ModelInferResponse.FromString,
        )

    def ask(self, call: Call) -> Answer:
        if call.is_grpc:
            return self.grpc(differential.grpc_message(call).SerializeToString())
        return self.http(call.model, *differential.http_message(call))

    def http(self, model: str, body: bytes, json_bytes: int | str | None) -> Answer:
        headers = {}
        if json_bytes is not None:
            headers["Inference-Header-Content-Length"] = str(json_bytes)
        self._http.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = self._http.getresponse()
        length = answer.headers["Inference-Header-Content-Length"]
        data = answer.read()
        return differential.http_answer(answer.status, int(length) if length else None, data)

    def grpc(self, data: bytes) -> Answer:
        try:
            return differential.grpc_answer(self._infer(data, timeout=20))
        except grpc.RpcError as error:
            kind = "4xx" if error.code().name in CLIENT_FAULTS else "5xx"
            return Answer(kind, error=f"{error.code().name}: {error.details()}")

    def ask_in_region(self, call: Call, memory: mmap.mmap) -> Answer:
        differential.write_inputs(call, memory)
        if call.is_grpc:
            answer = self.grpc(differential.grpc_message_in_region(call).SerializeToString())
        else:
            answer = self.http(call.model, differential.http_message_in_region(call), None)
        return differential.read_outputs(call, answer, memory)

    def register(self, key: str, num_bytes: int) -> None:
        body = json.dumps({"key": key, "offset": 0, "byte_size": num_bytes})
        path = f"/v2/systemsharedmemory/region/{differential.REGION}/register"
        self._http.request("POST", path, body)
        answer = self._http.getresponse()
        data = answer.read()
        assert answer.status == 200, data

    def close(self) -> None:
        self._http.close()
        self._channel.close()


@dataclass(frozen=True)
class Addresses:
    """HTTP port and gRPC address, of both."""

    ours: tuple[int, str]
    theirs: tuple[int, str]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    repository = differential.write_repository(tmp_path_factory.mktemp("repository"))
    with triton(repository, tmp_path_factory.mktemp("triton")) as oracle:
        served = Served(repository, "--shared-memory", grpc=True)
        yield Addresses((served.port, served.grpc_address), (oracle.port, oracle.grpc_address))
        assert served.terminate() == 0


@contextlib.contextmanager
def peers(addresses: Addresses) -> Iterator[tuple[Peer, Peer]]:
    with (
        contextlib.closing(Peer(*addresses.ours)) as ours,
        contextlib.closing(Peer(*addresses.theirs)) as theirs,
    ):
        yield ours, theirs


def exactly(call: Call, theirs: Answer) -> Answer:
    """Triton reads doubles from JSON up to three units in the last place off; we read them as they
    are. Such an output counts as the right one; every other is left as it came."""
    outputs = dict(theirs.outputs)
    for item in call.inputs:
        if item.datatype == "FP64" and not item.is_binary and item.output in outputs:
            datatype, shape, data = outputs[item.output]
            given, got = (np.frombuffer(each, np.float64) for each in (item.data, data))
            np.testing.assert_array_max_ulp(given, got, maxulp=3)
            outputs[item.output] = (datatype, shape, item.data)
    return replace(theirs, outputs=outputs)


@pytest.mark.timeout(900)
def test_valid_requests_get_the_same_bits(addresses: Addresses) -> None:
    """From several clients at once, so that batches form."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        counts = pool.map(lambda number: compare(addresses, SEED + number), range(NUM_CLIENTS))
        seen = sum(counts, Counter())
    assert set(seen) == {"gRPC", "HTTP", *differential.DATATYPES}
    assert seen["gRPC"] + seen["HTTP"] == NUM_VALID
    print(f"\n{NUM_VALID} requests, the same bits:", dict(seen))


def compare(addresses: Addresses, seed: int) -> Counter[str]:
    calls = Calls(seed)
    seen: Counter[str] = Counter()
    with peers(addresses) as (our_peer, their_peer):
        for number in range(NUM_VALID // NUM_CLIENTS):
            call = calls.next()
            ours, theirs = our_peer.ask(call), their_peer.ask(call)
            what = f"seed {seed}, request {number}: {call}"
            assert ours == differential.expected(call), what
            assert ours == exactly(call, theirs), what
            seen.update({"gRPC" if call.is_grpc else "HTTP", *(t.datatype for t in call.inputs)})
    return seen


@pytest.mark.timeout(900)
def test_the_same_tensors_in_shared_memory_get_the_same_bits(addresses: Addresses) -> None:
    """Both servers read and write the same region, one after the other."""
    path = Path("/dev/shm") / f"penstock-differential-{os.getpid()}"
    num_bytes = 2 * differential.HALF_BYTES
    calls = Calls(SEED)
    seen: Counter[str] = Counter()
    with path.open("w+b") as file:
        try:
            file.truncate(num_bytes)
            with mmap.mmap(file.fileno(), num_bytes) as memory, peers(addresses) as both:
                for peer in both:
                    peer.register(f"/{path.name}", num_bytes)
                while sum(seen[protocol] for protocol in ("HTTP", "gRPC")) < NUM_IN_REGION:
                    call = calls.next()
                    if any(0 in item.shape for item in call.inputs):
                        continue
                    ours, theirs = (peer.ask_in_region(call, memory) for peer in both)
                    assert ours == differential.expected(call), f"{call}"
                    assert ours == theirs, f"{call}"
                    seen.update({"gRPC" if call.is_grpc else "HTTP"})
                    seen.update(item.datatype for item in call.inputs)
        finally:
            path.unlink()
    assert set(seen) == {"gRPC", "HTTP", *differential.DATATYPES}
    print(f"\n{NUM_IN_REGION} requests by shared memory, the same bits:", dict(seen))


# Where we differ on purpose. Triton 2.51 answers 500 where its JSON reader finds the mistake; a
# client's fault is 4xx here (docs/protocols.md).
THEY_BLAME_THEMSELVES = {
    "http_a_list",
    "http_binary_size_negative",
    "http_fraction_for_integer",
    "http_inputs_missing",
    "http_json_length_short",
    "http_negative_dimension",
    "http_negative_for_unsigned",
    "http_not_json",
    "http_null_element",
    "http_number_for_text",
    "http_priority_text",
    "http_shape_larger_than_data",
    "http_shape_of_text",
    "http_shape_smaller_than_data",
    "http_text_for_numbers",
    "http_timeout_negative",
    "http_too_few_elements",
    "http_too_many_elements",
}
# It takes what we refuse rather than guess (docs/protocols.md): literals that are not JSON, numbers
# cut to fewer bits, ragged lists, tensors that belong to no input; and a
# request without any input where all are optional.
THEY_TAKE_IT = {
    "grpc_no_optional_inputs",
    "grpc_raw_too_many",
    "http_nan",
    "http_no_optional_inputs",
    "http_number_too_large",
    "http_ragged",
}


def test_invalid_requests_get_the_same_class_of_status(addresses: Addresses) -> None:
    calls = differential.WrongCalls(SEED)
    differences: dict[str, set[str]] = {"2xx": set(), "5xx": set()}
    with peers(addresses) as (our_peer, their_peer):
        for number in range(NUM_INVALID):
            wrong = calls.next(number)
            ours, theirs = refused(our_peer, wrong), refused(their_peer, wrong)
            assert ours.status == "4xx" and ours.error, f"{wrong.kind}: {ours}"
            if theirs.status != ours.status:
                differences[theirs.status].add(wrong.kind)
    assert differences == {"2xx": THEY_TAKE_IT, "5xx": THEY_BLAME_THEMSELVES}
    print(f"\n{NUM_INVALID} requests with {len(calls.kinds)} kinds of mistakes, none taken")


def refused(peer: Peer, wrong: Wrong) -> Answer:
    if wrong.model:
        return peer.http(wrong.model, wrong.body, wrong.json_bytes)
    return peer.grpc(wrong.body)
