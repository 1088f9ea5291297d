"""What Spotlights needs to know of a kind of layer.

Every layer here is, for each of its *rows*, a linear map of a key: `y = M k + b`. A linear layer has one row for each
input; a convolution has one for each position of its output, and its key is the patch under the kernel. M is the weight
seen as a matrix.

Some layers map parts of a key apart from each other: the groups of a convolution, every single feature of a
normalisation. Their M has one block for each group, one below the other, `(out_features, in_features / groups)`: the
g-th share of its rows acts on the g-th share of the key.

A module may hold several such maps (an LSTM has one for each layer and direction). Each is recorded as a layer of its
own, named after the module and the map. `ModuleAdapter` is what the rest of the code asks; `LayerAdapter` answers it
all for a module that is one map and returns its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """A parameter that a map is made of, or some of its rows."""

    parameter: nn.Parameter
    rows: slice | None = None
    """Which share of the first dimension; None is all of it."""

    def of(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """This share of the parameter, of its gradient, or of anything that has its shape; a view."""
        return tensor if self.rows is None else tensor[self.rows]

    @property
    def value(self) -> Shaped[Tensor, "..."]:
        return self.of(self.parameter.detach())

    @property
    def identity(self) -> tuple[int, int | None]:
        """Equal for parts that are the same numbers."""
        return id(self.parameter), None if self.rows is None else self.rows.start


@dataclass(frozen=True)
class LinearMap:
    """One linear map `M k + b` in a module, and the parameters that it is made of."""

    weights: Mapping[str, Part]
    """M is these matrices side by side, each by the name that it has in the memory."""
    biases: Mapping[str, Part] = field(default_factory=dict)
    """b is the sum of these: an LSTM has two."""
    groups: int = 1
    """How many parts of the key are mapped apart from each other."""
    transposed: bool = False
    """The weight is kept as `(in_features, out_features)`."""
    as_matrix: Callable[[Tensor], Tensor] = lambda weight: weight
    """A weight, or its gradient, as a matrix; a view where that is possible."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """What a key is put together of, in order, with the sizes (`{"x": 64, "h": 256}`); empty if it is one thing."""

    @property
    def parameters(self) -> dict[str, Part]:
        return {**self.weights, **self.biases}

    def kept(self, name: str, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """A parameter, or what has its shape, as a memory keeps it: a matrix, or (a bias) a row."""
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
        """The shape of the weight itself; that of M where it is several."""
        alone = list(self.weights) == ["weight"]
        return tuple(self.weights["weight"].value.shape) if alone else self.matrix_shape

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for maps with the same weights: modules that share them are one layer of a memory."""
        return tuple(part.identity for part in self.weights.values())


class Call(ABC):
    """One call of a module: what its maps saw. Lives from the forward pass to the end of the backward pass.

    It holds none of the tensors that the module returned, and nothing of the graph: they hold it. All methods answer
    for every map of the module by its name. Rows keep the leading shape of the call, `(batch, …, features)`, so that
    the columns of `recorder.batch` can be matched to them; they are flattened only when they are stored.
    """

    may_repeat: bool = False
    """The keys are data, not the output of another trained layer: the next epoch brings them again."""

    nbytes: int = 0
    """About how much memory is held for it until the rows are stored."""

    chosen: Int64[Tensor, "rows"] | None = None
    """Where not all of the leading shape are rows (a packed sequence): the rows' places in it, flattened."""

    shared: bool | None = False
    """Whether the rows may be of no single example but of all, as those of an embedding of positions; None if nothing
    but their shape tells."""

    @property
    def is_through(self) -> bool:
        """Whether the pass that is under way has done all that the errors need, once it has reached all outputs."""
        return True

    @abstractmethod
    def leads(self) -> Mapping[str, Sequence[int]]:
        """The leading shape of the rows."""

    @abstractmethod
    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"]]:
        """The key of each row."""

    @abstractmethod
    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        """The error of each row, the gradient of M k + b, from those of the tensors that the module returned."""

    def returns(self, name: str) -> bool:
        """Whether the module returns nothing but the rows of this map."""
        return False


