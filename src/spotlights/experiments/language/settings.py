"""What the language models have in common. Each experiment adds its own on top."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The text, and what every network that reads one has."""

    text: str | None = None
    """A text file of your own."""
    tokens: int | None = None
    """Only the first so many tokens of the training text; None for all."""
    steps: int
    """Optimizer steps in all."""
    lr: float
    clip: float
    """The norm that gradients are clipped to."""
    batch: int
    """Stretches of the text that are read side by side."""
    dtype: str = "float32"
    """How keys and errors are kept."""
    context: int = 200
    """Tokens that the network reads before it is asked about one of the test text."""
    kernels: tuple[str, ...] = ("cosine", "cosine-parts", "dot")
    """What the passages are found with."""


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(TextSettings):
    """The paper's network, how it is trained and recorded, and how closely one looks afterwards."""

    embedding: int
    """Numbers that a token is turned into."""
    projection: int | None = None
    """Then a linear layer to so many; None for none."""
    hidden: int
    """Of the one LSTM layer."""
    initial_embedding: float | None = None
    """Embeddings start anywhere between minus and plus this; None: as torch has it, normal with variance 1."""
    dropout: float = 0.0
    """Of the embeddings, in training."""
    output_dropout: float = 0.0
    """Of what the LSTM says, before the softmax."""
    cutoffs: tuple[int, ...] = ()
    """An adaptive softmax: frequent words have more weights than rare ones. Empty for a plain one."""
    sparse: bool = False
    """Update only the embeddings of the words in the batch, with an optimizer of their own."""
    optimizer: str = "adam"
    """"adam" as the paper has it; "sgd" for contributions, which then are one number for each step."""
    momentum: float = 0.9
    """Of SGD."""
    falls_from: float | None = None
    """The share of the steps after which the learning rate falls linearly to zero; None for never."""
    clip: float
    """Of all but sparse gradients: Adam undoes a common factor."""
    unroll: int
    """Tokens in a step; the state goes on to the next one."""
    layers: tuple[str, ...] | None = ("rnn*",)
    """What is recorded; None for every layer."""
    errors: bool = False
    """Also record errors: contributions become possible, and the memory three times as large."""
    fold: bool = True
    """Add up the keys of all visits to a token: the totals of scores stay the same."""
    fold_from: int = 0
    """Only visits from this step on: early ones come from an untrained network."""
    asked: int = 1000
    """Test positions over which the passages are judged."""


LAPTOP_CHARACTERS = {
    "steps": 1900,
    "projection": 256,
    "hidden": 256,
    "lr": 2e-3,
    "falls_from": 0.5,
    "batch": 32,
    "unroll": 100,
}
"""A quarter of an hour at most on two cores, whatever the text; 50 epochs of Æsop's Fables."""

LAPTOP_WORDS = {
    "steps": 9330,
    "lr": 2e-3,
    "falls_from": 0.5,
    "initial_embedding": 0.1,
    "dropout": 0.2,
    "output_dropout": 0.2,
    "cutoffs": (1000, 6000),
    "sparse": True,
    "batch": 32,
    "unroll": 35,
}
"""The same for words; 5 epochs of WikiText-2."""

SGD_CHARACTERS = {
    "steps": 380,
    "projection": None,
    "hidden": 128,
    "optimizer": "sgd",
    "lr": 0.5,
    "batch": 32,
    "unroll": 100,
    "layers": None,
    "errors": True,
    "fold": False,
}
"""Every visit with its errors, for exact contributions."""

SGD_WORDS = {
    "tokens": 300_000,
    "steps": 540,
    "optimizer": "sgd",
    "lr": 0.5,
    "dropout": 0.2,
    "cutoffs": (1000, 6000),
    "batch": 32,
    "unroll": 35,
    "errors": True,
    "fold": False,
}
"""The same for words."""

QUICK = {
    "steps": 40,
    "embedding": 16,
    "projection": None,
    "hidden": 24,
    "lr": 1e-2,
    "batch": 8,
    "unroll": 20,
    "context": 40,
    "asked": 40,
}
"""What makes an experiment small enough for a test: a few seconds, and still some learning."""
