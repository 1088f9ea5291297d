"""What every layer adapter keeps: keys and errors make up the gradient, keys and weights the output."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from layer_kinds import Conv1D, convolutions, recurrent_modules, transposed_convolutions
from spotlights.dual_form import linear_map, outer_sum
from spotlights.layers import (
    ADAPTERS,
    Call,
    LayerAdapter,
    ModuleAdapter,
    WatchingAdapter,
    adapter_for,
    adapter_named,
)
from spotlights.layers.adapter import tensors_of
from spotlights.sparse_rows import dense


class ModuleContract(ABC):
    """Rows of keys and errors are the gradients of a module's parameters, map by map."""

    adapter: ModuleAdapter

    @abstractmethod
    def modules(self) -> list[tuple[nn.Module, Any]]:
        """Modules of this kind, in float64, each with an input, or a tuple of all that its forward takes."""

    def test_it_is_registered_and_found(self):
        assert self.adapter in ADAPTERS
        assert adapter_named(self.adapter.kind) is self.adapter
        for module, _ in self.modules():
            assert adapter_for(module) is self.adapter

    def test_its_maps_are_made_of_parameters_of_the_module_and_no_two_share_any(self):
        for module, _ in self.modules():
            own = {id(parameter) for parameter in module.parameters()}
            parts = [part for linear in self.adapter.maps(module).values() for part in linear.parameters.values()]
            assert {id(part.parameter) for part in parts} <= own
            assert len({part.identity for part in parts}) == len(parts)

    def test_calls_make_up_the_gradients_of_all_maps(self):
        for module, taken in self.modules():
            args = taken if type(taken) is tuple else (taken,)
            gradients, call = called(self.adapter, module, args)
            keys, errors = call.keys(), call.errors(gradients)
            maps = self.adapter.maps(module)
            assert set(keys) == set(errors) == set(maps)
            for name, linear in maps.items():
                rows = [each[name].reshape(-1, each[name].shape[-1]) for each in (keys, errors)]
                assert (
                    len(rows[0])
                    == len(rows[1])
                    == (math.prod(call.lead) if call.row_places is None else len(call.row_places))
                )
                made = outer_sum(rows[1], rows[0], linear.channel_groups).split(list(linear.columns.values()), dim=1)
                for (weight, part), of_weight in zip(linear.weights.items(), made, strict=True):
                    gradient = linear.kept(weight, part.parameter.grad)
                    torch.testing.assert_close(gradient, of_weight, rtol=1e-12, atol=1e-12)
                for bias, part in linear.biases.items():
                    gradient = linear.kept(bias, part.parameter.grad)
                    torch.testing.assert_close(gradient, rows[1].sum(dim=0), rtol=1e-12, atol=1e-12)


def called(adapter: ModuleAdapter, module: nn.Module, args: tuple[Any, ...]) -> tuple[list[Tensor], Call]:
    """One forward and backward pass; what reached each tensor that the module returned."""
    module.zero_grad()
    before = adapter.before(module)
    output = module(*args)
    call = adapter.call(module, args, {}, output, before)
    outputs = tensors_of(output)
    reached: dict[int, Tensor] = {}
    for place, tensor in enumerate(outputs):
        tensor.register_hook(lambda gradient, place=place: reached.update({place: gradient}))
    torch.autograd.backward(outputs, [torch.randn_like(tensor) for tensor in outputs])
    return [reached[place] for place in range(len(outputs))], call


