"""Small tokenizers: of bytes, trained in a moment on a few lines, and of words with spaces."""

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

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


def with_bytes() -> Tokenizer:
    """As Llama 2 and Mistral have it: words begin with a space that is not there before the first,
    and what is no token comes as bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "t", "h", "e", "c", "a", "s", ".", "é", "日", "th", "▁the", "▁c", "▁▁", "the"]
    merges = [("t", "h"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁", "▁")]
    merges += [("th", "e")]
    names = list(dict.fromkeys([*tokens, *words, *("".join(each) for each in merges)]))
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return tokenizer


def with_marks() -> Tokenizer:
    """The same, with the decoder that newer files have in the place of three others."""
    tokenizer = with_bytes()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace("▁", "always")]
    )
    return tokenizer


TOKENIZER = trained()
WITH_BYTES = with_bytes()
WITH_MARKS = with_marks()
