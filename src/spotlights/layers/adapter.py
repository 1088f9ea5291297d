"""What Spotlights needs to know of a kind of layer.

Every layer here is, for each of its *rows*, a linear map of a key: `y = M k + b`. A linear layer has one row for each
input; a convolution has one for each position of its output, and its key is the patch under the kernel. M is the weight
seen as a matrix.

Some layers map parts of a key apart from each other: the groups of a convolution, every single feature of a
normalisation. Their M has one block for each group, one below the other, `(out_features, in_features / groups)`: the
g-th share of its rows acts on the g-th share of the key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Float, Shaped
from torch import Tensor, nn


class LayerAdapter(ABC):
    """Turns a module's forward and backward into rows of keys and errors, and a test input into queries.

    Rows keep the leading shape of the call, `(batch, …, features)`, so that the columns of `recorder.batch` can be
    matched to them; they are flattened only when they are stored. The defaults are right for a layer that, like
    `nn.Linear`, has its features in the last dimension and a weight of shape `(out_features, in_features)`.
    """

    kind: ClassVar[str]
    """The name of the kind in memories: letters and dashes; it never changes."""

    transposed: ClassVar[bool] = False
    """The weight is kept as `(in_features, out_features)`."""

    @abstractmethod
    def handles(self, module: nn.Module) -> bool:
        """Whether this adapter describes the module exactly."""

    # -- the parameters ----------------------------------------------------------------------

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

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shaped[Tensor, "..."]:
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
