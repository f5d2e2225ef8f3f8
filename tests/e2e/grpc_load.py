"""A closed-loop gRPC client that checks every answer: unique canaries in, the same out, with the
version that computed each row."""

import asyncio
import time
from dataclasses import dataclass, field

import grpc
import numpy as np
from load import Tally
from tritonclient.grpc import service_pb2, service_pb2_grpc

NUM_ROWS = 4
# Each row of an answer is the canary and the version of the model that computed it.
VERSIONED = """
import numpy as np

def infer(inputs):
    rows = inputs["x"]
    return {{"y": np.concatenate([rows, np.full_like(rows, {version})], axis=1)}}
"""
VERSIONED_CONFIG = """
backend: "python" max_batch_size: 16
dynamic_batching { }
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 2 }
"""


@dataclass
class GrpcTally(Tally):
    """`codes` are the statuses of calls that failed; `num_mixed` answers that say to come from
    another version than a row of theirs."""

    num_mixed: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)


class GrpcLoad:
    """Clients of one model of `VERSIONED` code, each with a channel of its own and one call at a
    time. No call is retried."""

    def __init__(self, address: str, num_clients: int, model: str) -> None:
        self._address = address
        self._num_clients = num_clients
        self._model = model
        self._counter = 0
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.tally = GrpcTally()

    async def __aenter__(self) -> "GrpcLoad":
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(self._num_clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        # Different arguments, or the channels would share a connection.
        options = [("grpc.enable_retries", 0), ("penstock.client", number)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self._is_stopping:
                await self._call(stub)

    async def _call(self, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        tally = self.tally
        self._counter += NUM_ROWS
        canary = np.arange(self._counter, self._counter + NUM_ROWS, dtype=np.int32)
        request = service_pb2.ModelInferRequest(
            model_name=self._model, raw_input_contents=[canary.tobytes()]
        )
        request.inputs.add(name="x", datatype="INT32", shape=[NUM_ROWS, 1])
        tally.num_sent += 1
        began = time.monotonic()
        try:
            answer = await stub.ModelInfer(request, timeout=60)
        except grpc.RpcError as error:
            name = error.code().name
            tally.codes[name] = tally.codes.get(name, 0) + 1
            return
        now = time.monotonic()
        rows = np.frombuffer(answer.raw_output_contents[0], np.int32).reshape(NUM_ROWS, 2)
        tally.versions.add(answer.model_version)
        if not np.array_equal(rows[:, 0], canary):
            tally.num_wrong += 1
        elif set(rows[:, 1].tolist()) != {int(answer.model_version)}:
            tally.num_mixed += 1
        else:
            tally.num_good += 1
            tally.finished.append(now)
            tally.latencies_s.append(now - began)
