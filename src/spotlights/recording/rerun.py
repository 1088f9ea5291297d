"""A network trained again from a checkpoint of a recipe: the user's loss, and the optimizer's own steps on a copy.

Whatever happened to the gradients before a step (clipping, loss scaling) is one factor for each parameter. It follows
from the entries of the gradient that the recipe kept. At each checkpoint the weights are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

from spotlights.errors import MemoryFormatError, SettingError, SpotlightsError, UnsupportedError
from spotlights.layers.adapter import unwrapped
from spotlights.memory.files import check_content
from spotlights.memory.format.recipe import (
    HEADER,
    MODEL,
    OPTIMIZER,
    AnnouncedBatch,
    StepRecipe,
    plain_data,
    read_step,
)
from spotlights.memory.layer_reader import Segment
from spotlights.memory.reader import MemoryReader
from spotlights.optimizers.replayed import MakeOptimizer, option_numbers, options_of
from spotlights.recording.recipe import gradient_entries, named_tensors, trained_parameters

if TYPE_CHECKING:
    from spotlights.recording.recorder import Recorder

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a batch, given its examples: one number, or one for each example, whose mean is taken."""
LeftOut = Callable[[AnnouncedBatch, int], Bool[np.ndarray, "..."]]
"""Which examples of a batch of a step are left out."""
_MISFIT = 0.01
"""A recomputed gradient that differs by more than this share from the recorded one is not that of the same loss."""
MOST_THREADS = 1 << 10
_OPTIMIZERS: dict[str, Any] = {
    name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)
}
_NEIGHBOURS = 8
"""A factor is known up to rounding: so many of the numbers next to it are tried, until one fits bit for bit."""


@dataclass(frozen=True)
class Source:
    """A recipe, and what its slots are computed with."""

    reader: MemoryReader
    model: nn.Module
    loss: Loss
    make: MakeOptimizer | None
    """The optimizer's class; None for the one of `torch.optim` that has the recorded name."""
    _whole: set[str] = field(default_factory=set, compare=False, repr=False)

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps before which there is one."""
        steps = [segment.entry.first_step for segment in self.reader.segments if HEADER in segment.layout]
        if self.reader.segments and steps[:1] != [0]:
            raise MemoryFormatError(f"{self.reader.address} is damaged: it has no checkpoint before its first step.")
        return steps

    @property
    def names(self) -> Sequence[str] | None:
        """The examples' names by number; None where examples are numbers."""
        column = self.reader.manifest.columns.get("example")
        return column.strings if column is not None and column.kind == "string" else None

    @property
    def bounds(self) -> list[int]:
        """Where stretches begin, and the last one ends."""
        if not self.checkpoints:
            raise UnsupportedError(f"{self.reader.address} is a recipe without steps: it has no slots yet.")
        return [*self.checkpoints, self.reader.steps]

    def segment(self, step: int) -> Segment:
        """The file of a step, compared with its checksum: a wrong number would spread over all steps that follow."""
        segment = next(s for s in self.reader.segments if s.entry.first_step <= step < s.entry.end_step)
        if segment.entry.file not in self._whole:
            check_content(segment.store, segment.entry)
            self._whole.add(segment.entry.file)
        return segment

    @contextmanager
    def readable(self, step: int) -> Iterator[None]:
        """Turns any error in reading a step into one that names the file."""
        try:
            yield
        except SpotlightsError:
            raise
        except Exception as error:
            file = self.reader.store.describe(self.segment(step).entry.file)
            raise MemoryFormatError(
                f"{file} holds a recipe that step {step} cannot be computed from: {type(error).__name__}: {error}."
            ) from error

    def step(self, step: int) -> StepRecipe:
        segment = self.segment(step)
        with self.readable(step):
            recipe = read_step(segment.required, step - segment.entry.first_step)
            if not all("example" in batch.columns for batch in recipe.batches):
                raise ValueError("a batch has no examples")
            return recipe

    def moved_before(self, step: int) -> bool:
        """Whether the loop itself changed weights before a step, which cannot be computed again."""
        return any(bool(self.reader.log(layer).moved[step]) for layer in self.reader.layers)


