"""One request after the other over HTTP: `simple` adds and subtracts, `text_length` counts."""

import argparse
import sys

import numpy as np
import tritonclient.http as httpclient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="localhost:8000", help="host:port, without http://")
url = parser.parse_args().url

a = np.arange(16, dtype=np.int32).reshape(1, 16)
b = np.full((1, 16), 10, dtype=np.int32)
inputs = [
    httpclient.InferInput("INPUT0", a.shape, "INT32").set_data_from_numpy(a),
    httpclient.InferInput("INPUT1", b.shape, "INT32").set_data_from_numpy(b),
]
# The sum comes as binary data, the difference as JSON.
outputs = [
    httpclient.InferRequestedOutput("OUTPUT0", binary_data=True),
    httpclient.InferRequestedOutput("OUTPUT1", binary_data=False),
]
text = np.array([["señor"]], dtype=np.object_)
texts = [httpclient.InferInput("TEXT", text.shape, "BYTES").set_data_from_numpy(text)]

with httpclient.InferenceServerClient(url) as client:
    answer = client.infer("simple", inputs, outputs=outputs, request_id="1")
    total, difference = answer.as_numpy("OUTPUT0"), answer.as_numpy("OUTPUT1")
    length = client.infer("text_length", texts).as_numpy("LENGTH")

print("sum", total[0])
print("difference", difference[0])
print("characters", length[0])
is_right = (total == a + b).all() and (difference == a - b).all() and length[0, 0] == 5
sys.exit(0 if is_right else 1)
