"""all-MiniLM-L6-v2 with a sentiment head: token ids and mask to two logits, negative and positive.

One file, and its weights beside it as model.safetensors: so it is served as it is by the `pytorch`
backend. `prepare.py` trains the head and writes the weights; the names of the encoder's parameters
are those of the published checkpoint.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, INNER = 384, 12, 6, 1536
VOCABULARY, POSITIONS, TYPES = 30522, 512, 2
EPSILON = 1e-12


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(TYPES, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: ids.shape[1]]
        return self.LayerNorm(
            self.word_embeddings(ids) + positions + self.token_type_embeddings.weight[0]
        )


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """A projection back to the residual stream, normalised behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self = SelfAttention()
        self.output = Output(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(x, mask), x)


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.intermediate = Intermediate()
        self.output = Output(INNER)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class SentenceEncoder(nn.Module):
    """One embedding a text: the mean over its tokens, of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = Encoder()

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        is_token = attention_mask.bool()
        hidden = self.encoder(self.embeddings(input_ids), is_token[:, None, None, :])
        # Summed in FP32: halves cannot hold 512 of them.
        weights = is_token[:, :, None].float()
        mean = (hidden.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
        return F.normalize(mean, dim=-1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"embedding": self.embed(input_ids, attention_mask)}


class Classifier(SentenceEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        embedding = self.embed(input_ids, attention_mask)
        return {"logits": self.head(embedding.to(self.head.weight.dtype))}


def encoder() -> nn.Module:
    """Without the head and without weights: whoever calls it loads them."""
    return _empty(SentenceEncoder)


def factory() -> nn.Module:
    """The trained classifier."""
    from safetensors.torch import load_file

    weights = Path(__file__).with_name("model.safetensors")
    if not weights.exists():
        raise FileNotFoundError(f"{weights}: run `python examples/sentiment/prepare.py` first")
    module = _empty(Classifier)
    module.load_state_dict(load_file(weights))
    return module.eval()


def _empty(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        module = kind()
    return module.to_empty(device="cpu")
