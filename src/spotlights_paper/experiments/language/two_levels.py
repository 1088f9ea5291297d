"""Self-attention as two-level retrieval (Remark 3.5 of the paper), for one token of a prompt.

The first level is softmax attention: which tokens of the context the token attends to. The second level is what
Spotlights adds: the layers that compute keys, queries and values are linear, so their outputs are sums over training
tokens. With the query held fixed, contributions and initial part through the key of a context token add up to the
attention logit q·k/√d (here: the *inclination*); with the key held fixed, so they do through the query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

import spotlights as sl
from spotlights.errors import SettingError
from spotlights.results import Passages
from spotlights_paper.experiments.language.gpt import GPT, Looks
from spotlights_paper.experiments.language.trained import TrainedLanguage

_PICKED, _PASSAGES = 3, 3
"""Context tokens that are followed to the second level, and passages for each."""


@dataclass(frozen=True)
class Looked:
    """A token of the context that gets attention, and the training tokens behind it."""

    place: int
    """In the prompt."""
    weight: float
    """Its share of the softmax attention, on average over the heads."""
    inclination: float
    """Its attention logit q·k/√d, on average over the heads."""
    alike: Passages
    """Training tokens with the largest scores; key, query and value layers have the same inputs, so the same scores."""
    by_query: Passages
    """What speaks for looking at it, through the query of the token that looks."""
    by_key: Passages
    """The same, through the key of the token looked at."""
    by_value: Passages
    """What speaks for the answer, through the value that is read there; first order."""


@dataclass(frozen=True)
class TwoLevels:
    """Both levels for one token, in one block."""

    block: int
    prompt: list[str]
    token: int
    """The place of the token that looks."""
    answer: str
    """The next token that the network says."""
    weights: list[list[float]]
    """The softmax attention of each head over the context."""
    looked: list[Looked]
    """The tokens that get most of it."""


def two_levels(trained: TrainedLanguage, prompt: Sequence[str]) -> TwoLevels:
    """Which context tokens the last token picks in the last block of a GPT, and what each projection attends to there.

    Args:
        trained: a GPT's run with errors.
        prompt: its tokens; of more than the context, the last ones count.
    """
    model = trained.model
    if not isinstance(model, GPT):
        raise SettingError("Two levels of retrieval are those of a GPT. Give a run of aesop-gpt.")
    prompt = prompt[-model.context :]
    token, block = len(prompt) - 1, len(model.blocks) - 1
    numbers = trained.data.vocabulary.encode(prompt)[None]
    query, key, value = (f"blocks.{block}.to_{role}" for role in ("query", "key", "value"))
    looks = trained.memory.attend(model, {"tokens": numbers, "looks_in": block}, layers=[query, key])
    answers = trained.memory.attend(model, {"tokens": numbers}, layers=[value])
    weights = looks.output[0, :, token].softmax(dim=-1)
    shares = weights.mean(dim=0)
    said = int(answers.output[0, token].argmax())

    def logit(output: Tensor) -> Tensor:
        return output[:, token, said]

    def passages(attention: sl.Attention, at: int, target: Callable[[Tensor], Tensor] | None = None) -> Passages:
        return attention.passages(trained.data.train.tokens, prompt=prompt, tokens=[at], k=_PASSAGES, target=target)

    looked = []
    for place in shares.topk(min(_PICKED, token + 1)).indices.tolist():
        inclination = inclination_to(token, place)
        looked.append(
            Looked(
                place,
                float(shares[place]),
                float(inclination(looks.output)[0]),
                alike=passages(looks[key], place),
                by_query=passages(looks[query], token, inclination),
                by_key=passages(looks[key], place, inclination),
                by_value=passages(answers[value], place, logit),
            )
        )
    answer = trained.data.vocabulary.tokens[said]
    return TwoLevels(block, list(prompt), token, answer, weights.tolist(), looked)


def inclination_to(token: int, place: int) -> Callable[[Looks], Float[Tensor, "batch"]]:
    """The attention logit of a token for a place, on average over the heads: a target for contributions."""
    return lambda looks: looks[:, :, token, place].mean(dim=1)
