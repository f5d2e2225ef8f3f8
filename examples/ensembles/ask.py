"""Ask the two ensembles: the classes of photographs, or how close texts are to the first one.

    python examples/ensembles/ask.py --url localhost:8000 photo.jpg
    python examples/ensembles/ask.py "A cat sleeps." "The kitten is napping." "Shares fell."

Runs unchanged against Triton. Needs `pip install "tritonclient[http]"`.
"""

import argparse
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient

NUM_CLASSES = 3


def ask(client, model, name, data, output, num_classes=0):
    tensor = httpclient.InferInput(name, [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[data]], np.object_))
    wanted = httpclient.InferRequestedOutput(output, class_count=num_classes)
    return client.infer(model, [tensor], outputs=[wanted]).as_numpy(output)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("given", nargs="+", metavar="FILE_OR_TEXT")
    args = parser.parse_args()
    with httpclient.InferenceServerClient(args.url) as client:
        if all(Path(each).is_file() for each in args.given):
            for name in args.given:
                data = Path(name).read_bytes()
                classes = ask(client, "classify", "FILE", data, "SCORES", NUM_CLASSES)
                # Each is score:index:label.
                print(f"{name}: {'; '.join(each.decode().split(':', 2)[2] for each in classes)}")
        else:
            texts = [text.encode() for text in args.given]
            vectors = np.stack([ask(client, "embed", "TEXT", text, "VECTOR") for text in texts])
            for text, closeness in zip(args.given, vectors @ vectors[0], strict=True):
                print(f"{closeness:.2f} {text}")


if __name__ == "__main__":
    main()
