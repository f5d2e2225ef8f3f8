"""Several requests at once over gRPC with asyncio."""

import argparse
import asyncio
import sys

import numpy as np
import tritonclient.grpc.aio as grpcclient


def numbers(name: str, values: np.ndarray) -> grpcclient.InferInput:
    return grpcclient.InferInput(name, values.shape, "INT32").set_data_from_numpy(values)


async def add(client: grpcclient.InferenceServerClient, a: np.ndarray, b: np.ndarray) -> bool:
    answer = await client.infer("simple", [numbers("INPUT0", a), numbers("INPUT1", b)])
    total, difference = answer.as_numpy("OUTPUT0"), answer.as_numpy("OUTPUT1")
    print("sum", total[0, 0], "difference", difference[0, 0])
    return bool((total == a + b).all() and (difference == a - b).all())


async def count(client: grpcclient.InferenceServerClient, text: str) -> bool:
    values = np.array([[text]], dtype=np.object_)
    asked = grpcclient.InferInput("TEXT", values.shape, "BYTES").set_data_from_numpy(values)
    length = (await client.infer("text_length", [asked])).as_numpy("LENGTH")[0, 0]
    print(repr(text), length)
    return bool(length == len(text))


async def main(url: str) -> bool:
    a = [np.full((1, 16), value, dtype=np.int32) for value in range(4)]
    b = np.ones((1, 16), dtype=np.int32)
    async with grpcclient.InferenceServerClient(url) as client:
        return all(
            await asyncio.gather(
                *(add(client, each, b) for each in a), count(client, "señor"), count(client, "")
            )
        )


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="localhost:8001", help="host:port")
sys.exit(0 if asyncio.run(main(parser.parse_args().url)) else 1)
