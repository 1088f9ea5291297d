"""What Spotlights needs to know of a kind of layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn


class LayerAdapter(ABC):
    """Turns a module's forward and backward into rows of keys and errors, and a test input into queries.

    The rows keep the leading shape of the call, `(batch, …, features)`, so that the columns of
    `recorder.batch` can be matched to them; they are flattened only when they are stored.
    """

    kind: ClassVar[str]

    @abstractmethod
    def handles(self, module: nn.Module) -> bool:
        """Whether this adapter describes the module exactly."""

    @abstractmethod
    def weight(self, module: nn.Module) -> nn.Parameter:
        """The parameter of shape `(out_features, in_features)`."""

    @abstractmethod
    def bias(self, module: nn.Module) -> nn.Parameter | None:
        """The parameter of shape `(out_features,)`, if the module has one."""

    @abstractmethod
    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Float[Tensor, "*lead in_features"]:
        """The input of the linear map, from the arguments of `forward`."""

    @abstractmethod
    def errors(self, module: nn.Module, output_gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        """The error of each row, from the gradient of the module's output."""
