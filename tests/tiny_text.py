"""A tokenizer that is trained in a moment, on a few lines."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|end|>", "<|start|>"]
SAMPLE = [
    "the cat sat on the mat",
    "a naïve café, 2024!",
    "日本語のテキスト",
    "def f(x): return x+1",
]


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE * 4, trainer)
    return tokenizer


TOKENIZER = trained()
