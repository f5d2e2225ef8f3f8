"""Several requests at once over HTTP, without asyncio: each `async_infer` is waited for later."""

import argparse
import sys

import numpy as np
import tritonclient.http as httpclient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="localhost:8000", help="host:port, without http://")
url = parser.parse_args().url


def numbers(name: str, values: np.ndarray) -> httpclient.InferInput:
    return httpclient.InferInput(name, values.shape, "INT32").set_data_from_numpy(values)


def words(values: list[str]) -> httpclient.InferInput:
    texts = np.array([[value] for value in values], dtype=np.object_)
    return httpclient.InferInput("TEXT", texts.shape, "BYTES").set_data_from_numpy(texts)


a = [np.full((1, 16), value, dtype=np.int32) for value in range(8)]
b = np.ones((1, 16), dtype=np.int32)
# As many requests are under way as there are connections.
with httpclient.InferenceServerClient(url, concurrency=4) as client:
    sums = [
        client.async_infer("simple", [numbers("INPUT0", each), numbers("INPUT1", b)]) for each in a
    ]
    lengths = client.async_infer("text_length", [words(["a", "bb", "ccc"])])
    totals = [request.get_result().as_numpy("OUTPUT0") for request in sums]
    counted = lengths.get_result().as_numpy("LENGTH").ravel()

print("sums", [int(total[0, 0]) for total in totals])
print("characters", counted)
is_right = all((total == each + b).all() for total, each in zip(totals, a, strict=True))
sys.exit(0 if is_right and counted.tolist() == [1, 2, 3] else 1)