class AdapterContract(ModuleContract):
    """Rows of keys and errors are the layer, forwards and backwards."""

    adapter: LayerAdapter

    def passes(self):
        for module, inputs in self.modules():
            args = inputs if isinstance(inputs, tuple) else (inputs,)
            module.zero_grad()
            output = module(*args)
            seen = []
            output.register_hook(lambda gradient, seen=seen: seen.append(gradient))
            (output * torch.randn(output.shape, dtype=output.dtype)).sum().backward()
            yield module, self.adapter.inputs(module, args, {}), output.detach(), seen[0]

    def rows(self, module: nn.Module, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        keys, errors = self.adapter.keys(module, inputs), self.adapter.errors(module, gradient)
        return keys.reshape(-1, keys.shape[-1]), errors.reshape(-1, errors.shape[-1])

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        return self.adapter.maps(module)[""].kept("weight", weight)

    def test_inputs_are_found_by_place_and_by_name(self):
        for module, inputs in self.modules():
            args = inputs if isinstance(inputs, tuple) else (inputs,)
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            named = dict(zip(names, args, strict=False))
            by_place, by_name = self.adapter.inputs(module, args, {}), self.adapter.inputs(module, (), named)
            assert torch.equal(dense(by_place), dense(by_name))

    def test_keys_and_errors_keep_the_leading_shape_that_is_announced(self):
        for module, inputs, output, gradient in self.passes():
            keys = self.adapter.keys(module, inputs)
            errors = self.adapter.errors(module, gradient)
            matrix = self.matrix(module, self.adapter.weight(module))
            lead = tuple(self.adapter.lead(module, inputs, output))
            assert tuple(keys.shape[:-1]) == tuple(errors.shape[:-1]) == lead
            assert (errors.shape[-1], keys.shape[-1] // self.adapter.channel_groups(module)) == tuple(matrix.shape)

    def test_the_gradient_is_the_sum_of_outer_products_of_errors_and_keys(self):
        for module, inputs, _, gradient in self.passes():
            keys, errors = self.rows(module, inputs, gradient)
            weight, bias = self.adapter.weight(module), self.adapter.bias(module)
            made = outer_sum(errors, keys, self.adapter.channel_groups(module))
            torch.testing.assert_close(self.matrix(module, weight.grad), made, rtol=1e-12, atol=1e-12)
            if bias is not None:
                torch.testing.assert_close(bias.grad.reshape(-1), errors.sum(dim=0), rtol=1e-12, atol=1e-12)

    def test_the_output_is_the_linear_map_of_the_keys(self):
        for module, inputs, output, _ in self.passes():
            keys = self.adapter.keys(module, inputs)
            weight, bias = self.adapter.weight(module), self.adapter.bias(module)
            made = linear_map(keys.reshape(-1, keys.shape[-1]), self.matrix(module, weight))
            made = (made + (0.0 if bias is None else bias.reshape(-1))).reshape(*keys.shape[:-1], -1)
            torch.testing.assert_close(self.adapter.output(module, made).detach(), output, rtol=1e-12, atol=1e-12)

    def test_errors_and_output_are_each_other_s_way_back(self):
        for module, _, output, _ in self.passes():
            assert torch.equal(self.adapter.output(module, self.adapter.errors(module, output)), output)

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


class TestTransposedLinear(AdapterContract):
    adapter = adapter_named("transposed-linear")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        torch.manual_seed(0)
        return [(Conv1D(3, 4).double(), torch.randn(*lead, 4, dtype=torch.float64)) for lead in ((5,), (2, 3))]


class TestConvolution(AdapterContract):
    adapter = adapter_named("convolution")
    drawn: tuple[nn.Module, Tensor] | None = None

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        torch.manual_seed(0)
        unbatched = nn.Conv2d(2, 4, (3, 2), padding=1, padding_mode="reflect", groups=2), torch.randn(2, 5, 6)
        same = nn.Conv1d(3, 2, 4, dilation=2, padding="same"), torch.randn(2, 3, 7)
        solid = nn.Conv3d(2, 2, 2, stride=(1, 2, 1), bias=False), torch.randn(1, 2, 3, 4, 3)
        drawn = [] if self.drawn is None else [self.drawn]
        return [(module.double(), inputs.double()) for module, inputs in (unbatched, same, solid, *drawn)]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(drawn=convolutions())
    def test_all_of_it_holds_for_any_shape_and_options(self, drawn: tuple[nn.Module, Tensor]):
        self.drawn = drawn
        self.test_keys_and_errors_keep_the_leading_shape_that_is_announced()
        self.test_the_gradient_is_the_sum_of_outer_products_of_errors_and_keys()
        self.test_the_output_is_the_linear_map_of_the_keys()
        self.test_errors_and_output_are_each_other_s_way_back()


class TestEmbedding(AdapterContract):
    adapter = adapter_named("embedding")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        torch.manual_seed(0)
        large = nn.Embedding(50_000, 1).double(), torch.randint(50_000, (2, 3))
        return [*((nn.Embedding(5, 3).double(), torch.randint(5, lead)) for lead in ((4,), (2, 3), ())), large]

    @pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"padding_idx": 0}, {"padding_idx": -1}])
    def test_what_changes_the_gradient_changes_the_rows(self, options: dict[str, Any]):
        module, tokens = nn.Embedding(4, 3, **options).double(), torch.tensor([[0, 1, 1], [3, 0, 1]])
        gradients, call = called(self.adapter, module, (tokens,))
        keys, errors = (rows[""].reshape(-1, rows[""].shape[-1]) for rows in (call.keys(), call.errors(gradients)))
        torch.testing.assert_close(module.weight.grad.T, outer_sum(errors, keys, 1))

    def test_an_embedding_that_changes_its_own_weights_is_refused_with_its_reason(self):
        module = nn.Embedding(5, 3, max_norm=1.0)
        assert adapter_for(module) is None
        assert "max_norm" in self.adapter.refuses(module)


