"""Forecasts: the number of interest after retraining without a group, in its own unit, with an interval.

Under a squared loss the joint estimate has a unit once the mean error stands in the place of what training moved:
with `r_i` the mean over visits of an example's error, divided by the loss's second derivative,

    change = −Σ_{i in the group} r_i · [(A Aᵀ + λ·mean(diag A Aᵀ)·I)⁻¹ A F]_i

Retraining draws new initial weights. What of them the training examples do not determine stays in the answer: the part
of F that their gradients do not span, `F − Aᵀ (A Aᵀ + …)⁻¹ A F`, times the spread of the initial weights. Training
determines more than the linear picture says, so half of that is taken (chosen on settings that docs/truth.md does not
report). The interval has this noise twice, for the network as it is and for the one trained on fewer examples, and
takes the change itself for uncertain by its own size.

For classes, influence has no unit. `calibrate` retrains on a few random halves and finds one factor and the noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.errors import MemoryFormatError, SettingError, UnsupportedError, warn
from spotlights.memory.blocks import as_of, meeting
from spotlights.memory.format.manifest import signed, unsigned
from spotlights.memory.format.names import CALIBRATION
from spotlights.memory.reader import MemoryReader
from spotlights.query.example_gradients import LayerQueries
from spotlights.query.forward import Target, answer, numbers_of_interest
from spotlights.query.influence import Influence
from spotlights.query.joint import JointInfluence
from spotlights.results.forecasts import Calibration, Forecast

if TYPE_CHECKING:
    from spotlights.query.attention import Spotlights

_DEVIATIONS = 1.96
_UNDETERMINED = 0.5
"""How much of the initial weights' spread stays in the answer, of what the linear picture says."""
_COLUMNS = ("step", "position")
_KIND = "calibration"
Retrain = Callable[[list[Any]], nn.Module]
"""Trains a network on the examples with these ids, from fresh initial weights."""


def forecast(spot: Spotlights, target: Target, without: Mapping[str, Any], *, curvature: float) -> Forecast:
    """See `Spotlights.forecast`."""
    view = spot.asked.view
    if not without or set(without) & set(_COLUMNS):
        raise SettingError(f"without={dict(without)}: name examples to leave out, such as {{'label': 3}}; not steps.")
    gone = replace(view, selection=as_of(view.reader, meeting(view.reader, without), view.until))
    influence = spot.influence(target)
    joint = influence.joint if influence.loss == "squared" else None
    known = load_calibration(view.reader)
    if known is None and joint is None:
        raise UnsupportedError(
            f"Influence on {view.reader.address} is an order, not a size: for classes a forecast needs "
            "memory.calibrate(retrain, model, inputs, target=…), which trains a few halves."
        )
    before = numbers_of_interest(spot.output, target).detach().double()
    estimate = influence if joint is None else _in_unit(joint, curvature)
    totals = estimate.seen_from(gone).totals("example")
    known_examples = [place for place, example in enumerate(totals.groups) if example is not None]
    examples = int((totals.counts[known_examples] > 0).sum())
    if not 0 < examples < len(known_examples):
        raise SettingError(
            f"without={dict(without)} leaves out {examples} of {len(known_examples)} examples: choose some, not all."
        )
    change = -totals.values[:, known_examples].sum(dim=1)
    if known is None:
        assert joint is not None
        noise = _seeds(spot, target, joint)
        variance = noise.square() * (1 + 1 / (1 - examples / len(known_examples))) + change.square()
        note = "from one run, nothing fitted: retraining is taken to draw new initial weights"
    else:
        change = known.scale * change
        variance = change.new_tensor(known.noise).square() + (known.error * change).square()
        note = f"calibrated on {known.halves} halves and {known.seeds} seeds"
    half = _DEVIATIONS * variance.sqrt()
    after = before + change
    return Forecast(before, after, after - half, after + half, examples, dict(without), note)


