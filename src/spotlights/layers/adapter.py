"""What Spotlights needs to know about a kind of layer.

Every layer here is, for each of its *rows*, a linear map of a key: `y = M k + b`. M is the weight as a matrix. A linear
layer has one row for each input. A convolution has one for each position of its output, and the key is the patch under
the kernel.

Some layers map several groups of channels separately: a grouped convolution, or a normalisation, in which every feature
is a group. Their M has one block for each group, stacked vertically, `(out_features, in_features / channel_groups)`:
the g-th share of the rows of M acts on the g-th share of the key.

A module may have several linear maps (an LSTM has one for each layer and direction). Each is recorded as a layer, named
after the module and the map. The rest of the code uses `ModuleAdapter`. `LayerAdapter` implements it for modules that
are one linear map.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from spotlights.errors import SettingError
from spotlights.sparse_rows import SparseRows
from spotlights.torch_internals import COMPILED_FROM, COMPILER


@dataclass(frozen=True)
class WeightPart:
    """A parameter that a map uses, some rows of one, or a matrix of a stack."""

    parameter: nn.Parameter
    rows: slice | int | None = None
    """Which rows, or which matrix; None for all."""

    def of(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """These rows of the parameter, of its gradient, or of any tensor of that shape; a view."""
        return tensor if self.rows is None else tensor[self.rows]

    @property
    def value(self) -> Shaped[Tensor, "..."]:
        return self.of(self.parameter.detach())

    @property
    def identity(self) -> tuple[int, int | None]:
        """Equal for parts that are the same numbers."""
        return id(self.parameter), self.rows.start if isinstance(self.rows, slice) else self.rows


@dataclass(frozen=True)
class LinearMap:
    """One linear map `M k + b` in a module, and the parameters that it uses."""

    weights: Mapping[str, WeightPart]
    """M is these matrices side by side. The names are those in the memory."""
    biases: Mapping[str, WeightPart] = field(default_factory=dict)
    """b is the sum of these; an LSTM has two."""
    channel_groups: int = 1
    """How many groups of channels are mapped separately."""
    transposed: bool = False
    """The parameter has the shape `(in_features, out_features)`."""
    as_matrix: Callable[[Tensor], Tensor] = lambda weight: weight
    """A weight, or its gradient, as a matrix; a view if possible."""
    key_parts: Mapping[str, int] = field(default_factory=dict)
    """The parts of a key in order, with their sizes (`{"x": 64, "h": 256}`); empty if a key has no parts."""

    @classmethod
    def of(cls, weight: nn.Parameter, bias: nn.Parameter | None, rows: slice | None = None) -> LinearMap:
        """That of one weight, and of these rows of a bias."""
        return cls({"weight": WeightPart(weight)}, {} if bias is None else {"bias": WeightPart(bias, rows)})

    @property
    def parameters(self) -> dict[str, WeightPart]:
        return {**self.weights, **self.biases}

    def kept(self, name: str, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A parameter, or a tensor of its shape, as a memory stores it: a matrix, or (a bias) a vector."""
        part = self.parameters[name].of(tensor)
        return self.as_matrix(part) if name in self.weights else part.reshape(-1)

    @property
    def columns(self) -> dict[str, int]:
        """How many columns of M each weight has."""
        return {name: self.kept(name, part.parameter).shape[1] for name, part in self.weights.items()}

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape of M."""
        name, part = next(iter(self.weights.items()))
        return self.kept(name, part.parameter).shape[0], sum(self.columns.values())

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the parameter; that of M if there are several."""
        alone = list(self.weights) == ["weight"]
        own = tuple(self.weights["weight"].value.shape) if alone else ()
        return own or self.matrix_shape  # a single number is stored as a matrix

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for maps with the same weights: modules that share weights are one layer of a memory."""
        return tuple(part.identity for part in self.weights.values())


class Call(ABC):
    """One call of a module: the keys, and the errors once gradients are known. It lives until the backward pass ends.

    A call holds neither the tensors that the module returned nor their graph, because their hooks hold the call. Keys
    and errors are those of each map of the module, by name. Rows keep their leading shape `(batch, …, features)`, so
    that the columns of `recorder.batch` can be matched to them. They are flattened when they are stored.
    """

    lead: Sequence[int]
    """The leading shape of the rows of every map."""

    returns_rows: bool = False
    """Whether the module returns the rows of its one map and nothing else."""

    may_repeat: bool = False
    """The keys are data, not the output of another trained layer: the next epoch has them again."""

    nbytes: int = 0
    """About how much memory the call holds."""

    row_places: Int64[Tensor, "rows"] | None = None
    """Where only some places of the leading shape are rows (a packed sequence): their indices in it, flattened."""

    shared: bool | None = False
    """Whether rows may belong to all examples at once, as those of a position embedding; None if only their shape can
    tell."""

    axes: tuple[int, ...] | None = None
    """Which axes of the leading shape may count the examples, the usual one first: (0,) for a convolution, (1, 0) for
    a sequence-first recurrent layer, () for an input without such an axis. None if the kind of layer does not tell."""

    @abstractmethod
    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"] | SparseRows]:
        """The key of each row."""

    @abstractmethod
    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        """The error of each row, the gradient of M k + b, from the gradients of the module's output tensors."""


