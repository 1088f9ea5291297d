"""How far a batch, a question and a request of the explorer travel through the package.

python benchmarks/walk.py            # calls, functions, files, crossings between packages; everything is warm
python benchmarks/walk.py --files    # with the files, in the order in which they are first entered
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.explorer.api import answer
from spotlights.explorer.explorer import Explorer

HOME = f"{Path(sl.__file__).parent}/"


def walk(name: str, act: Callable[[], object]) -> None:
    """Runs something and prints where it went."""
    calls, crossings, last = 0, 0, ""
    functions, files = set[tuple[str, str]](), dict[str, None]()

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal calls, crossings, last
        if event != "call" or not frame.f_code.co_filename.startswith(HOME):
            return
        file = frame.f_code.co_filename.removeprefix(HOME)
        package = file.split("/")[0]
        calls, crossings, last = calls + 1, crossings + (last not in ("", package)), package
        functions.add((file, frame.f_code.co_qualname))
        files[file] = None

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    print(f"{name:<9} {calls:5} calls {len(functions):4} functions {len(files):3} files {crossings:4} crossings")
    if "--files" in sys.argv:
        print("\n".join(f"  {file}" for file in files))


def main() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(60, 8), torch.randint(0, 3, (60,))
    path = Path(tempfile.mkdtemp()) / "walk.memory"
    with sl.record(network, optimizer, path) as recorder:

        def step() -> None:
            batch = torch.randint(0, 60, (8,))
            recorder.batch(example=batch, label=labels[batch])
            optimizer.zero_grad()
            F.cross_entropy(network(inputs[batch]), labels[batch]).backward()
            optimizer.step()

        for _ in range(20):
            step()
        walk("batch", step)
    memory = sl.open(path)

    def ask() -> None:
        memory.attend(network, inputs[:1])["2"].contributions(target=1).top(10, by="example")

    ask()
    walk("question", ask)
    explorer = Explorer(
        sl.Subject(path, network, inputs), prepare=False
    )  # else the program may end in the middle of it

    def request(number: int) -> None:
        answer(explorer, "layer", {"q": f"test:{number}", "layer": "2"})

    request(0)
    walk("request", lambda: request(1))


main()
