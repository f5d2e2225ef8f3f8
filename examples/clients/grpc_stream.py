"""Requests and answers over one gRPC stream; answers come in the order of the requests."""

import argparse
import queue
import sys

import numpy as np
import tritonclient.grpc as grpcclient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="localhost:8001", help="host:port")
url = parser.parse_args().url

WORDS = {"1": "a", "2": "señor", "3": "", "4": "水圧管"}
answers: queue.Queue = queue.Queue()


def arrived(result: grpcclient.InferResult | None, error: Exception | None) -> None:
    answers.put((result, error))


lengths = {}
with grpcclient.InferenceServerClient(url) as client:
    client.start_stream(arrived)
    for id, word in WORDS.items():
        text = np.array([[word]], dtype=np.object_)
        asked = grpcclient.InferInput("TEXT", text.shape, "BYTES").set_data_from_numpy(text)
        client.async_stream_infer("text_length", [asked], request_id=id)
    for _ in WORDS:
        result, error = answers.get(timeout=30)
        if error is not None:
            sys.exit(f"failed: {error}")
        lengths[result.get_response().id] = int(result.as_numpy("LENGTH")[0, 0])
    client.stop_stream()

print("characters", lengths)
sys.exit(0 if lengths == {id: len(word) for id, word in WORDS.items()} else 1)