class OneMapCall(Call):
    """A call of one linear map, whose rows are all that is returned."""

    returns_rows = True

    def __init__(
        self,
        name: str,
        inputs: Shaped[Tensor, "..."] | SparseRows,
        lead: Sequence[int],
        to_keys: Callable[[Any], Tensor | SparseRows],
        to_errors: Callable[[Tensor], Tensor],
    ) -> None:
        """
        Args:
            name: of the map.
            inputs: held until the backward pass.
            lead: the leading shape of the rows.
            to_keys: from the inputs to the key of each row.
            to_errors: from the gradient of the output to the error of each row.
        """
        self._name, self._inputs, self.lead, self.to_keys, self.to_errors = name, inputs, lead, to_keys, to_errors
        self.may_repeat = isinstance(inputs, Tensor) and not inputs.requires_grad
        self.nbytes = inputs.nbytes

    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"] | SparseRows]:
        inputs = self._inputs
        return {self._name: self.to_keys(inputs.detach() if isinstance(inputs, Tensor) else inputs)}

    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        (gradient,) = gradients
        assert gradient is not None, "a backward pass reaches a module only through its output"
        return {self._name: self.to_errors(gradient)}


class ModuleAdapter(ABC):
    """Finds the linear maps in a kind of module, and their keys and errors in a call."""

    kind: ClassVar[str]
    """The name of the kind in memories: letters and dashes. It never changes."""

    last_resort: ClassVar[bool] = False
    """Only for parameters that no other adapter knows."""
    products: ClassVar[bool] = False
    """Where its maps were not seen at work, the step's gradient is recorded as it is."""
    sparse_keys: ClassVar[bool] = False
    """Keys are `SparseRows`: token numbers."""
    used_outside: ClassVar[bool] = False
    """Other modules may use the weight and the bias by `F.linear`, which is then a call of this module."""

    @abstractmethod
    def handles(self, module: nn.Module) -> bool:
        """Whether this adapter describes the module exactly."""

    def refuses(self, module: nn.Module) -> str | None:
        """Why a module of this kind cannot be recorded, in words; None if it can, or if it is of another kind."""
        return None

    @abstractmethod
    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        """The linear maps of the module by name; "" for a map that is the whole module."""

    def before(self, module: nn.Module) -> Any:
        """State from before a call in training that `call` needs, such as the random state of dropout."""
        return None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        """Describes a call, from the module's arguments, its output, and what `before` returned."""
        raise NotImplementedError("the uses of these weights are not seen in the calls of their module")

    def begin(self) -> Sequence[Any]:
        """Resources to release when recording ends, by their `remove` method, like the handles of hooks."""
        return ()


