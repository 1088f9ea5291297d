"""Asking a language model for passages: the same functions for the command, the report and the explorer."""

from __future__ import annotations

from collections.abc import Sequence

from spotlights.attention.passage_results import Passages
from spotlights.datasets import TextDataset, Vocabulary
from spotlights.errors import SettingError, UnknownNameError
from spotlights.experiments.language.network import LAYER
from spotlights.experiments.language.training import TrainedLanguage

KERNEL = "cosine"
"""What passages are found with unless somebody says otherwise: the plain product favours large keys."""


def passages(
    trained: TrainedLanguage,
    prompt: Sequence[str],
    *,
    asked: Sequence[int] = (-1,),
    k: int = 10,
    kernel: str = KERNEL,
    part: str | None = None,
    around: int | None = None,
) -> Passages:
    """The passages of the training text that tokens of a prompt attend to.

    Args:
        trained: a run, from `open_run` or just trained.
        prompt: its tokens, from `prompt_of` or `before`.
        asked: which of them to ask about.
        k: how many passages.
        kernel: how keys and queries are compared; "dot" is what the network computes, others are for looking.
        part: compare only this part of the keys: "x", the token itself, or "h", what was read before it.
        around: show at most so many tokens on either side of one that is attended to.
    """
    numbers = trained.data.vocabulary.encode(prompt)
    spot = trained.memory.attend(trained.model, {"tokens": numbers[None], "last": True}, kernel=kernel, part=part)
    return spot[LAYER].passages(trained.data.train.tokens, prompt=prompt, tokens=asked, k=k, around=around)


def prompt_of(text: str, vocabulary: Vocabulary) -> Sequence[str]:
    """What somebody typed, as tokens."""
    tokens = vocabulary.split(text)
    if not tokens:
        raise SettingError("The prompt is empty. Give some text, such as --prompt 'The Lamb'.")
    return tokens


def before(data: TextDataset, source: str, position: int, context: int) -> Sequence[str]:
    """The tokens of the training or test text up to a position, at most `context` of them."""
    if source not in ("train", "test"):
        raise UnknownNameError(f'No text "{source}". There are: train, test.')
    text = data.train.tokens if source == "train" else data.test.tokens
    if not 0 <= position < len(text):
        raise SettingError(f"There is no position {position}: the {source} text has 0 to {len(text) - 1}.")
    return text[max(0, position + 1 - context) : position + 1]


def find(data: TextDataset, source: str, words: str) -> int | None:
    """The position of the last token of some words, where they first come; line ends count as spaces."""
    text = data.train.tokens if source == "train" else data.test.tokens
    if isinstance(text, str):
        at = text.replace("\n", " ").find(words)
        return None if at < 0 else at + len(words) - 1
    wanted = list(data.vocabulary.split(words))
    for start in range(len(text) - len(wanted) + 1):
        if text[start] == wanted[0] and text[start : start + len(wanted)] == wanted:
            return start + len(wanted) - 1
    return None
