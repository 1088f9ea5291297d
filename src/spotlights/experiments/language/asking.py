"""Asking a language model for passages: the same functions for the command, the report and the explorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Int64
from torch import Tensor

from spotlights.attention.passage_results import Passages
from spotlights.datasets import TextDataset, Vocabulary
from spotlights.errors import SettingError, UnknownNameError
from spotlights.experiments.language.gpt import GPT
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
    layer: str | None = None,
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
        layer: whose keys are compared; the run's own choice by default.
    """
    layer, (prompt, numbers) = layer or trained.layer, _read(trained, prompt)
    spot = trained.memory.attend(
        trained.model, {"tokens": numbers, "last": True}, layers=[layer], kernel=kernel, part=part
    )
    return spot[layer].passages(trained.data.train.tokens, prompt=prompt, tokens=asked, k=k, around=around)


def passages_toward(
    trained: TrainedLanguage,
    prompt: Sequence[str],
    *,
    token: str | None = None,
    k: int = 10,
    around: int | None = None,
    layer: str | None = None,
) -> Passages:
    """The passages of the training text that add most to the logit of the token after a prompt, through its end.

    Args:
        trained: a run whose memory has errors.
        prompt: its tokens, from `prompt_of` or `before`.
        token: what may come next; what the network says by default.
        k: how many passages.
        around: show at most so many tokens on either side of one that adds to it.
        layer: through which layer; by default the last one, where all contributions and the initial part make up the
            logit.
    """
    layer, (prompt, numbers) = layer or trained.head, _read(trained, prompt)
    vocabulary = trained.data.vocabulary
    if token is not None and token not in vocabulary.tokens:
        raise UnknownNameError(
            f"{token!r} is no {vocabulary.unit} of the training text. Give one of its {vocabulary.unit}s."
        )
    spot = trained.memory.attend(trained.model, {"tokens": numbers}, layers=[layer])
    number = int(spot.output[0, -1].argmax() if token is None else vocabulary.encode([token])[0])
    end = len(prompt) - 1

    def logit(output: Tensor) -> Tensor:
        return output[:, -1, number]

    found = spot[layer].passages(trained.data.train.tokens, prompt=prompt, k=k, around=around, target=logit)
    initial = float(spot[layer].at(end).contributions(logit).initial[0])
    toward = (
        f"toward {vocabulary.tokens[number]!r} as the next {vocabulary.unit}: {float(logit(spot.output)[0]):.2f}, "
        f"of which the initial weights of {layer} make {initial:+.2f} through this token"
    )
    return replace(found, note="; ".join(each for each in (toward, found.note) if each))


def _read(trained: TrainedLanguage, prompt: Sequence[str]) -> tuple[Sequence[str], Int64[Tensor, "1 length"]]:
    """As much of the end of a prompt as the network can see."""
    prompt = prompt[-trained.model.context :] if isinstance(trained.model, GPT) else prompt
    return prompt, trained.data.vocabulary.encode(prompt)[None]


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
