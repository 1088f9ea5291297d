"""A weight of 50,257 tokens that embedding and output layer share: how exact are the sums, how many bytes is a token?

    python benchmarks/tied_tokens.py        ten seconds on one core

Prints a table of docs/architectures.md. Random texts, float32. A slot of the output layer has an error for each token
of the vocabulary and a key; one of the embedding has a token number and an error.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from zoo.text import LENGTH, NanoGPT, language_model

import spotlights as sl

TOKENS, WIDTH, STEPS, BATCH = 50_257, 64, 6, 4
OPTIMIZERS = {
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}
OUTPUT, EMBEDDING = 4 * (TOKENS + WIDTH), 4 * WIDTH + 8
COLUMNS = (
    *("optimizer", "of the change", "initial + Σ = logit", "all logits by the memory's weights"),
    *("bytes per token", f"4 · ({TOKENS:,} + {WIDTH}) + 4 · {WIDTH} + 8"),
)


def table() -> str:
    """One row for each optimizer, in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row(name)) + " |" for name in OPTIMIZERS])


def row(name: str) -> list[str]:
    torch.manual_seed(0)
    model = NanoGPT(tokens=TOKENS, width=WIDTH)
    setup = language_model(model, OPTIMIZERS[name](model), "lm_head", tokens=TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memory"
        with sl.record(model, setup.optimizer, path, layers="lm_head") as recorder:
            for _ in range(STEPS):
                ids = torch.randint(setup.examples, (BATCH,))
                recorder.batch(example=ids)
                setup.step(ids)
        memory = sl.open(path)
        changed = max(check.change_error for check in memory.verify(model).values())
        with torch.no_grad():
            logits = model(setup.inputs)[:, -1].double()
            made = memory.primal(model)(setup.inputs)[:, -1].double()
        seen = int(setup.inputs[0, -1])
        parts = memory.attend(model, setup.inputs)["lm_head"].contributions(lambda output: output[:, -1, seen])
        off = float((parts.initial + parts.rounding + parts.total() - logits[:, seen]).abs())
        everywhere = float((made - logits).abs().max())
        stored = sum(file.stat().st_size for file in (path / "segments").rglob("*") if file.is_file())
    largest = float(logits.abs().max())
    tokens = STEPS * BATCH * LENGTH
    return [
        *(name, f"{changed:.0e}", f"{off:.0e} of {float(logits[0, seen]):.2f}", f"{everywhere:.0e} of {largest:.2f}"),
        *(f"{stored / tokens:,.0f}", f"{OUTPUT + EMBEDDING:,}"),
    ]


if __name__ == "__main__":
    print(table())