class LayerAdapter(ModuleAdapter):
    """For a module that is one linear map and returns its rows.

    The defaults are right for a layer that, like `nn.Linear`, has its features in the last dimension and a weight of
    shape `(out_features, in_features)`.
    """

    modules: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The classes that the adapter describes, unless it overrides `handles`."""

    transposed: ClassVar[bool] = False
    """The weight has the shape `(in_features, out_features)`."""

    looked_up: ClassVar[bool] = True
    """Keys that are data are stored once: the memory looks each key up among earlier ones."""

    def handles(self, module: nn.Module) -> bool:
        known = computes_as(module, *self.modules) and "weight" in own_parameters(module)
        return known and self.refuses(module) is None

    # -- the parameters ----------------------------------------------------------------------

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        bias = self.bias(module)
        return {
            "": LinearMap(
                weights={"weight": WeightPart(self.weight(module))},
                biases={} if bias is None else {"bias": WeightPart(bias)},
                channel_groups=self.channel_groups(module),
                transposed=self.transposed,
                as_matrix=self.matrix,
                key_parts=self.key_parts(module),
            )
        }

    def weight(self, module: nn.Module) -> nn.Parameter:
        """The parameter that is used as a matrix."""
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        """The parameter with one number for each output feature, if the module has one."""
        return own_parameters(module).get("bias")

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        """The weight, or its gradient, as a matrix; a view if possible."""
        return weight.T if self.transposed else weight

    def channel_groups(self, module: nn.Module) -> int:
        """How many groups of channels are mapped separately."""
        return 1

    def key_parts(self, module: nn.Module) -> dict[str, int]:
        """The parts of a key in order, with their sizes (`{"x": 64, "h": 256}`); empty if a key has no parts."""
        return {}

    # -- a call ------------------------------------------------------------------------------

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any
    ) -> OneMapCall:
        inputs = self.inputs(module, args, kwargs)
        lead = self.lead(module, inputs, output)
        call = OneMapCall("", inputs, lead, partial(self.keys, module), partial(self.errors, module))
        call.may_repeat &= self.looked_up
        call.axes = self.axes(module, inputs)
        return call

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The input, from the arguments of `forward`. It is held until the backward pass."""
        return args[0] if args else next(iter(kwargs.values()))

    def lead(self, module: nn.Module, inputs: Any, output: Shaped[Tensor, "..."]) -> Sequence[int]:
        """The leading shape of the rows."""
        return self.errors(module, output.detach()).shape[:-1]

    def axes(self, module: nn.Module, inputs: Any) -> tuple[int, ...] | None:
        """Which axes of the leading shape may count the examples (see `Call`); None if any may."""
        return None

    def keys(self, module: nn.Module, inputs: Any) -> Float[Tensor, "*lead in_features"] | SparseRows:
        """The key of each row."""
        return inputs

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        """The rows of a tensor that has the shape of the output: of its gradient, or of the output itself."""
        return gradient

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        """The inverse of `errors`: a tensor in the shape of the output, from its rows."""
        return rows


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples and lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in a module's output that can have a gradient, in order."""
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the module itself holds.

    Reading `module.weight` instead would compute a weight under spectral norm, which changes the module's buffers.
    """
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether the module is of one of these classes and computes what the class computes.

    A subclass with its own forward is a different map. So is a module with a computed weight (weight norm, spectral
    norm), which is not among its `own_parameters`.
    """
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


# -- the known kinds -------------------------------------------------------------------------

ADAPTERS: list[ModuleAdapter] = []
"""The adapters of all kinds; `layers/__init__.py` fills the list."""


def register_layer(adapter: ModuleAdapter) -> None:
    """Registers an adapter for your own kind of layer: before recording, and before questions to such a memory."""
    known = adapter_named(adapter.kind)
    if known is not None and type(known) is not type(adapter):
        raise SettingError(f'There is already a kind of layer "{adapter.kind}". Choose another name.')
    if known is None:
        ADAPTERS.insert(0, adapter)


def adapter_for(module: nn.Module) -> ModuleAdapter | None:
    """The adapter that can record this module, if there is one."""
    return next((adapter for adapter in ADAPTERS if not adapter.last_resort and adapter.handles(module)), None)


def adapter_named(kind: str) -> ModuleAdapter | None:
    """The adapter of a kind that a memory names."""
    return next((adapter for adapter in ADAPTERS if adapter.kind == kind), None)


# -- wrappers around a network: `torch.compile`, `DistributedDataParallel`, averages; layers are named without them ----


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model, the module that it wraps, and so on to the network itself."""
    yield model
    if isinstance(model, DataParallel | DistributedDataParallel | AveragedModel):
        yield from wrappers(model.module)
    elif (inner := dict(model.named_children()).get(COMPILED_FROM)) is not None:
        yield from wrappers(inner)


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself."""
    *_, network = wrappers(model)
    return network


def class_of(module: nn.Module) -> type:
    """The class of a module as its author wrote it: `fully_shard` puts two of its own in front."""
    classes = type(module).__mro__
    sharded = next((number + 1 for number, cls in enumerate(classes) if cls.__name__ == "FSDPModule"), 0)
    return classes[sharded]


def unfuse(model: nn.Module) -> None:
    """Makes torch's transformer layers call their submodules. The fused path would use their weights directly."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # a condition of the fused path, used for nothing else


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Runs networks module by module: compiled code and torch's fused transformer layers do not call hooks."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    eager = torch.compiler.set_stance("force_eager") if COMPILER in sys.modules else contextlib.nullcontext()
    try:
        with eager:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
