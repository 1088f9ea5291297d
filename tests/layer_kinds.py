"""Layers of every kind and option, for the tests of their exactness."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence


class OwnNorm(nn.Module):
    """Divides by the root of the mean square over the last dimension, or over the second."""

    def __init__(self, size: int, *, channels: bool, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size)) if bias else None)
        self.axis = 1 if channels else -1

    def forward(self, x: Tensor) -> Tensor:
        last = x.movedim(self.axis, -1)
        y = self.weight * last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5)
        return (y if self.bias is None else y + self.bias).movedim(-1, self.axis)


class Conv1D(nn.Module):
    """What Hugging Face calls so: a linear layer with its weight the other way round."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / math.sqrt(in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, input: Tensor) -> Tensor:
        made = torch.addmm(self.bias, input.reshape(-1, input.shape[-1]), self.weight)
        return made.reshape(*input.shape[:-1], -1)


Conv1D.__module__ = "transformers.pytorch_utils"


@st.composite
def convolutions(draw: st.DrawFn, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    """A convolution of any dimension with any options, and inputs that it takes."""
    dimensions = draw(st.integers(1, 3), label="dimensions")
    each = [draw(st.integers(1, 3 if dimensions < 3 else 2), label="kernel") for _ in range(dimensions)]
    dilation = [draw(st.integers(1, 2), label="dilation") for _ in range(dimensions)]
    groups = draw(st.sampled_from([1, 1, 2, 3]), label="groups")
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]), label="padding_mode")
    options: dict[str, Any] = {"dilation": tuple(dilation), "groups": groups, "padding_mode": mode}
    if draw(st.booleans(), label="same"):
        options["padding"] = draw(st.sampled_from(["same", "valid"]), label="padding")
    else:
        options["padding"] = tuple(draw(st.integers(0, 2), label="padding") for _ in range(dimensions))
        options["stride"] = tuple(draw(st.integers(1, 3), label="stride") for _ in range(dimensions))
    if (
        mode == "zeros"
        and options["padding"] == "same"
        and any(size % 2 == 0 and step % 2 for size, step in zip(each, dilation, strict=True))
    ):
        options["padding"] = "valid"  # torch warns of a copy there; the other modes have the same odd padding
    options["bias"] = draw(st.booleans(), label="bias")
    reach = [d * (k - 1) + 1 for k, d in zip(each, dilation, strict=True)]
    sizes = [draw(st.integers(max(3, r), r + 3), label="size") for r in reach]
    in_channels, out_channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    count = draw(st.integers(1, 3), label="batch") if batch is None else batch
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    inputs = torch.randn(count, in_channels, *sizes, generator=generator, dtype=torch.float64)
    return make(in_channels, out_channels, tuple(each), **options).double(), inputs


