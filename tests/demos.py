"""A small demo, run once for all tests that need one: scikit-learn's digits, a small network, few steps."""

import atexit
import io
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rich.console import Console

import spotlights as sl
from spotlights_paper.experiments import demo
from spotlights_paper.experiments.images import Prepared

ROOT = Path(tempfile.mkdtemp(prefix="spotlights-demos-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)


@dataclass
class SmallDemo:
    settings: demo.DemoSettings
    outcome: demo.DemoOutcome
    printed: str
    memory: sl.Memory
    network: torch.nn.Module
    images: Prepared

    def attend(self, count: int = 3) -> sl.Attention:
        return self.spotlights(count)["layers.1"]

    def spotlights(self, count: int = 3):
        return self.memory.attend(self.network, self.images.test.inputs[:count])


def settings(out: Path, **changes) -> demo.DemoSettings:
    return demo.DemoSettings(**{"out": out, "data": "digits", "steps": 40, "lr": 0.05, "hidden": (20, 15), **changes})


def run(chosen: demo.DemoSettings) -> tuple[demo.DemoOutcome, str]:
    """The demo's outcome, and what it printed."""
    printed = io.StringIO()
    return demo.run(chosen, Console(file=printed, width=120)), printed.getvalue()


@cache
def small_demo() -> SmallDemo:
    chosen = settings(ROOT / "demo")
    outcome, printed = run(chosen)
    return SmallDemo(chosen, outcome, printed, *demo.reopen(chosen.out))
