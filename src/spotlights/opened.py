"""An opened memory: where every question starts.

A `Memory` is a view: some slots (all of them at first) as of some step (the last one at first). Views cost
nothing, and compose: `memory.as_of(3000).where(source="mnist").without(label=3)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.attention import Attention, Spotlights
from spotlights.attention.attention import KERNELS
from spotlights.attention.forward import ForwardPass
from spotlights.attention.measure import View
from spotlights.attention.suspects import Suspects, find_suspects
from spotlights.dual import dual_model, primal_model, view_parameters
from spotlights.errors import SettingError, UnknownNameError
from spotlights.info import LayerInfo, MemoryInfo, layer_infos
from spotlights.memory.conditions import as_of, meeting
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Everything, Selection
from spotlights.optimizers.replayed import MakeOptimizer
from spotlights.verification import Verification, verify

if TYPE_CHECKING:
    from spotlights.web import Served


def open(path: str | Path) -> Memory:
    """Opens a memory that `record` wrote, also while it is still being recorded."""
    reader = MemoryReader(Path(path))
    return Memory(View(reader, as_of(reader, Everything(), reader.steps), reader.steps))


class Memory:
    """A memory, or a view of one: some of its slots, as of some step."""

    def __init__(self, view: View) -> None:
        self._view = view

    # -- what is in it -------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._view.reader.directory

    @property
    def steps(self) -> int:
        """How many optimizer steps the view looks back on."""
        return self._view.until

    @property
    def columns(self) -> list[str]:
        """What is known of a slot."""
        return list(self._view.reader.manifest.columns)

    @property
    def layers(self) -> dict[str, LayerInfo]:
        """What is known of each recorded layer (of the whole memory, not of the view)."""
        return layer_infos(self._view.reader)

    def __len__(self) -> int:
        """The number of slots of the view, in the layer that has most of them."""
        return self._view.slots

    @property
    def info(self) -> MemoryInfo:
        """What the memory is, as a table."""
        return MemoryInfo(self._view)

    def __repr__(self) -> str:
        layers = ", ".join(self._view.reader.layers)
        return f"Memory({self.path}: {self._view.selection}, {self.steps:,} steps, layers {layers})"

    # -- views ---------------------------------------------------------------------------------

    def where(self, **conditions: Any) -> Memory:
        """Only the slots that meet all conditions: a value, a list of values, or a range per column."""
        return self._with(meeting(self._view.reader, conditions))

    def without(self, **conditions: Any) -> Memory:
        """Only the slots that do not meet all conditions: what if it had never seen these?"""
        return self._with(~meeting(self._view.reader, conditions))

    def __invert__(self) -> Memory:
        view = self._view
        every = as_of(view.reader, Everything(), view.until)
        return Memory(View(view.reader, every & ~view.selection, view.until))

    def as_of(self, step: int) -> Memory:
        """The network as it was after `step` optimizer steps; `as_of(0)` is the initial one."""
        if not 0 <= step <= self.steps:
            raise SettingError(f"as_of({step}): this view has steps 0 to {self.steps}.")
        if step != self.steps:
            self._view.reader.need_visits("what came before a step and what after", "Ask about the whole of it")
        view = self._view
        return Memory(View(view.reader, as_of(view.reader, view.selection, step), step))

    def _with(self, selection: Selection) -> Memory:
        view = self._view
        return Memory(View(view.reader, view.selection & selection, view.until))

    # -- questions -----------------------------------------------------------------------------

    def attend(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        layers: Sequence[str] | None = None,
        kernel: str = "dot",
        part: str | None = None,
    ) -> Spotlights:
        """Runs the model once on the inputs; gives each layer's attention over the slots of this view.

        Args:
            model: the trained network. It is run in eval mode and left as it was.
            inputs: a batch (a tensor), or a tuple or dict of the model's arguments.
            layers: only these; a convolution has a query for each position of each input, so many inputs fill the
                main memory.
            kernel: "dot" is what the network computes; the others are for looking. "cosine" takes no account of how
                large a key is, "cosine-parts" adds up the cosines of the parts of a key that is put together of several
                (`[x; h]` of a recurrent layer), "softmax" is that of transformers.
            part: of such a key, one part alone ("h"), under any kernel; layers without that part are left out.
        """
        if kernel not in KERNELS:
            raise SettingError(f"Unknown kernel {kernel!r}. There are: {', '.join(KERNELS)}.")
        reader = self._view.reader
        parts = {name: entry.parts for name, entry in reader.manifest.layers.items() if entry.parts}
        if part is not None and not any(part in of_layer for of_layer in parts.values()):
            raise UnknownNameError(f'No layer has keys with a part "{part}". There are: {parts or "no parts at all"}.')
        entries = reader.manifest.layers
        if layers is not None:
            entries = {name: entry for name, entry in entries.items() if name in layers or entry.turned}
        forward = ForwardPass(model, inputs, entries)
        for name in layers or ():
            if name not in forward.turned:
                reader.layer(name)  # an unknown one gets its error here
        attentions = {
            name: Attention(self._view, reader.layers[name], forward, kernel, part=part)
            for name, entry in entries.items()
            if forward.calls[name].queries and (part is None or part in entry.parts)
        }
        for use, name in forward.turned.items():
            if forward.calls[use].queries and part is None:
                attentions[use] = Attention(self._view, reader.layers[name], forward, kernel, use=use)
        if layers is not None:
            attentions = {name: attention for name, attention in attentions.items() if name in layers}
        return Spotlights(attentions, forward.output)

    def explore(self, model: nn.Module, inputs: Any, **options: Any) -> Served:
        """Opens the web explorer on this memory; in a notebook, inline. Arguments as for `sl.explore`."""
        from spotlights.web import explore

        return explore(self, model, inputs, **options)

    def suspects(self, k: int = 100, *, layer: str | None = None) -> Suspects:
        """The k training examples of this view that look most mislabelled, with the class the network says instead.

        Ranks by the sum over visits of the norm of the last layer's error (docs/truth.md has how well). Works
        while training still runs.

        Args:
            k: how many.
            layer: the layer that gives the answer; the last one that was recorded by default.
        """
        return find_suspects(self._view, k, layer)

    def parameters(self, layer: str) -> dict[str, Tensor]:
        """Weight and bias that the slots of this view, with the initial part, make up; in float64.

        The weight is the matrix that acts on keys. `primal` gives a network with weights in their own shapes. A layer
        made of several parameters, as an LSTM's is, has these by their names.
        """
        return view_parameters(self._view, layer)

    def weights(self, layer: str) -> Float[Tensor, "out_features in_group"]:
        """The weight matrix that the slots of this view, with the initial part, make up; in float64."""
        found = self.parameters(layer)
        return torch.cat([found[name] for name in self._view.reader.layer(layer).entry.weight_columns], dim=1)

    def final_parameters(self) -> dict[str, dict[str, Tensor]] | None:
        """The weights that the closed recording left, by layer; None while it is still open."""
        reader = self._view.reader
        if reader.final is None or self._view.until != reader.manifest.steps:
            return None
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in reader.final.items():
            layer, parameter = name.rsplit("/", 1)
            found.setdefault(layer, {})[parameter] = value
        return found

    def dual(self, model: nn.Module) -> nn.Module:
        """A copy of the model that computes in dual form from the slots of this view: it attends."""
        return dual_model(self._view, model)

    def primal(self, model: nn.Module, *, layers: Sequence[str] | None = None) -> nn.Module:
        """A copy of the model with the weights of this view: the same answers as `dual`, for many inputs.

        Args:
            model: the trained network.
            layers: only in these layers; the others keep the model's weights.
        """
        chosen = list(self._view.reader.layers) if layers is None else layers
        parameters = {name: self.parameters(name) for name in chosen}
        return primal_model(self._view, model, parameters)

    def verify(
        self,
        model: nn.Module | None = None,
        *,
        files: bool = True,
        parameters: Mapping[str, dict[str, Tensor]] | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> Verification:
        """Compares `a·W_0 + Σ v⊗k` with the trained weights, layer by layer.

        Without a model: with the weights that the closed recording left; for a run that was killed, or as of
        an earlier step, with the entries of the weights that the step log keeps for every step.

        Args:
            model: the trained network.
            files: also read every file and compare it with its checksum.
            parameters: what `parameters(layer)` gave for each layer, if it has been added up already.
            optimizer: for a run whose optimizer has no exact rule: its class, which is then run again on the
                recorded gradients. One of torch's own need not be given.
        """
        return verify(self._view, model, files=files, parameters=parameters, optimizer=optimizer)
