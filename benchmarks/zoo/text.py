"""Networks for texts, by hand: transformers, recurrent ones, linear attention, experts, bags of words, LoRA."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import Setup, architecture, supervised

EXAMPLES, LENGTH, TOKENS = 32, 12, 80


def language_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    answers: str,
    *,
    tokens: int = TOKENS,
    length: int = LENGTH,
    clip: float | None = 1.0,
) -> Setup:
    """A network that says the next token of random texts, of each token."""
    texts = torch.randint(tokens, (EXAMPLES, length + 1))

    def loss(ids: Tensor) -> Tensor:
        logits = model(texts[ids, :-1])
        return F.cross_entropy(logits.flatten(0, 1), texts[ids, 1:].flatten())

    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, loss, clip=clip),
        torch.randint(tokens, (1, length)),
        lambda output: output[:, -1, int(texts[0, 0])],
        answers,
    )


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class LayerNorm(nn.Module):
    """nanoGPT's own, with an optional bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = LayerNorm(width), CausalSelfAttention(width, heads), LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Embedding and output layer share their weight."""

    def __init__(
        self, tokens: int = TOKENS, width: int = 32, *, layers: int = 2, heads: int = 4, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(tokens, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList(Block(width, heads) for _ in range(layers)),
                "ln_f": LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.apply(self._init)
        self.transformer["wte"].weight = self.lm_head.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


@architecture("nanoGPT, tied")
def nanogpt() -> Setup:
    model = NanoGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return language_model(model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)), "lm_head")


@architecture("nanoGPT, 50,257 tokens")
def large_vocabulary() -> Setup:
    model = NanoGPT(tokens=50_257, width=8)
    setup = language_model(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "lm_head", tokens=50_257)
    setup.examples = setup.batch_size = 2  # an error has 50,257 numbers for each token
    return setup


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 12, bidirectional=True)  # sequence first, as torch has it
        self.dropout, self.hidden2tag = nn.Dropout(0.1), nn.Linear(24, 5)

    def forward(self, sentences: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(sentences.T))
        return self.hidden2tag(self.dropout(states))


@architecture("LSTM tagger")
def lstm_tagger() -> Setup:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    texts, tags = torch.randint(TOKENS, (EXAMPLES, LENGTH)), torch.randint(5, (EXAMPLES, LENGTH))
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(
            model,
            optimizer,
            lambda ids: F.cross_entropy(model(texts[ids]).flatten(0, 1), tags[ids].T.flatten()),
            clip=5.0,
        ),
        texts[:1],
        lambda output: output[-1, :, 2],
        "hidden2tag",
    )


class Encoder(nn.Module):
    """As in torch's tutorial: sequence first, sines for positions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, 4)
        place = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("sines", torch.stack([place.sin(), place.cos()], dim=-1).flatten(1)[:, None])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.T) * math.sqrt(self.width) + self.sines
        return self.decoder(self.encoder(x).mean(dim=0))


@architecture("nn.TransformerEncoder")
def transformer_encoder() -> Setup:
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    texts, labels = torch.randint(TOKENS, (EXAMPLES, LENGTH)), torch.randint(4, (EXAMPLES,))
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: F.cross_entropy(model(texts[ids]), labels[ids])),
        texts[:1],
        lambda output: output[:, 1],
        "decoder",
        lambda ids: {"example": ids, "label": labels[ids]},
    )


class DeltaNet(nn.Module):
    """Linear attention with the delta rule: a fast weight matrix that is corrected at each token."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.norm = nn.RMSNorm(width)
        self.qkv, self.beta = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 1)
        self.gate = nn.Parameter(torch.zeros(width))
        self.out, self.head = nn.Linear(width, width, bias=False), nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.norm(x)
        q, k, v = self.qkv(y).chunk(3, dim=-1)
        k, beta = F.normalize(F.silu(k), dim=-1), self.beta(y).sigmoid()
        state = x.new_zeros(len(x), x.shape[-1], x.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            error = v[:, t] - torch.einsum("bij,bj->bi", state, k[:, t])
            state = state + torch.einsum("bi,bj->bij", beta[:, t] * error, k[:, t])
            outputs.append(torch.einsum("bij,bj->bi", state, q[:, t]))
        return self.head(x + self.gate.sigmoid() * self.out(torch.stack(outputs, dim=1)))


@architecture("DeltaNet")
def delta_net() -> Setup:
    model = DeltaNet()
    return language_model(model, torch.optim.AdamW(model.parameters(), lr=2e-3), "head")


class Experts(nn.Module):
    """Each token goes to the two best of four experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, chosen = self.router(rows).softmax(-1).topk(2)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, rank = (chosen == number).nonzero(as_tuple=True)
            output = output.index_add(0, row, shares[row, rank, None] * expert(rows[row]))
        return output.view_as(x)


@architecture("Mixture of experts")
def mixture_of_experts() -> Setup:
    model = nn.Sequential()
    model.add_module("embedding", nn.Embedding(TOKENS, 16))
    model.add_module("experts", Experts(16))
    model.add_module("norm", nn.LayerNorm(16))
    model.add_module("head", nn.Linear(16, TOKENS))
    return language_model(model, torch.optim.AdamW(model.parameters(), lr=2e-3), "head")


class BagOfWords(nn.Module):
    """torch's tutorial of text classification."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(30_000, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        return self.fc(self.embedding(tokens, offsets))


@architecture("EmbeddingBag classifier")
def bag_of_words() -> Setup:
    model = BagOfWords()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    texts = [torch.randint(30_000, (3 + number % 6,)) for number in range(EXAMPLES)]
    labels = torch.randint(4, (EXAMPLES,))

    def loss(ids: Tensor) -> Tensor:
        some = [texts[number] for number in ids]
        offsets = torch.tensor([0, *map(len, some[:-1])]).cumsum(0)
        return F.cross_entropy(model(torch.cat(some), offsets), labels[ids])

    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, loss, clip=0.1),
        (texts[0], torch.tensor([0])),
        lambda output: output[:, 1],
        "fc",
        lambda ids: {"example": ids, "label": labels[ids]},
    )


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


@architecture("LoRA by hand")
def lora_by_hand() -> Setup:
    model = NanoGPT()
    model.requires_grad_(False)
    for block in model.transformer["h"]:  # type: ignore[union-attr]
        block.attn.c_attn = LoraLinear(block.attn.c_attn)
    trained = [p for p in model.parameters() if p.requires_grad]
    return language_model(model, torch.optim.AdamW(trained, lr=1e-2), "lm_head")
