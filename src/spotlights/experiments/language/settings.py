"""What the language models have in common. Each experiment adds its own on top."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """The text, the network, how it is trained and recorded, and how closely one looks afterwards."""

    text: str | None = None
    """A text file of your own."""
    tokens: int | None = None
    """Only the first so many tokens of the training text; None for all."""
    steps: int
    """Optimizer steps in all."""
    embedding: int
    """Numbers that a token is turned into."""
    projection: int | None = None
    """Then a linear layer to so many; None for none."""
    hidden: int
    """Of the one LSTM layer."""
    dropout: float = 0.0
    """Of the embeddings, in training."""
    cutoffs: tuple[int, ...] = ()
    """An adaptive softmax: frequent words have more weights than rare ones. Empty for a plain one."""
    sparse: bool = False
    """Update only the embeddings of the words in the batch, with an optimizer of their own."""
    optimizer: str = "adam"
    """"adam" as the paper has it; "sgd" for contributions, which then are one number for each step."""
    lr: float
    momentum: float = 0.9
    """Of SGD."""
    falls_from: float | None = None
    """The share of the steps after which the learning rate falls linearly to zero; None for never."""
    clip: float
    """The norm that gradients are clipped to. Sparse gradients are left alone: Adam undoes a common factor."""
    batch: int
    """Stretches of the text that are read side by side."""
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
    dtype: str = "float32"
    """How keys and errors are kept."""
    context: int = 200
    """Tokens that the network reads before it is asked about one of the test text."""
    asked: int = 1000
    """Test positions over which the passages are judged."""
    kernels: tuple[str, ...] = ("dot", "cosine")
    """What the passages are found with."""
