"""transformers beside us, in an environment of its own: `python reference.py FILE.gguf THREADS`.

It reads the same GGUF file with its own reader, in FP32, and then answers lines of JSON: a prompt,
the tokens that we generated, and a file with our logits. The answer is how far those are from its
own on the same tokens, and every place where it would have gone on with another token. Knows
nothing of Penstock.
"""

import json
import os
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, logging


def main() -> None:
    path, num_threads = sys.argv[1], int(sys.argv[2])
    # What libraries print is not an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    folder, name = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    print(json.dumps({"ready": type(model).__name__}), file=answers, flush=True)
    for line in sys.stdin:
        with torch.inference_mode():
            found = compared(model, json.loads(line))
        print(json.dumps(found), file=answers, flush=True)


def compared(model: torch.nn.Module, asked: dict) -> dict:
    generated = torch.tensor(asked["generated"])
    tokens = torch.tensor([asked["prompt"] + asked["generated"][:-1]])
    theirs = model(tokens, logits_to_keep=len(generated), use_cache=False).logits[0]
    ours = torch.from_numpy(np.load(asked["logits"]))
    best = theirs.max(1)
    behind = best.values - theirs.gather(1, generated[:, None])[:, 0]
    others = (best.indices != generated).nonzero()[:, 0].tolist()
    return {
        "largest_difference": float((ours - theirs).abs().max()),
        "mean_difference": float((ours - theirs).abs().mean()),
        "largest_logit": float(theirs.abs().max()),
        "others": [
            {
                "place": place,
                "ours": int(generated[place]),
                "theirs": int(best.indices[place]),
                "margin": float(behind[place]),
            }
            for place in others
        ],
    }


if __name__ == "__main__":
    main()
