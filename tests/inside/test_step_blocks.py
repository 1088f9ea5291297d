"""Slots step by step: those that are read together with their neighbours' are those that are read alone."""

import pytest
import torch

from memories import mlp, sequence
from spotlights.memory.blocks import Block, Everything, OneOf, Selection, StepBlocks
from spotlights.memory.layer_reader import LayerReader
from spotlights.sparse_rows import dense

STEPS = 12


def rows(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and errors, in the places of the block that they say they have."""
    keys, errors = torch.full((len(block), block.layer.entry.in_features), torch.nan), []
    for key, error in zip(block.keys(), block.errors(), strict=True):
        assert key.place == error.place
        keys[key.place] = dense(key.scaled).float()
        errors.append(dense(error.scaled).float().clone())
    return keys, torch.cat(errors)


@pytest.mark.parametrize("selection", [Everything(), OneOf("label", (1, 3)), OneOf("step", range(3, 7))])
@pytest.mark.parametrize("storage", ["float64", "int8"])
@pytest.mark.parametrize("rows_at_once", [4096, 14])
def test_a_steps_slots_are_the_same_when_they_are_read_with_its_neighbours(
    storage: str, selection: Selection, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for memory in (mlp(storage).memory, sequence().memory):
        reader = memory.view.reader
        for name in reader.layers:
            layer: LayerReader = reader.layer(name)
            monkeypatch.setattr(layer, "rows_at_once", rows_at_once)
            alone, together = StepBlocks(layer, selection), StepBlocks(layer, selection)
            for step in [*range(STEPS), *reversed(range(STEPS))]:
                block, held = alone.block(step, step + 1), together.held(step)
                assert len(held) == len(block)
                if len(block):
                    torch.testing.assert_close(held.slots, block.slots, rtol=0, atol=0)
                    torch.testing.assert_close(rows(held), rows(block), rtol=0, atol=0)
