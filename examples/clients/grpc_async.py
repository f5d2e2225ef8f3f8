"""Several requests at once over gRPC: answers go to a callback, on a thread of the client."""

import argparse
import queue
import sys

import numpy as np
import tritonclient.grpc as grpcclient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="localhost:8001", help="host:port")
url = parser.parse_args().url


def numbers(name: str, values: np.ndarray) -> grpcclient.InferInput:
    return grpcclient.InferInput(name, values.shape, "INT32").set_data_from_numpy(values)


answers: queue.Queue = queue.Queue()


def arrived(result: grpcclient.InferResult | None, error: Exception | None) -> None:
    answers.put((result, error))


b = np.ones((1, 16), dtype=np.int32)
is_right = True
with grpcclient.InferenceServerClient(url) as client:
    for value in range(8):
        a = np.full((1, 16), value, dtype=np.int32)
        inputs = [numbers("INPUT0", a), numbers("INPUT1", b)]
        client.async_infer("simple", inputs, arrived, request_id=str(value))
    for _ in range(8):
        result, error = answers.get(timeout=30)
        if error is not None:
            sys.exit(f"failed: {error}")
        value = int(result.get_response().id)
        total, difference = result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT1")
        print(f"request {value}: sum {total[0, 0]}, difference {difference[0, 0]}")
        is_right &= bool((total == value + 1).all() and (difference == value - 1).all())
sys.exit(0 if is_right else 1)
