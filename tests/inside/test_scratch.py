"""Memory that is used again is never memory that somebody still uses."""

import pytest
import torch
from torch import nn

import spotlights as sl
from spotlights.layers.recurrent.scratch import Scratch, scratch

LIKE = torch.empty(0)


def test_memory_that_nobody_uses_is_handed_out_again():
    room = Scratch()
    first = room.empty(300, 100, like=LIKE)
    address = first.data_ptr()
    view = first[100:]
    del first
    assert room.empty(300, 100, like=LIKE).data_ptr() != address, "a view of it is still there"
    del view
    assert room.empty(290, 100, like=LIKE).data_ptr() == address


def test_what_a_graph_has_saved_counts_as_used():
    room = Scratch()
    weight = torch.ones((), requires_grad=True)
    saved = room.empty(300, 100, like=LIKE).fill_(2.0)
    address = saved.data_ptr()
    product = (weight * saved).sum()  # needs `saved` for the gradient of the weight
    del saved
    assert room.empty(300, 100, like=LIKE).fill_(-1.0).data_ptr() != address
    product.backward()
    assert weight.grad.item() == 60_000
    del product
    assert room.nbytes == 240_000
    again = [room.empty(300, 100, like=LIKE) for _ in range(2)]
    assert address in {each.data_ptr() for each in again}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kind_and_shape_are_those_asked_for(dtype):
    made = Scratch().empty(7, 3000, like=torch.empty(0, dtype=dtype))
    assert made.shape == (7, 3000)
    assert made.dtype == dtype
    assert made.is_contiguous()


def test_lengths_that_come_once_do_not_pile_up():
    room = Scratch(max_bytes=1 << 20)
    for length in range(20_000, 200_000, 10_000):
        room.empty(length, like=LIKE)
        assert room.nbytes <= 1 << 20
    room.remove()
    assert not room.nbytes


def test_two_passes_through_one_graph_and_a_pass_in_between(tmp_path):
    """A graph that is kept for a second backward pass holds on to its memory while another step runs."""
    torch.manual_seed(0)
    model = nn.LSTM(32, 32).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given, other = torch.randn(2, 20, 40, 32, dtype=torch.float64)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            recorder.batch(example=torch.arange(40))
            kept = model(given)[0].square().sum()
            kept.backward(retain_graph=True)
            model(other)[0].sum().backward()
            kept.backward()
            optimizer.step()
        assert scratch.nbytes
    assert not scratch.nbytes, "a finished recording keeps no memory"
    for check in sl.open(tmp_path / "m").verify(model).values():
        assert check.relative_error < 1e-10
