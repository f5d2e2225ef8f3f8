"""One engine, in a process of its own: `python cpu_side.py NAME FILE.gguf THREADS STREAMS`.

Answers lines of JSON: prompts as tokens, and how many tokens each is to be continued by. They begin
together and end when all are done. What is told is the time that took, also of the CPU, and the
texts. Runs in the environment of the engine that it is about, and imports no other.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Protocol

Prompts = list[list[int]]


class Side(Protocol):
    def __init__(self, path: Path, num_threads: int, num_streams: int, max_length: int) -> None: ...
    def texts(self, prompts: Prompts, num_tokens: int) -> list[str]: ...
    def computes(self) -> str:
        """In what types, as far as the engine says."""


class Penstock:
    """Our engine and scheduler, without the process and the protocol around them."""

    dtype = "float32"
    # Of products, where it is another one.
    small = ""

    def __init__(self, path: Path, num_threads: int, num_streams: int, max_length: int) -> None:
        sys.path.append(str(Path(__file__).resolve().parents[2]))
        import torch
        from ours import Ours, Room, asked

        from penstock.llm.models.decoder import Decoder

        torch.set_num_threads(num_threads)
        self._asked = asked
        made = partial(Decoder, quantised=self.small)
        self._ours = Ours.load(path, getattr(torch, self.dtype), made)
        num_blocks = num_streams * -(-max_length // 16)
        room = Room(num_blocks, 16, num_streams, num_streams * max_length, max_length)
        self._engine = self._ours.engine(room)

    def texts(self, prompts: Prompts, num_tokens: int) -> list[str]:
        self._engine.scheduler.pool.clear()
        for number, tokens in enumerate(prompts):
            self._engine.add(self._asked(number, tokens, num_tokens))
        found: list[list[int]] = [[] for _ in prompts]
        while not self._engine.is_idle:
            for piece in self._engine.step():
                found[piece.request].append(piece.token)
        return [self._ours.text.vocabulary.decode(tokens) for tokens in found]

    def computes(self) -> str:
        told = {
            "": f"weights and inputs {self.dtype}",
            "int8": "weights INT8 by channel, of logits too; inputs INT8 by token, in two terms",
            "int4": "weights Q4_1 as in the file, of logits INT8 by channel; inputs BF16",
        }
        return f"{told[self.small]}; keys and values {self.dtype}"


class PenstockBfloat16(Penstock):
    dtype = "bfloat16"


class PenstockInt8(Penstock):
    small = "int8"


class PenstockInt4(Penstock):
    small = "int4"


class LlamaCpp:
    def __init__(self, path: Path, num_threads: int, num_streams: int, max_length: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel = num_streams
        params.n_ctx = num_streams * max_length
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def texts(self, prompts: Prompts, num_tokens: int) -> list[str]:
        answers: list[dict] = []
        asked = {"prompt": prompts, "max_tokens": num_tokens, "temperature": 0}
        asked |= {"ignore_eos": True, "cache_prompt": False}
        self._server.handle_completions(asked, answers.append)
        choices = sorted(answers[0]["choices"], key=lambda each: each["index"])
        assert all(each["finish_reason"] == "length" for each in choices), answers
        return [each["text"] for each in choices]

    def computes(self) -> str:
        return "weights Q4_1, of logits Q8_0, as in the file; inputs its 8 bits by 32; KV float16"


class OpenVino:
    def __init__(self, path: Path, num_threads: int, num_streams: int, max_length: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_seqs = num_streams
        scheduling.max_num_batched_tokens = num_streams * max_length
        scheduling.enable_prefix_caching = False
        scheduling.cache_size = 1
        self._pipeline = openvino_genai.LLMPipeline(
            str(path), "CPU", scheduler_config=scheduling, INFERENCE_NUM_THREADS=num_threads
        )

    def texts(self, prompts: Prompts, num_tokens: int) -> list[str]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        # Filled up on the left; what is masked is not computed.
        sizes = len(prompts), max(map(len, prompts))
        ids = self._numpy.zeros(sizes, self._numpy.int64)
        mask = self._numpy.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row, sizes[1] - len(tokens) :] = tokens
            mask[row, sizes[1] - len(tokens) :] = 1
        tensors = [self._openvino.Tensor(each) for each in (ids, mask)]
        found = self._pipeline.generate(self._genai.TokenizedInputs(*tensors), config).tokens
        assert all(len(tokens) == num_tokens for tokens in found)
        tokenizer = self._pipeline.get_tokenizer()
        return [tokenizer.decode(tokens) for tokens in found]

    def computes(self) -> str:
        keys = "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION"
        core = self._openvino.Core()
        told = ", ".join(f"{key}={_plain(core.get_property('CPU', key))}" for key in keys)
        return f"weights as its reader has the file's; its defaults: {told}"


def _plain(value: object) -> str:
    return str(getattr(value, "to_string", lambda: value)())


SIDES: dict[str, type[Side]] = {
    "penstock fp32": Penstock,
    "penstock bf16": PenstockBfloat16,
    "penstock int8": PenstockInt8,
    "penstock int4": PenstockInt4,
    "llama.cpp": LlamaCpp,
    "openvino-genai": OpenVino,
}


def main() -> None:
    name, path = sys.argv[1], Path(sys.argv[2])
    num_threads, num_streams, max_length = map(int, sys.argv[3:])
    # What libraries print is not an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    side = SIDES[name](path, num_threads, num_streams, max_length)
    print(json.dumps({"ready": name, "computes": side.computes()}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began, began_cpu = time.perf_counter(), time.process_time()
        texts = side.texts(asked["prompts"], asked["num_tokens"])
        took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}
        print(json.dumps({**took, "texts": texts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