@st.composite
def transposed_convolutions(draw: st.DrawFn, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    """A transposed convolution of any dimension with any options, and inputs that it takes."""
    dimensions = draw(st.integers(1, 3), label="dimensions")

    def each(low: int, high: int, label: str) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high), label=label) for _ in range(dimensions))

    kernel, stride = each(1, 3 if dimensions < 3 else 2, "kernel"), each(1, 3 if dimensions < 3 else 2, "stride")
    dilation = each(1, 2, "dilation")
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    room = [min(2, r, (r + s) // 2) for r, s in zip(reach, stride, strict=True)]  # something of the output is left
    padding = tuple(draw(st.integers(0, most), label="padding") for most in room)
    more = tuple(draw(st.integers(0, max(s, d) - 1), label="more") for s, d in zip(stride, dilation, strict=True))
    groups = draw(st.sampled_from([1, 1, 2]), label="groups")
    in_channels, out_channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    make = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    layer = make(
        in_channels,
        out_channels,
        kernel,
        stride=stride,
        padding=padding,
        output_padding=more,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans(), label="bias"),
    )
    sizes = [draw(st.integers(2, 3), label="size") for _ in range(dimensions)]
    count = draw(st.integers(1, 3), label="batch") if batch is None else batch
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    return layer.double(), torch.randn(count, in_channels, *sizes, generator=generator, dtype=torch.float64)


@st.composite
def bags(draw: st.DrawFn, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    tokens, width = draw(st.integers(2, 7), label="tokens"), draw(st.integers(1, 4), label="width")
    padding = draw(st.sampled_from([None, 0, 1]), label="padding_idx")
    layer = nn.EmbeddingBag(tokens, width, mode=draw(st.sampled_from(["sum", "mean"])), padding_idx=padding)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    return layer.double(), torch.randint(tokens, (batch or 3, draw(st.integers(1, 4))), generator=generator)


class Twice(nn.Bilinear):
    """Of one input with itself."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x, x[..., : self.in2_features])


@st.composite
def bilinears(draw: st.DrawFn, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    wide = draw(st.integers(1, 3), label="wide")
    lead = draw(st.sampled_from([(), (2,)]), label="lead")
    layer = Twice(wide, draw(st.integers(1, wide)), draw(st.integers(1, 3)), bias=draw(st.booleans()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    return layer.double(), torch.randn(batch or 3, *lead, wide, generator=generator, dtype=torch.float64)


@st.composite
def linears(draw: st.DrawFn, batch: int | None = None, *, transposed: bool = False) -> tuple[nn.Module, Tensor]:
    wide, narrow = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    lead = draw(st.sampled_from([(), (2,), (2, 3)]), label="lead")
    layer = Conv1D(narrow, wide) if transposed else nn.Linear(wide, narrow, bias=draw(st.booleans()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    return layer.double(), torch.randn(batch or 3, *lead, wide, generator=generator, dtype=torch.float64)


@st.composite
def norms(draw: st.DrawFn, batch: int | None = None, *, kind: str) -> tuple[nn.Module, Tensor]:
    """A normalisation with scale and shift. Inputs of an example may have several rows."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    if kind in ("own-norm", "own-norm-of-channels"):
        channels, size = kind != "own-norm", draw(st.integers(2, 5), label="features")
        layer: nn.Module = OwnNorm(size, channels=channels, bias=draw(st.booleans()))
        shape = (size, 3, 2) if channels else (*draw(st.sampled_from([(), (2,)]), label="lead"), size)
    elif kind in ("layer-norm", "rms-norm"):
        features = draw(st.sampled_from([(4,), (2, 3)]), label="features")
        lead = draw(st.sampled_from([(), (2,)]), label="lead")
        if kind == "rms-norm":
            layer = nn.RMSNorm(features, eps=draw(st.sampled_from([None, 1e-3])))
        else:
            layer = nn.LayerNorm(features, eps=draw(st.sampled_from([1e-5, 1e-2])), bias=draw(st.booleans()))
        shape = (*lead, *features)
    else:
        channels = 2 * draw(st.integers(1, 3), label="channels")
        places = draw(st.sampled_from([(3,), (3, 2), (2, 2, 2)]), label="places")
        make = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(places) - 1]
        tracks = draw(st.booleans(), label="track_running_stats")
        layer = nn.GroupNorm(2, channels) if kind == "group-norm" else make(channels, track_running_stats=tracks)
        shape = (channels, *places)
    return layer.double(), torch.randn(batch or 3, *shape, generator=generator, dtype=torch.float64)


@st.composite
def embeddings(draw: st.DrawFn, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    tokens, width = draw(st.integers(1, 7), label="tokens"), draw(st.integers(1, 4), label="width")
    lead = draw(st.sampled_from([(), (4,), (2, 3)]), label="lead")
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9), label="seed"))
    return nn.Embedding(tokens, width).double(), torch.randint(tokens, (batch or 3, *lead), generator=generator)


NORMS = ("layer-norm", "rms-norm", "batch-norm", "group-norm", "own-norm", "own-norm-of-channels")
KINDS: dict[str, Callable[..., st.SearchStrategy[tuple[nn.Module, Tensor]]]] = {
    "linear": linears,
    "transposed-linear": lambda batch: linears(batch, transposed=True),
    "convolution": convolutions,
    "transposed-convolution": transposed_convolutions,
    "embedding": embeddings,
    "embedding-bag": bags,
    "bilinear": bilinears,
    **{kind: functools.partial(norms, kind=kind) for kind in NORMS},
}
"""By the adapters' names: layers with inputs of `batch` examples."""


@st.composite
def recurrent_modules(draw: st.DrawFn) -> tuple[nn.Module, Any]:
    """Any recurrent module with any options, and what its forward takes."""
    kind, cell = (
        draw(st.sampled_from(["LSTM", "GRU", "RNN"])),
        draw(st.sampled_from([False, False, True]), label="cell"),
    )
    named = {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if kind == "RNN" else {}
    wide, hidden, bias = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.booleans(), label="bias")
    torch.manual_seed(draw(st.integers(0, 9), label="seed"))
    sequences = draw(st.integers(1, 4), label="sequences")
    if cell:
        module = getattr(nn, f"{kind}Cell")(wide, hidden, bias=bias, **named).double()
        inputs, shape = torch.randn(sequences, wide).double(), (sequences, hidden)
    else:
        layers, both = draw(st.integers(1, 3), label="layers"), draw(st.booleans(), label="both ways")
        options = named | {
            "batch_first": draw(st.booleans()),
            "dropout": draw(st.sampled_from([0.0, 0.5])) if layers > 1 else 0.0,
        }
        module = getattr(nn, kind)(wide, hidden, layers, bias=bias, bidirectional=both, **options).double()
        shape = (layers * (2 if both else 1), sequences, hidden)
        lengths = draw(st.lists(st.integers(1, 5), min_size=sequences, max_size=sequences), label="lengths")
        if draw(st.booleans(), label="packed"):
            inputs = pack_sequence([torch.randn(n, wide).double() for n in lengths], enforce_sorted=False)
        else:
            lead = (sequences, lengths[0]) if module.batch_first else (lengths[0], sequences)
            inputs = torch.randn(*lead, wide).double()
    if not draw(st.booleans(), label="start"):
        return module, (inputs,)
    start = torch.randn(shape).double()
    return module, (inputs, (start, -start) if kind == "LSTM" else start)
