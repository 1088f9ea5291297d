"""Models under `torch.distributed.fsdp.fully_shard` (FSDP2): which part of each parameter this process holds.

Modules compute with whole parameters, which torch gathers for each forward and backward pass, so hooks
see keys and errors as usual. What the optimizer trains, its state and its gradients are shards: some rows, of dimension
0, in each process. Nothing is gathered for recording while the model trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from spotlights.errors import UnsupportedError
from spotlights.layers import LinearMap, WeightPart
from spotlights.layers.adapter import class_of
from spotlights.recording.reports import some_of
from spotlights.torch_internals import version


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Its class is not imported for that, which takes a while."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Any:
    """The numbers of a tensor that this process holds; no copy."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_version(tensor: Shaped[Tensor, "..."]) -> int:
    """How often a DTensor was changed in place: by optimizers and clipping, or (its numbers alone) by FSDP2."""
    return version(tensor) + version(local(tensor))


@dataclass(frozen=True)
class ParameterShard:
    """The part of a parameter that this process holds, as a part of the matrix or vector in the memory."""

    box: tuple[slice, ...]
    """Its rows and columns there."""
    strides: tuple[int, ...]
    offset: int
    """Where the entries of this part are among the numbers that the process holds."""
    matrix_shape: tuple[int, ...]
    """Of the whole parameter in the memory."""
    whole: bool
    """Every process holds all of the parameter (HSDP with replicas alone)."""
    first: bool
    """Whether this process is the one of several with the same part that writes it."""

    def of(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """This part of the parameter, of its gradient or of the optimizer's state, as a matrix or vector; a view."""
        held = local(tensor)
        held = held if held.is_contiguous() else held.contiguous()
        return held.as_strided(self.shape, self.strides, held.storage_offset() + self.offset if self.size else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.matrix_shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def written(self) -> list[int]:
        """The box as the manifest has it; empty if another process writes this part."""
        return [end for part in self.box for end in (part.start, part.stop)] if self.first else []


def shards_of(linear: LinearMap, name: str) -> dict[str, ParameterShard]:
    """The shards of a layer's parameters by name; empty if the model is not sharded."""
    return {
        parameter: _shard(part, lambda tensor, parameter=parameter: linear.kept(parameter, tensor), name)
        for parameter, part in linear.parameters.items()
        if is_distributed(part.parameter)
    }


def _shard(part: WeightPart, kept: Callable[[Tensor], Tensor], layer: str) -> ParameterShard:
    parameter: Any = part.parameter
    mesh, placements = parameter.device_mesh, parameter.placements
    by_rows = [number for number, placement in enumerate(placements) if placement.is_shard()]
    if len(by_rows) > 1 or any(placements[number].dim for number in by_rows):
        raise UnsupportedError(
            f'The parameters of layer "{layer}" are divided as {placements}. Spotlights records parameters that '
            "fully_shard divides along dimension 0, without tensor parallelism. Name other layers with layers=…."
        )
    count, number = (mesh.size(by_rows[0]), mesh.get_local_rank(by_rows[0])) if by_rows else (1, 0)
    replicas = [mesh.get_local_rank(dim) for dim in range(mesh.ndim) if dim not in by_rows]
    size = parameter.shape[0]
    start, stop = (min(end * math.ceil(size / count), size) for end in (number, number + 1))
    assert local(parameter).shape[0] == stop - start, "rows are divided into equal shares, the last one smaller"
    everything = torch.empty(parameter.shape, dtype=torch.int8)
    matrix = kept(everything)
    if matrix.untyped_storage().data_ptr() != everything.untyped_storage().data_ptr():
        raise UnsupportedError(
            f'Layer "{layer}" cannot be recorded under fully_shard: its weight is stored in another order than the '
            "module has it. Name other layers with layers=…."
        )
    row = max(everything.stride(0), 1)  # how many numbers a row of the parameter has
    box = [slice(0, length) for length in matrix.shape]
    strides = matrix.stride()
    flat = matrix.numel() in matrix.shape
    # Dimension `dim` of the matrix counts rows of the parameter; or its numbers, if it was flattened.
    counting = (dim for dim, stride in enumerate(strides) if flat or stride % row == 0)
    dim = max(counting, key=lambda dim: matrix.shape[dim])
    ends = (-(-(end * row - matrix.storage_offset()) // strides[dim]) for end in (start, stop))
    box[dim] = slice(*(min(max(end, 0), matrix.shape[dim]) for end in ends))
    at = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
    offset = matrix.storage_offset() + at - start * row
    return ParameterShard(
        tuple(box), tuple(strides), offset, tuple(matrix.shape), whole=count == 1, first=not any(replicas)
    )


def without_numbers(linear: LinearMap) -> LinearMap:
    """The same map of parameters that have shapes and types alone: those of DTensors could not be reshaped."""

    def plain(parts: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
        return {name: replace(part, parameter=_like(part.parameter)) for name, part in parts.items()}

    return replace(linear, weights=plain(linear.weights), biases=plain(linear.biases))


def _like(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)


class WholeParameters:
    """The whole parameters that a module computes with, seen at its first call. Removed like the handle of a hook."""

    def __init__(self, module: nn.Module, use: Callable[[], list[Any]]) -> None:
        """
        Args:
            module: the module.
            use: called with whole parameters in place; returns handles of what it registers on them.
        """
        self._module, self._use = module, use
        self._parameters: list[nn.Parameter] = []
        """Held, so that their `id`s stay theirs."""
        self._handles: list[Any] = []

    def meet(self, *args: object) -> None:
        """Before a call. torch makes the whole parameters once; other ones are met again."""
        known = {id(parameter) for parameter in self._parameters}
        held = list(self._module.parameters())
        if any(id(parameter) not in known for parameter in held):
            self.remove()
            self._parameters, self._handles = held, self._use()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def check_sharded(model: nn.Module) -> None:
    """Refuses DTensors that are not of `fully_shard`, and parameters that it leaves to each process."""
    sharded = [class_of(module) is not type(module) for module in model.modules()]
    distributed = {name: is_distributed(parameter) for name, parameter in model.named_parameters()}
    if any(distributed.values()) and not any(sharded):
        raise UnsupportedError(
            "The model's parameters are DTensors, but not of fully_shard: tensor parallelism cannot be recorded."
        )
    plain = [name for name, own in distributed.items() if not own]
    if any(sharded) and plain:
        raise UnsupportedError(
            f"fully_shard does not manage {some_of(plain)}: each process trains "
            "these parameters for itself. Call fully_shard on the whole model, too."
        )
