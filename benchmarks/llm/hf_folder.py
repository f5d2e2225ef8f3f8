"""A GGUF file as a folder that transformers and Penstock read: `python hf_folder.py FILE FOLDER`.

Weights, tokenizer and template as transformers reads them, weights in FP32. Runs in the environment
of transformers and knows nothing of Penstock.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging


def main() -> None:
    path, out = sys.argv[1:]
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = os.path.split(path)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = read.config.to_dict()
    # What is unpacked is not quantised any more, but is not written out as long as this says so.
    settings.pop("quantization_config", None)
    config = type(read.config)(**settings)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


if __name__ == "__main__":
    main()
