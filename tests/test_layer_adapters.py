"""What every layer adapter keeps: keys and errors make up the gradient, keys and weights the output."""

from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor, nn

from spotlights.layers import ADAPTERS, LayerAdapter, adapter_for, adapter_named


class AdapterContract(ABC):
    """Rows of keys and errors are the layer, forwards and backwards."""

    adapter: LayerAdapter

    @abstractmethod
    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        """Modules of this kind, in float64, each with an input."""

    def passes(self):
        for module, inputs in self.modules():
            module.zero_grad()
            output = module(inputs)
            seen = []
            output.register_hook(lambda gradient, seen=seen: seen.append(gradient))
            (output * torch.randn(output.shape, dtype=output.dtype)).sum().backward()
            yield module, inputs, output.detach(), seen[0]

    def test_it_is_registered_and_found(self):
        assert self.adapter in ADAPTERS
        assert adapter_named(self.adapter.kind) is self.adapter
        for module, _ in self.modules():
            assert adapter_for(module) is self.adapter

    def test_keys_and_errors_keep_the_same_leading_shape(self):
        for module, inputs, _, gradient in self.passes():
            keys = self.adapter.keys(module, (inputs,), {})
            errors = self.adapter.errors(module, gradient)
            weight = self.adapter.weight(module)
            assert keys.shape[:-1] == errors.shape[:-1]
            assert (errors.shape[-1], keys.shape[-1]) == tuple(weight.shape)

    def test_the_gradient_is_the_sum_of_outer_products_of_errors_and_keys(self):
        for module, inputs, _, gradient in self.passes():
            keys = self.adapter.keys(module, (inputs,), {}).flatten(0, -2)
            errors = self.adapter.errors(module, gradient).flatten(0, -2)
            weight, bias = self.adapter.weight(module), self.adapter.bias(module)
            torch.testing.assert_close(weight.grad, errors.T @ keys, rtol=1e-12, atol=1e-12)
            if bias is not None:
                torch.testing.assert_close(bias.grad, errors.sum(dim=0), rtol=1e-12, atol=1e-12)

    def test_the_output_is_the_linear_map_of_the_keys(self):
        for module, inputs, output, _ in self.passes():
            keys = self.adapter.keys(module, (inputs,), {})
            weight, bias = self.adapter.weight(module), self.adapter.bias(module)
            made = keys @ weight.T + (0.0 if bias is None else bias)
            torch.testing.assert_close(made.detach().reshape(output.shape), output, rtol=1e-12, atol=1e-12)

    def test_parameters_are_those_of_the_module(self):
        for module, _ in self.modules():
            own = {id(parameter) for parameter in module.parameters()}
            assert id(self.adapter.weight(module)) in own
            assert (self.adapter.bias(module) is None) or id(self.adapter.bias(module)) in own


class TestLinear(AdapterContract):
    adapter = adapter_named("linear")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        torch.manual_seed(0)
        return [
            (nn.Linear(4, 3, bias=bias).double(), torch.randn(*lead, 4, dtype=torch.float64))
            for bias in (True, False)
            for lead in ((5,), (2, 3), (2, 1, 3))
        ]

    def test_the_input_may_be_given_by_name(self):
        module, inputs = self.modules()[0]
        assert self.adapter.keys(module, (), {"input": inputs}) is inputs

    def test_a_linear_layer_that_computes_something_else_is_not_taken_for_one(self):
        class Doubled(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return 2 * super().forward(input)

        class Named(nn.Linear):
            """Only another name."""

        normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        assert adapter_for(Doubled(4, 3)) is None
        assert adapter_for(normed) is None
        assert adapter_for(Named(4, 3)) is self.adapter


@pytest.mark.parametrize("module", [nn.ReLU(), nn.LayerNorm(3), nn.Sequential(nn.Linear(2, 2))], ids=repr)
def test_other_modules_have_no_adapter(module: nn.Module):
    assert adapter_for(module) is None


def test_every_adapter_keeps_the_contract():
    tested = {contract.adapter.kind for contract in AdapterContract.__subclasses__()}
    assert tested == {adapter.kind for adapter in ADAPTERS}, "write a contract test for the new kind of layer"
    assert adapter_named("convolution of the second kind") is None