class ModuleAdapter(ABC):
    """Finds the linear maps in a kind of module, and what they see in a call of it."""

    kind: ClassVar[str]
    """The name of the kind in memories: letters and dashes; it never changes."""

    @abstractmethod
    def handles(self, module: nn.Module) -> bool:
        """Whether this adapter describes the module exactly."""

    @abstractmethod
    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        """The linear maps of the module by name; "" for one that is all of it."""

    def before(self, module: nn.Module) -> Any:
        """What must be known from before a call in training: the random numbers of a dropout inside."""
        return None

    @abstractmethod
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        """What a call of the module was, from what it was given and what it returned; and what `before` said."""

    def begin(self) -> Sequence[Any]:
        """What has to be in place while such a module is recorded; each is taken away by its `remove`, like a hook."""
        return ()


class LayerAdapter(ModuleAdapter):
    """Turns a module's forward and backward into rows of keys and errors, and a test input into queries.

    The defaults are right for a layer that, like `nn.Linear`, has its features in the last dimension and a weight of
    shape `(out_features, in_features)`.
    """

    transposed: ClassVar[bool] = False
    """The weight is kept as `(in_features, out_features)`."""

    looked_up: ClassVar[bool] = True
    """Keys that are data are looked for among those that were met before, and kept once."""

    # -- the parameters ----------------------------------------------------------------------

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        bias = self.bias(module)
        return {
            "": LinearMap(
                weights={"weight": Part(self.weight(module))},
                biases={} if bias is None else {"bias": Part(bias)},
                groups=self.groups(module),
                transposed=self.transposed,
                as_matrix=self.matrix,
                parts=self.parts(module),
            )
        }

    def weight(self, module: nn.Module) -> nn.Parameter:
        """The parameter that is seen as a matrix."""
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        """The parameter with one number for each output feature, if the module has one."""
        return module._parameters.get("bias")

    def matrix(self, weight: Shaped[Tensor, "..."]) -> Shaped[Tensor, "out_features in_group"]:
        """The weight, or its gradient, as a matrix; a view where that is possible."""
        return weight.T if self.transposed else weight

    def groups(self, module: nn.Module) -> int:
        """How many parts of the key are mapped apart from each other."""
        return 1

    def parts(self, module: nn.Module) -> dict[str, int]:
        """What a key is put together of, in order, with the sizes (`{"x": 64, "h": 256}`); empty if it is one thing."""
        return {}

    # -- a call ------------------------------------------------------------------------------

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        return _WholeCall(self, module, self.inputs(module, args, kwargs), output)

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shaped[Tensor, "..."]:
        """The input, from the arguments of `forward`. It is kept as it is until the backward pass."""
        return args[0] if args else next(iter(kwargs.values()))

    def lead(self, module: nn.Module, inputs: Shaped[Tensor, "..."], output: Shaped[Tensor, "..."]) -> Sequence[int]:
        """The leading shape of the rows: that of the output without its features."""
        return output.shape[:-1]

    @abstractmethod
    def keys(self, module: nn.Module, inputs: Shaped[Tensor, "..."]) -> Float[Tensor, "*lead in_features"]:
        """The key of each row."""

    def errors(self, module: nn.Module, gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        """The error of each row, from the gradient of the output; what it is for the gradient, it is for the output."""
        return gradient

    def output(self, module: nn.Module, rows: Float[Tensor, "*lead out_features"]) -> Float[Tensor, "..."]:
        """The way back: the module's output, from one row for each key."""
        return rows


class _WholeCall(Call):
    """A call of a module that is one map, whose output is the module's."""

    def __init__(
        self, adapter: LayerAdapter, module: nn.Module, inputs: Shaped[Tensor, "..."], output: Shaped[Tensor, "..."]
    ) -> None:
        self._adapter = adapter
        self._module = module
        self._inputs = inputs
        self._lead = adapter.lead(module, inputs, output)
        self.may_repeat = adapter.looked_up and not inputs.requires_grad
        self.nbytes = inputs.nbytes

    def leads(self) -> Mapping[str, Sequence[int]]:
        return {"": self._lead}

    def keys(self) -> Mapping[str, Float[Tensor, "*lead in_features"]]:
        return {"": self._adapter.keys(self._module, self._inputs.detach())}

    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "*lead out_features"]]:
        (gradient,) = gradients
        assert gradient is not None, "a pass reaches a module only through its output"
        return {"": self._adapter.errors(self._module, gradient)}

    def returns(self, name: str) -> bool:
        return True


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in what a module returned that can have a gradient, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, tuple | list):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module is of that class, computes what the class computes, and holds its weight itself.

    A subclass with its own forward, or a weight that is computed (weight norm, spectral norm), is another map than its
    name says.
    """
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and isinstance(module._parameters.get("weight"), nn.Parameter)
    )
