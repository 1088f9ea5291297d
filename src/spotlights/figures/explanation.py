"""What one page about an answer shows, layer by layer, for many test inputs in three scans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.attention.attention import Attention, Contributions, Spotlights
from spotlights.attention.measure import ask
from spotlights.attention.questions import AskTop, AskTotals
from spotlights.attention.results import Top, Totals
from spotlights.errors import SettingError, UnsupportedError


@dataclass(frozen=True)
class LayerExplanation:
    """One layer's part of the answers."""

    name: str
    shape: tuple[int, int]
    """Features in and out."""
    top: Top
    """The largest scores of each group."""
    totals: Totals
    """The scores summed over each group."""
    examples: Top | None
    """The examples with the largest scores, summed over visits; None if the memory knows no examples."""
    contributions: Totals | None
    """What each group adds to the target, signed; None if the memory has scores only."""
    initial: Float[Tensor, "queries"] | None
    """What the initial weights add to the target."""
    exact: bool
    """Whether the contributions and the initial part add up to the target itself."""


@dataclass(frozen=True)
class Explanation:
    """What some answers are made of."""

    layers: tuple[LayerExplanation, ...]
    output: Float[Tensor, "queries classes"]
    """What the model answered: logits."""
    targets: tuple[int, ...]
    """The class whose logit the contributions are about, for each query."""
    per: str

    def __len__(self) -> int:
        return len(self.output)

    @property
    def answers(self) -> tuple[int, ...]:
        """The class that the model gave each query."""
        return tuple(self.output.argmax(dim=1).tolist())


def explain(
    spotlights: Spotlights,
    *,
    per: str = "label",
    k: int = 500,
    examples: int = 3,
    targets: Sequence[int] | None = None,
) -> Explanation:
    """Asks all that `plot_explanation` shows, for all queries at once.

    Args:
        spotlights: what `memory.attend(model, images)` gave.
        per: the column whose values are the groups.
        k: how many of the largest scores of each group.
        examples: how many of the examples with the largest scores.
        targets: the class to explain, for each query; by default what the model answered.
    """
    output = spotlights.output
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise SettingError(
            "explain() is about classifiers, whose output has the shape (inputs, classes). "
            "For other models ask the layers: spotlights[layer].top(10)."
        )
    chosen = output.argmax(dim=1).tolist() if targets is None else list(targets)
    answers = spotlights.ask(AskTop(k, per), AskTotals(per))
    contributions = _contributions(spotlights, chosen)
    totals = ask(list(contributions.values()), [AskTotals(per)])
    summed = {name: answer[0] for name, answer in zip(contributions, totals, strict=True)}
    return Explanation(
        tuple(
            LayerExplanation(
                name,
                (attention.layer.entry.in_features, attention.layer.entry.out_features),
                answers[name][0],
                answers[name][1],
                _examples(attention, examples),
                summed.get(name),
                contributions[name].initial if name in contributions else None,
                name in contributions and contributions[name].exact,
            )
            for name, attention in spotlights.items()
        ),
        output.detach().cpu(),
        tuple(chosen),
        per,
    )


def _contributions(spotlights: Spotlights, targets: list[int]) -> dict[str, Contributions]:
    """None at all where the optimizer, the recording or the kernel does not allow them."""
    try:
        return {name: attention.contributions(torch.tensor(targets)) for name, attention in spotlights.items()}
    except UnsupportedError:
        return {}


def _examples(attention: Attention, count: int) -> Top | None:
    known = "example" in attention.view.reader.manifest.columns
    return attention.top(count, by="example") if known and count else None