class TestTransposedConvolution(AdapterContract):
    adapter = adapter_named("transposed-convolution")
    drawn: tuple[nn.Module, Tensor] | None = None

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        torch.manual_seed(0)
        unbatched = nn.ConvTranspose2d(2, 4, (3, 2), padding=1, stride=2, groups=2), torch.randn(2, 3, 4)
        far = nn.ConvTranspose1d(3, 2, 3, dilation=2, padding=5, stride=3, output_padding=2), torch.randn(2, 3, 5)
        drawn = [] if self.drawn is None else [self.drawn]
        return [(module.double(), inputs.double()) for module, inputs in (unbatched, far, *drawn)]

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(drawn=transposed_convolutions())
    def test_all_of_it_holds_for_any_shape_and_options(self, drawn: tuple[nn.Module, Tensor]):
        self.drawn = drawn
        self.test_keys_and_errors_keep_the_leading_shape_that_is_announced()
        self.test_the_gradient_is_the_sum_of_outer_products_of_errors_and_keys()
        self.test_the_output_is_the_linear_map_of_the_keys()

    def test_a_size_of_the_output_that_a_call_chooses_is_part_of_its_keys(self):
        for size in (6, 7):
            layer, inputs = nn.ConvTranspose1d(2, 3, 2, stride=2).double(), torch.randn(1, 2, 3, dtype=torch.float64)
            output = layer(inputs, output_size=[size])
            call = self.adapter.call(layer, (inputs,), {"output_size": [size]}, output, None)
            keys, errors = call.keys()[""], call.errors([torch.ones_like(output)])[""]
            assert tuple(keys.shape[:-1]) == tuple(call.lead) == (1, size)
            output.sum().backward()
            explained = errors.flatten(0, 1).T @ keys.flatten(0, 1)
            torch.testing.assert_close(explained, self.adapter.maps(layer)[""].as_matrix(layer.weight.grad))