def calibrate(
    spot: Spotlights, target: Target, retrain: Retrain, *, halves: int, seeds: int, curvature: float
) -> Calibration:
    """See `Memory.calibrate`."""
    if halves < 2 or seeds < 1:
        raise SettingError(f"calibrate(halves={halves}, seeds={seeds}): give at least 2 halves and 1 seed.")
    asked = spot.asked
    influence = spot.influence(target)
    joint = influence.joint if influence.loss == "squared" else None
    estimate = influence if joint is None else _in_unit(joint, curvature)
    totals = estimate.totals("example")
    known = [place for place, example in enumerate(totals.groups) if example is not None]
    ids, values = [totals.groups[place] for place in known], totals.values[:, known]
    before = numbers_of_interest(spot.output, target).detach().double()

    def changes(members: Sequence[int]) -> Float[Tensor, "inputs"]:
        model = retrain([ids[place] for place in members])
        return answer(model, asked.inputs, target).detach().double() - before

    everyone = list(range(len(ids)))
    noise = torch.stack([changes(everyone) for _ in range(seeds)])
    generator = torch.Generator().manual_seed(0)
    expected, observed = [], []
    for _ in range(halves):
        order = torch.randperm(len(ids), generator=generator)
        expected.append(-values[:, order[len(ids) // 2 :]].sum(dim=1))
        observed.append(changes(order[: len(ids) // 2].sort().values.tolist()))
    predicted, seen = torch.stack(expected), torch.stack(observed)
    size = float(predicted.square().sum())
    scale = float((predicted * seen).sum()) / size if size else 0.0
    rest = float((seen - scale * predicted).square().mean()) - float(noise.square().mean())
    forecasts = scale**2 * float(predicted.square().mean())
    error = math.sqrt(max(rest, 0.0) / forecasts) if forecasts else 0.0
    calibration = Calibration(
        scale, float(noise.square().mean().sqrt()), error, halves, seeds, len(before), asked.view.reader.steps
    )
    keep_calibration(calibration, asked.view.reader)
    return calibration


def keep_calibration(calibration: Calibration, reader: MemoryReader) -> None:
    """Writes a calibration beside the memory; what was computed for hours is not lost where nothing can be written."""
    text = json.dumps({"spotlights": _KIND, "memory": _identity(reader), **asdict(calibration)}).removesuffix("}")
    try:
        reader.store.write(CALIBRATION, [np.frombuffer(signed(text.encode()), np.uint8)])
    except OSError as error:
        message = f"{asdict(calibration)} could not be kept in {reader.address}, so forecasts do not know it: {error}."
        warn(message)


def load_calibration(reader: MemoryReader) -> Calibration | None:
    """What `calibrate` kept; nothing if the memory is not the one that was calibrated."""
    store, address = reader.store, reader.store.describe(CALIBRATION)
    if not store.exists(CALIBRATION):
        return None
    try:
        kept = unsigned(store.read(CALIBRATION), address)
        if (kept.pop("spotlights"), kept.pop("memory")) != (_KIND, _identity(reader)):
            return None
        calibration = Calibration(**kept)
        numbers, counts = (
            (calibration.scale, calibration.noise, calibration.error),
            (calibration.halves, calibration.seeds, calibration.inputs, calibration.steps),
        )
        if not (all(type(n) is float and math.isfinite(n) for n in numbers) and all(type(n) is int for n in counts)):
            raise ValueError(f"it says {calibration!r}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise MemoryFormatError(f"{address} cannot be used: {error}. Delete the file, or calibrate again.") from error
    return calibration


def _identity(reader: MemoryReader) -> list[str]:
    """What changes whenever the memory does."""
    return [reader.manifest.run, *(segment.checksum for segment in reader.manifest.segments[-1:])]


def _in_unit(joint: JointInfluence, curvature: float) -> Influence:
    return Influence([joint.in_unit(curvature)])


def _seeds(spot: Spotlights, target: Target, joint: JointInfluence) -> Float[Tensor, "inputs"]:
    """The standard deviation of the answer over initial weights."""
    reader = spot.asked.view.reader
    asked: dict[str, LayerQueries] = {
        name: spot[name].layer_queries(spot[name].rows_of_inputs(target)) for name in joint.layers
    }
    variance = torch.zeros(len(joint), dtype=torch.float64)
    for name, layer in joint.layers.items():
        weights = [reader.initial[f"{name}/{weight}"].double() for weight in reader.layer(name).entry.weight_columns]
        spread = torch.cat([weight.flatten() for weight in weights]).var(correction=0)
        variance += spread * layer.not_spanned(asked[name], joint.solved)
    return _UNDETERMINED * variance.sqrt()
