"""Hugging Face folders with tiny random networks and a tokenizer trained on a few sentences."""

import json

import pytest

SENTENCES = [
    "the cat sat on the mat and looked at the dog",
    "I love this film, it is wonderful!",
    "a terrible day: nothing works and everybody is sad",
    "Alice lives in Paris and works for Penstock",
    "numbers like 1, 2 and 42 are tokens too",
]
LABELS = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def write_tokenizer(folder, max_length=64):
    """Train a WordPiece tokenizer and save it as transformers does; return its size."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=max_length,
    )
    whole.save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_bert(folder, kind="BertForSequenceClassification", **settings):
    """Write a BERT of this kind, with weights large enough for its answers to differ."""
    transformers = pytest.importorskip("transformers")
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    config = transformers.BertConfig(
        vocab_size=vocab_size, initializer_range=0.5, **{**SIZES, **settings}
    )
    torch.manual_seed(5)
    getattr(transformers, kind)(config).eval().save_pretrained(folder)
    return folder


def write_classifier(folder, **settings):
    return write_bert(
        folder, id2label=LABELS, label2id={v: k for k, v in LABELS.items()}, **settings
    )


def write_tagger(folder):
    names = dict(enumerate(["O", "B-PER", "I-PER", "LOC"]))
    kind = "BertForTokenClassification"
    return write_bert(folder, kind, id2label=names, label2id={v: k for k, v in names.items()})


def write_modules(folder, pooling="mean", is_normalized=True):
    """Add what sentence-transformers saves beside the network."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if is_normalized else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    settings = {f"pooling_mode_{mode}": name == pooling for name, mode in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": SIZES["hidden_size"], **settings})
    )
    return folder


def write_image_classifier(folder, kind="ViT", **processor):
    """Write a tiny network for images of 32 x 32 with this kind of image processor."""
    transformers = pytest.importorskip("transformers")
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        initializer_range=0.5,
        id2label=LABELS,
        label2id={label: number for number, label in LABELS.items()},
    )
    torch.manual_seed(5)
    transformers.ViTForImageClassification(config).eval().save_pretrained(folder)
    settings = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": True,
        "size": {"height": 32, "width": 32},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
        **processor,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def draw_image(width, height, seed=0, form="PNG", mode="RGB"):
    """Return an encoded image of smooth colours with some noise."""
    import io

    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed)
    coarse = Image.fromarray(noise.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()
