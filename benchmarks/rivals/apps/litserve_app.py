"""One of the models for LitServe, with the settings given as flags."""

import argparse

import litserve
import numpy as np
import onnx_session


class Identity(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["input"]

    def predict(self, values):
        return values

    def encode_response(self, values):
        return {"output": values}


class Digits(litserve.LitAPI):
    def __init__(self, onnx_path, **settings):
        super().__init__(**settings)
        self.onnx_path = onnx_path

    def setup(self, device):
        self.run = onnx_session.open_model(self.onnx_path)

    def decode_request(self, request):
        return np.array(request["input"], dtype=np.float32).reshape(1, 8, 8)

    def predict(self, images):
        return self.run(images) if images.ndim == 4 else self.run(images[None])[0]

    def encode_response(self, logits):
        return {"output": logits.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("identity", "digits"))
    parser.add_argument("onnx")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--batch-timeout", type=float, default=0.0)
    parser.add_argument("--fast-queue", action="store_true")
    parser.add_argument("--api-servers", type=int, default=1)
    args = parser.parse_args()
    settings = {"max_batch_size": args.batch, "batch_timeout": args.batch_timeout}
    api = Identity(**settings) if args.model == "identity" else Digits(args.onnx, **settings)
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=1, fast_queue=args.fast_queue
    )
    server.run(
        host="127.0.0.1",
        port=args.port,
        num_api_servers=args.api_servers,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )


if __name__ == "__main__":
    main()
