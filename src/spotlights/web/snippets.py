"""The query as a Python script: run beside the same run, it prints what the page shows."""

from __future__ import annotations

from spotlights.web.explorer import Explorer
from spotlights.web.masks import Mask
from spotlights.web.measured import Wanted, measured
from spotlights.web.queries import Query

_DRAWN = '''
def drawn(packed):
    """The drawn image, as the network takes it."""
    raw = zlib.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape({height}, {width})
    return subject.drawing.prepare(pixels.numpy())


'''


def snippet(explorer: Explorer, query: Query, wanted: Wanted, mask: Mask) -> str:
    """Python that asks the library the same."""
    seen = measured(explorer, query, wanted)
    lines = ["import torch", "", "import spotlights as sl"]
    code = explorer.subject.code
    if query.name.startswith("pixels:"):
        drawing = explorer.subject.drawing
        assert drawing is not None
        lines = ["import base64", "import zlib", "", *lines, "from spotlights.web.runs import subject_of", ""]
        lines += [f'subject = subject_of("{explorer.opened.memory.path}")']
        lines += _DRAWN.format(height=drawing.height, width=drawing.width).splitlines()
    lines += [*code.splitlines(), f"x = {query.code}", ""]
    view = "memory"
    if wanted.steps is not None:
        view += f".where(step=range{wanted.steps})"
    of_token = f"lambda output: output[:, {query.position}, {seen.target}]"
    target = seen.target if query.position is None else of_token
    by = ', by="example"' if wanted.by == "example" else ""
    if seen.kind.estimate:
        measure, by = "influence", ""
        lines += [f"influence = {view}.attend(model, x).influence(target={target})"]
    else:
        lines += [f'attention = {view}.attend(model, x)["{wanted.layer}"]']
        if query.position is not None:
            lines += [f"attention = attention.at({query.position})"]
        whole = ".whole()" if seen.rows > 1 else ""
        measure = f"attention.contributions(target={target}){whole}" if seen.kind.signed else f"attention{whole}"
    per = wanted.per or next(iter(explorer.opened.groups), None)
    lines += [f"print({measure}.top({wanted.top}{by}))"]
    if seen.kind.signed:
        lines += [f"print({measure}.bottom({wanted.top}{by}))"]
    if per is not None:
        absolute = ", absolute=True" if wanted.measure == "absolute" else ""
        lines += [f'print({measure}.totals("{per}"{absolute}))']
    if mask:
        kept = "".join(f".without({_condition(each)})" for each in mask.conditions())
        lines += ["", f"without = memory{kept}"]
        if mask.layers is None:
            lines += ["masked = without.primal(model)"]
        else:
            lines += [f"masked = without.primal(model, layers={list(mask.layers)})"]
        lines += ['print("logits with:   ", model(x))', 'print("logits without:", masked(x))']
    return "\n".join(lines) + "\n"


def _condition(condition: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in condition.items())