class TestEmbeddingBag(AdapterContract):
    adapter = adapter_named("embedding-bag")

    def modules(self) -> list[tuple[nn.Module, Any]]:
        torch.manual_seed(0)
        tokens, flat, offsets = torch.randint(5, (3, 4)), torch.randint(5, (6,)), torch.tensor([0, 2, 2])
        weights = torch.rand(6, dtype=torch.float64)
        return [
            (nn.EmbeddingBag(5, 3, mode="mean").double(), tokens),
            (nn.EmbeddingBag(5, 3, mode="sum", padding_idx=1).double(), tokens),
            (nn.EmbeddingBag(5, 3, mode="mean", padding_idx=1).double(), tokens),
            (nn.EmbeddingBag(5, 3, mode="mean").double(), (flat, offsets)),
            (nn.EmbeddingBag(5, 3, mode="sum").double(), (flat, offsets, weights)),
            (nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=True).double(), (flat, torch.tensor([0, 1, 6]))),
        ]

    def test_bags_that_are_no_linear_map_are_not_taken_for_one(self):
        for options in ({"mode": "max"}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
            module = nn.EmbeddingBag(5, 3, **options)
            assert adapter_for(module) is None
            assert next(iter(options)) in self.adapter.refuses(module)


class TestBilinear(AdapterContract):
    adapter = adapter_named("bilinear")

    def modules(self) -> list[tuple[nn.Module, Any]]:
        torch.manual_seed(0)
        return [
            (nn.Bilinear(2, 3, 4, bias=bias).double(), (torch.randn(*lead, 2).double(), torch.randn(*lead, 3).double()))
            for bias in (True, False)
            for lead in ((5,), (2, 3))
        ]


class TestLayerNorm(AdapterContract):
    adapter = adapter_named("layer-norm")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        return [normed(nn.LayerNorm(4), 3, 4), normed(nn.LayerNorm((2, 3), bias=False), 2, 5, 2, 3)]


class TestRmsNorm(AdapterContract):
    adapter = adapter_named("rms-norm")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        return [normed(nn.RMSNorm(4), 3, 4), normed(nn.RMSNorm((2, 3), eps=0.1), 2, 5, 2, 3)]


class TestBatchNorm(AdapterContract):
    adapter = adapter_named("batch-norm")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        found = [normed(nn.BatchNorm1d(4), 3, 4), normed(nn.BatchNorm2d(2), 3, 2, 4, 2)]
        return [*found, normed(nn.BatchNorm1d(3), 3, 3, 2), normed(nn.BatchNorm2d(2).eval(), 3, 2, 4, 2)]


class TestGroupNorm(AdapterContract):
    adapter = adapter_named("group-norm")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        return [normed(nn.GroupNorm(2, 4), 3, 4), normed(nn.GroupNorm(1, 4), 3, 4, 2, 2)]


class OwnNorm(nn.Module):
    """A root mean square norm as many models bring their own, with or without a shift."""

    def __init__(self, features: int, *, shift: bool, channels: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if shift else None
        self.dim = 1 if channels else -1

    def forward(self, inputs: Tensor) -> Tensor:
        normalised = inputs * torch.rsqrt(inputs.square().mean(self.dim, keepdim=True) + 1e-6)
        like = [1] * inputs.ndim
        like[self.dim] = -1
        scaled = normalised * self.scale.view(like)
        return scaled if self.bias is None else scaled + self.bias.view(like)


class TestOwnNorm(AdapterContract):
    adapter = adapter_named("own-norm")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        return [normed(OwnNorm(4, shift=shift, channels=False), 3, 5, 4) for shift in (False, True)]

    def test_a_module_that_draws_numbers_is_not_taken_for_one_and_training_draws_as_before(self):
        class Noisy(OwnNorm):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(inputs + torch.randn_like(inputs))

        before = torch.get_rng_state()
        assert adapter_for(Noisy(4, shift=True, channels=False)) is None
        assert torch.equal(torch.get_rng_state(), before)


class TestOwnNormOfChannels(AdapterContract):
    adapter = adapter_named("own-norm-of-channels")

    def modules(self) -> list[tuple[nn.Module, Tensor]]:
        return [normed(OwnNorm(4, shift=shift, channels=True), 3, 4, 5, 2) for shift in (False, True)]


class TestLstm(ModuleContract):
    adapter = adapter_named("lstm")

    def modules(self) -> list[tuple[nn.Module, Any]]:
        return recurrent(nn.LSTM, nn.LSTMCell, lambda state: (state, 2 * state))

    def test_lstms_that_compute_something_else_are_not_taken_for_one(self):
        assert adapter_for(nn.LSTM(3, 4, proj_size=2)) is None
        assert adapter_for(nn.utils.parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")) is None


class TestGru(ModuleContract):
    adapter = adapter_named("gru")

    def modules(self) -> list[tuple[nn.Module, Any]]:
        return recurrent(nn.GRU, nn.GRUCell, lambda state: state)


class TestRnn(ModuleContract):
    adapter = adapter_named("rnn-tanh")

    def modules(self) -> list[tuple[nn.Module, Any]]:
        return recurrent(nn.RNN, nn.RNNCell, lambda state: state)


class TestRnnOfRelus(ModuleContract):
    adapter = adapter_named("rnn-relu")

    def modules(self) -> list[tuple[nn.Module, Any]]:
        relu = {"nonlinearity": "relu"}
        return recurrent(partial(nn.RNN, **relu), partial(nn.RNNCell, **relu), lambda state: state)


def recurrent(
    layers: Callable[..., nn.Module], cell: Callable[..., nn.Module], start: Callable[[Tensor], Any]
) -> list[tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    steps, state = torch.randn(5, 2, 3), torch.randn(4, 2, 4).double()
    packed = pack_sequence([torch.randn(count, 3).double() for count in (2, 5, 1, 5)], enforce_sorted=False)
    found = [
        (layers(3, 4), steps),
        (layers(3, 4, 2, bidirectional=True, dropout=0.5), (steps.double(), start(state))),
        (layers(3, 4, 3, batch_first=True, bias=False), steps),
        (layers(3, 4, 2, bidirectional=True), packed),
        (layers(3, 4), steps[:, 0]),
        (cell(3, 4), (steps[0].double(), start(state[0]))),
        (cell(3, 4, bias=False), steps[0, 0]),
        (layers(3, 4, 2, dropout=0.5).eval(), (steps.double(), start(state[:2]))),
    ]
    return [(module.double(), taken.double() if type(taken) is Tensor else taken) for module, taken in found]


def normed(module: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double(), torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.LayerNorm(3, elementwise_affine=False), nn.Sequential(nn.Linear(2, 2))], ids=repr
)
def test_other_modules_have_no_adapter(module: nn.Module):
    assert adapter_for(module) is None


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=recurrent_modules())
def test_rows_of_recurrent_modules_are_the_gradients_for_any_shape_and_options(drawn: tuple[nn.Module, Any]):
    class Drawn(ModuleContract):
        adapter = adapter_for(drawn[0])

        def modules(self) -> list[tuple[nn.Module, Any]]:
            return [drawn]

    Drawn().test_calls_make_up_the_gradients_of_all_maps()


def test_every_adapter_keeps_the_contract():
    contracts = [*ModuleContract.__subclasses__(), *AdapterContract.__subclasses__()]
    tested = {contract.adapter.kind for contract in contracts if contract is not AdapterContract}
    called = [adapter for adapter in ADAPTERS if not isinstance(adapter, WatchingAdapter)]
    known = {adapter.kind for adapter in called if not adapter.last_resort}  # for which no call is needed
    assert tested == known, "write a contract test for the new kind of layer"
    assert adapter_named("convolution of the second kind") is None
