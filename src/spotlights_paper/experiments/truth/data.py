"""What a setting trains on and is asked about: images, tables or texts, with the loss and the number of interest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from spotlights_paper.datasets import load, load_text
from spotlights_paper.experiments.images import normalised

LETTERS = 48
"""In each passage of a text that a language model learns."""
LONG, KNOWN_WORDS = 64, 2048
"""Words in each passage of WikiText-2 that a language model learns, and how many different ones there are."""
WORDS = 8
"""In each passage of a text that is classified."""


@dataclass(frozen=True, eq=False)
class ExampleRows:
    """Some examples."""

    inputs: Tensor
    labels: Tensor
    """A class, a number, or the next token at each position."""
    ids: Int64[Tensor, "n"]
    texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> ExampleRows:
        return ExampleRows(self.inputs[:count], self.labels[:count], self.ids[:count], self.texts[:count])


@dataclass(frozen=True, eq=False)
class Data:
    """The training and test examples of a setting."""

    train: ExampleRows
    test: ExampleRows
    classes: tuple[str, ...] = ()
    kind: str = "classes"
    """"classes", "squared" (a regression) or "tokens" (a language model)."""

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The mean over a batch."""
        if self.kind == "squared":
            return F.mse_loss(output[:, 0], labels)
        return F.cross_entropy(output.flatten(0, -2), labels.flatten())

    def number(self, output: Tensor, labels: Tensor) -> Float[Tensor, "n"]:
        """What is asked about: the margin of the true class, the answer itself, or the log-likelihood of a passage."""
        if self.kind == "squared":
            return output[:, 0]
        if self.kind == "tokens":
            return output.log_softmax(dim=-1).gather(-1, labels[..., None])[..., 0].mean(dim=-1)
        return margins(output, labels)


def margins(output: Float[Tensor, "... classes"], labels: Int64[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The margin of the true class: its logit against all the others together, `log p/(1−p)`."""
    of_label = labels[..., None].expand(*output.shape[:-1], 1)
    others = output.scatter(-1, of_label, float("-inf"))
    return output.gather(-1, of_label)[..., 0] - others.logsumexp(dim=-1)


def load_data(name: str, train: int, test: int) -> Data:
    """The first examples of a source, a permutation of it where its order means something."""
    if name in SOURCES:
        return SOURCES[name](train, test)
    images = normalised(load(name), torch.arange(train), test)
    sides = [ExampleRows(side.inputs, side.labels, side.ids) for side in (images.train, images.test)]
    return Data(sides[0], sides[1], images.train.classes)


def _parts(
    train: int, test: int, inputs: Tensor, labels: Tensor, ids: Tensor, texts: tuple[str, ...] = (), **options: Any
) -> Data:
    """The first examples are for training, the next ones for testing."""
    parts = slice(train), slice(train, train + test)
    first, second = (ExampleRows(inputs[part], labels[part], ids[part], texts[part]) for part in parts)
    return Data(first, second, **options)


def _split(inputs: Any, labels: Any, train: int, test: int, kind: str, classes: Sequence[str] = ()) -> Data:
    """A table, in random order, with columns (and numbers to predict) of mean 0 and standard deviation 1."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(inputs, dtype=torch.float64)[order]
    y = torch.as_tensor(labels)[order]
    train = min(train, len(order) - test)
    x = ((x - x[:train].mean(dim=0)) / x[:train].std(dim=0).clamp_min(1e-9)).float()
    if kind == "squared":
        y = ((y.double() - y[:train].double().mean()) / y[:train].double().std()).float()
    return _parts(train, test, x, y, order, classes=tuple(classes), kind=kind)


def _diabetes(train: int, test: int) -> Data:
    from sklearn.datasets import load_diabetes

    table: Any = load_diabetes()
    return _split(table.data, table.target, train, test, "squared")


def _friedman(train: int, test: int) -> Data:
    from sklearn.datasets import make_friedman1

    return _split(*make_friedman1(train + test, noise=1.0, random_state=0), train, test, "squared")


def _cancer(train: int, test: int) -> Data:
    from sklearn.datasets import load_breast_cancer

    table: Any = load_breast_cancer()
    return _split(table.data, table.target, train, test, "classes", [str(name) for name in table.target_names])


def _passages(train: int, test: int) -> Data:
    """Eight words of Æsop's fables or of WikiText-2: which of the two?"""
    count, sources = (train + test + 1) // 2, ("aesop", "wikitext-2")
    passages: list[tuple[str, int]] = []
    for label, source in enumerate(sources):
        text = load_text(source)
        tokens = text.train.tokens
        words = "".join(tokens).lower().split() if source == "aesop" else [word.lower() for word in tokens]
        words = [word.strip(".,;:!?\"'()_") for word in words]
        words = [word for word in words if word.isalpha()]
        stride = len(words) // count
        passages += [(" ".join(words[i * stride : i * stride + WORDS]), label) for i in range(count)]
    order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(0)).tolist()
    passages = [passages[place] for place in order]
    known = sorted({word for text, _ in passages[:train] for word in text.split()})
    numbers = {word: index + 1 for index, word in enumerate(known)}  # 0: a word that was never seen
    inputs = torch.tensor([[numbers.get(word, 0) for word in text.split()] for text, _ in passages])
    labels = torch.tensor([label for _, label in passages])
    texts = tuple(text for text, _ in passages)
    return _parts(train, test, inputs, labels, torch.arange(len(texts)), texts, classes=sources)


def _letters(train: int, test: int) -> Data:
    """Passages of Æsop's fables, spread over the book, and the next letter at each position."""
    text = load_text("aesop")
    tokens = text.vocabulary.encode(text.train.tokens)
    starts = torch.randperm(len(tokens) // (LETTERS + 1), generator=torch.Generator().manual_seed(0))
    return passages_of(tokens, LETTERS, starts[: train + test], train, lambda row: "".join(text.vocabulary.decode(row)))


def _wiki_words(train: int, test: int) -> Data:
    """Passages of WikiText-2's first articles, and the next word at each position; rare words are one word."""
    tokens = load_text("wikitext-2").train.tokens[: (train + test) * (LONG + 1)]
    known = ["<unk>", *(word for word, _ in Counter(tokens).most_common(KNOWN_WORDS) if word != "<unk>")][:KNOWN_WORDS]
    numbers = {word: number for number, word in enumerate(known)}
    starts = torch.randperm(train + test, generator=torch.Generator().manual_seed(0))
    encoded = torch.tensor([numbers.get(word, 0) for word in tokens])
    return passages_of(encoded, LONG, starts, train, lambda row: " ".join(known[number] for number in row.tolist()))


def passages_of(tokens: Tensor, length: int, starts: Tensor, train: int, decode: Callable[[Tensor], str]) -> Data:
    """Passages of so many tokens, each with the next token at each position."""
    rows = torch.stack([tokens[place * (length + 1) : (place + 1) * (length + 1)] for place in starts.tolist()]).long()
    texts = tuple(map(decode, rows))
    return _parts(train, len(starts) - train, rows[:, :-1], rows[:, 1:], starts, texts, kind="tokens")


SOURCES: dict[str, Callable[[int, int], Data]] = {
    "diabetes": _diabetes,
    "friedman": _friedman,
    "breast-cancer": _cancer,
    "passages": _passages,
    "letters": _letters,
    "wiki-words": _wiki_words,
}