class Rerun:
    """A copy of the network, trained again from a checkpoint on."""

    def __init__(self, source: Source, step: int) -> None:
        self._source = source
        self.step = step
        self.off = 0.0
        """How far weights were off at checkpoints, relative to them, at most."""
        with torch.inference_mode(False):
            self.model = copy.deepcopy(unwrapped(source.model))
        with source.readable(step):
            self._header = plain_data(source.segment(step).required(HEADER))
            self.threads = int(self._header["threads"])
            if not 1 <= self.threads <= MOST_THREADS:
                raise ValueError(f"it was recorded with {self.threads:,} threads")
            self._load_weights(step)
            self.optimizer = self._optimizer()
            self._parameters = trained_parameters(self.model, self.optimizer)
            self._load_state(step)
        self.factors: dict[str, float] = {}
        """By parameter: what its gradient was multiplied by before the last step that was computed again."""
        self._checked = False

    # -- a checkpoint --------------------------------------------------------------------------

    def _load_weights(self, step: int) -> None:
        segment, own = self._source.segment(step), named_tensors(self.model)
        stored = {name.removeprefix(MODEL) for name in segment.layout if name.startswith(MODEL)}
        different = sorted(stored ^ own.keys()) or [
            n for n, t in own.items() if segment.required(MODEL + n).numel() != t.numel()
        ]
        if different:
            raise SettingError(
                f"The model is not the one that {self._source.reader.address} was recorded with: it differs in "
                f"{', '.join(different[:5])}. Give a network of the same structure; its weights do not matter."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(segment.required(MODEL + name).reshape(tensor.shape))
        training, gradients = set(self._header["training"]), set(self._header["gradients"])
        for name, module in self.model.named_modules():
            module.training = name in training
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in gradients)
            parameter.grad = None

    def _optimizer(self) -> Optimizer:
        name = self._header["optimizer"]
        make = self._source.make or _OPTIMIZERS.get(name)
        if make is None:
            raise SettingError(
                f"{self._source.reader.address} was trained with {name}, which is not one of torch.optim. Give its "
                f"class: sl.open(path, model=model, recompute=loss, optimizer={name})."
            )
        parameters = dict(self.model.named_parameters())
        groups = []
        for group in self._header["groups"]:
            options = {n: tuple(v) if isinstance(v, list) else v for n, v in group.items() if n != "params"}
            groups.append({**options, "params": [parameters[n] for n in group["params"]]})
        try:
            optimizer = make(groups)
        except (TypeError, ValueError) as error:
            raise SettingError(f"{name} cannot be made from the recipe's options: {error}") from error
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            group.update({n: v for n, v in given.items() if n != "params"})
        return optimizer

    def _load_state(self, step: int) -> None:
        segment, fused = self._source.segment(step), any(group.get("fused") for group in self.optimizer.param_groups)
        for name, parameter in self._parameters.items():
            state: dict[str, Any] = dict(self._header["state"].get(name, {}))
            prefix = f"{OPTIMIZER}{name}/"
            for stored in (n for n in segment.layout if n.startswith(prefix)):
                key, tensor = stored.removeprefix(prefix), segment.required(stored)
                of_parameter = tensor.numel() == parameter.numel() and key != "step"
                if not of_parameter and tensor.numel() != 1 and fused:  # whose kernels trust the sizes
                    raise ValueError(f"the state {key!r} of {name!r} has {tensor.numel():,} numbers")
                if of_parameter and parameter.ndim:
                    like = torch.empty_like(parameter, dtype=parameter.dtype if tensor.is_floating_point() else None)
                    state[key] = like.copy_(tensor.reshape(parameter.shape))
                else:
                    state[key] = tensor.clone().reshape(() if tensor.numel() == 1 else tensor.shape)
            if state:
                self.optimizer.state[parameter] = state

    def compare(self, step: int) -> None:
        """Compares the network before a step with the recipe's checkpoint, if there is one; goes on from that one."""
        if step not in self._source.checkpoints:
            return
        segment = self._source.segment(step)
        with self._source.readable(step):
            pairs = ((t.detach(), segment.required(MODEL + n)) for n, t in named_tensors(self.model).items())
            off = max(relative_difference(own, kept) for own, kept in pairs)
            if off:
                self._load_weights(step)
                self.optimizer.state.clear()
                self._load_state(step)
                if not self._source.moved_before(step):
                    self.off = max(self.off, off)

    # -- a step --------------------------------------------------------------------------------

    def take(self, step: int, recorder: Recorder | None = None) -> None:
        """Computes one step again."""
        if step != self.step:
            self.compare(step)
        recipe = self._gradients(step, recorder=recorder)
        with self._source.readable(step):
            self._scale(step, recipe)
        self._step(step, recipe)

    def take_without(self, step: int, left_out: LeftOut, clip: float | None) -> None:
        """Takes another step than the recorded one: without some of its examples; none at all if none are left."""
        recipe = self._gradients(step, left_out)
        if any(p.grad is not None for p in self._parameters.values()):
            if clip is not None:
                nn.utils.clip_grad_norm_(list(self._parameters.values()), clip)
            self._step(step, recipe)

    def take_without_weight(self, step: int, left_out: Sequence[int], factors: Mapping[str, float]) -> None:
        """Takes another step than the recorded one: the losses of some examples count 0 in the mean of the batch.

        Args:
            step: which one.
            left_out: the numbers of these examples.
            factors: what to multiply each parameter's gradient by.
        """
        recipe = self._gradients(step, lambda batch, step: np.isin(batch.columns["example"], left_out), weigh=True)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad.mul_(factors[name])
        self._step(step, recipe)

    def other_factor(self, step: int, clip: float | None) -> float | None:
        """By what the recorded step's gradient was multiplied, if clipping does not do the same; changes nothing."""
        random, buffers = torch.get_rng_state(), {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        recipe = self._gradients(step)
        torch.set_rng_state(random)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0
        expected = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        factors = [f for f in self._scale(step, recipe) if f is not None]
        return next((f for f in factors if abs(f - expected) > _MISFIT * expected), None)

    def _gradients(
        self, step: int, left_out: LeftOut | None = None, *, weigh: bool = False, recorder: Recorder | None = None
    ) -> StepRecipe:
        """Computes the gradients of a step from its batches, which are announced to a recorder.

        Args:
            step: which one.
            left_out: the examples without which they are computed.
            weigh: whether these get the weight 0 in the mean of a batch, instead of being no part of the batch.
            recorder: of the slots.
        """
        recipe = self._source.step(step)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in recipe.batches:
            if recorder is not None:
                recorder.announce(batch)
            ids = batch.columns["example"]
            kept = np.full(ids.shape, True) if left_out is None else ~left_out(batch, step)
            if not weigh and not kept.all():
                ids = ids[kept]
            if not ids.size:
                continue
            losses = self.losses_of(step, batch, ids)
            losses = losses * torch.from_numpy(kept).to(losses.device) if weigh else losses
            (losses if losses.ndim == 0 else losses.mean()).backward()
        return recipe

    def losses_of(self, step: int, batch: AnnouncedBatch, ids: Shaped[np.ndarray, "..."]) -> Tensor:
        """What the user's function gives for examples of a batch, with the random numbers that it had."""
        with self._source.readable(step):
            if batch.random is not None:
                torch.set_rng_state(torch.from_numpy(batch.random.view(np.uint8)))
            examples = self._examples(ids)
        try:
            loss = self._source.loss(self.model, examples)
        except SpotlightsError:
            raise
        except Exception as error:
            raise SettingError(
                f"recompute= failed at step {step} of {self._source.reader.address}: {type(error).__name__}: {error}."
            ) from error
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise SettingError(f"recompute= must return a loss with a gradient; it returned {loss!r}.")
        return loss

    def _step(self, step: int, recipe: StepRecipe) -> None:
        with self._source.readable(step):
            numbers = iter(recipe.options.tolist())
            for group in self.optimizer.param_groups:
                logged = {name: next(numbers) for name in option_numbers(group)}
                group.update(options_of(logged, group))
            self.optimizer.step()

    def _examples(self, ids: Shaped[np.ndarray, "..."]) -> Any:
        names = self._source.names
        return torch.from_numpy(ids) if names is None else np.array([*names, ""], dtype=object)[ids].tolist()

    def _scale(self, step: int, recipe: StepRecipe) -> list[float | None]:
        """Does to the gradients what was done before the step, as the entries that the recipe kept tell.

        Returns the factor of each parameter's gradient; None where there was none.
        """
        sizes = [min(64, p.numel()) for p in self._parameters.values()]
        kept = np.split(recipe.gradients, np.cumsum(sizes)[:-1])
        for parameter, seen in zip(self._parameters.values(), kept, strict=True):
            missing, own = bool(np.isnan(seen).all()), parameter.grad
            if own is None and not missing:
                parameter.grad = torch.zeros_like(parameter)
            elif own is not None and missing and not own.is_sparse and own.isfinite().all():
                parameter.grad = None  # taken away before the step
        entries = gradient_entries(self._parameters)
        known = [
            None if own is None or np.isnan(seen).any() or not own.any() else _factor(own, seen.astype(own.dtype))
            for own, seen in zip(entries, kept, strict=True)
        ]
        others = {factor for factor in known if factor is not None}
        common = others.pop() if len(others) == 1 else 1.0
        if not self._checked:
            self._check(step, entries, kept, known)
        for (name, parameter), own_factor in zip(self._parameters.items(), known, strict=True):
            factor = self.factors[name] = common if own_factor is None else own_factor
            if factor != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(torch.tensor(factor, dtype=parameter.grad.dtype, device=parameter.grad.device))
        return known

    def _check(
        self, step: int, entries: Sequence[Any], kept: Sequence[np.ndarray], known: Sequence[float | None]
    ) -> None:
        """Refuses a loss that is not that of the run, at the first step."""
        self._checked = True
        worst, where = 0.0, ""
        for name, own, seen, factor in zip(self._parameters, entries, kept, known, strict=True):
            if factor is not None:
                size = float(np.linalg.norm(seen.astype(np.float64)))
                difference = float(np.linalg.norm(seen - factor * own.astype(np.float64)))
                share = difference / size if size else float(difference > 0)
                worst, where = max((worst, where), (share, name))
        if worst > _MISFIT:
            raise UnsupportedError(
                f"recompute= is not the loss that {self._source.reader.address} was recorded with: at step {step} its "
                f'gradient of "{where}" differs by {worst:.0%} from the recorded one. Likely other data, labels or '
                "augmentation for the same example ids, another loss, random numbers drawn in another order, or "
                "gradients that the loop changed by more than a factor."
            )


def relative_difference(own: Tensor, kept: Tensor) -> float:
    """0 if two tensors are the same bit for bit."""
    own, kept = own.reshape(-1).cpu(), kept.reshape(-1)
    if torch.equal(own.to(kept.dtype), kept):
        return 0.0
    difference, size = (own.double() - kept.double()).norm(), kept.double().norm()
    return max(float(difference / size) if size else float(difference), 1e-300)


def _factor(own: np.ndarray, seen: np.ndarray) -> float:
    """By which gradients were multiplied: bit for bit if there is such a number."""
    if np.array_equal(own, seen):
        return 1.0
    wide = own.astype(np.float64)
    estimate = own.dtype.type(float(wide @ seen.astype(np.float64)) / float(wide @ wide))
    above = below = estimate
    for _ in range(_NEIGHBOURS):
        for candidate in {above, below}:
            if np.array_equal(own * candidate, seen):
                return float(candidate)
        above, below = np.nextafter(above, own.dtype.type(np.inf)), np.nextafter(below, own.dtype.type(-np.inf))
    return float(estimate)
