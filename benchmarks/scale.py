"""Past one machine, measured on one: a memory of 384,000 MNIST slots asked by threads, by Ray, and in a bucket.

    python benchmarks/scale.py                                    # all of it
    python benchmarks/scale.py --part ray --memory run.memory     # records the memory there, or uses the one that is
    python benchmarks/scale.py --part bucket --to s3://bucket/x   # a real bucket, by the environment's credentials

The network is the paper's for MNIST (784-800-800-10) in 6,000 steps of 64 images; its first and its last layer are
recorded. Ray has clusters of one and of two nodes with one CPU each. They take turns with one thread and with two, so
that it shows what the machine gives. Wall time is what a user waits; CPU time is of all processes together.
The bucket is on the S3 server of moto, on this machine; "needed" are the bytes of the tensors that a question uses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from in_turns import in_processes, seconds
from torch import nn

import spotlights as sl
from spotlights.memory.store import bucket
from spotlights.query.engine import Threads
from spotlights_paper.experiments.images import prepare

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

QUESTIONS: dict[str, Callable[[sl.Memory, nn.Module, torch.Tensor], Any]] = {
    "top 10 of scores, 1 input": lambda m, net, x: m.attend(net, x[:1])["4"].top(10),
    "top 10 of scores, 128 inputs": lambda m, net, x: m.attend(net, x[:128])["4"].top(10),
    "top 10 of scores, 512 inputs": lambda m, net, x: m.attend(net, x[:512])["4"].top(10),
    "contributions by label, 128 inputs": lambda m, net, x: contributions(m, net, x[:128]).totals("label"),
    "top contributions by example, 64 inputs": lambda m, net, x: contributions(m, net, x[:64]).top(10, by="example"),
    "weights without a label": lambda m, net, x: m.without(label=3).weights("4"),
    "Table 1's totals, 2,048 inputs": lambda m, net, x: m.attend(net, x[:2048])["0"].totals("label", absolute=True),
}
"""About the last layer, or (Table 1) the first one, whose keys are stored once."""
KILLED = "top 10 of scores, 128 inputs"
PAIRS = 12
"""Of answers from the bucket and from the disk; the first one does not count."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--part", choices=("ray", "bucket"), help="both by default")
    arguments.add_argument("--memory", type=Path, help="where the memory is, or will be; a temporary folder by default")
    arguments.add_argument("--steps", type=int, default=6000)
    arguments.add_argument("--turns", type=int, default=7)
    arguments.add_argument("--to", help="where in a bucket; an S3 server on this machine by default")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.memory or Path(folder) / "run.memory"
        if not path.exists():
            record(path, options.steps)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"{len(sl.open(path)):,} slots in 2 layers, {size / 1e6:,.0f} MB; load {os.getloadavg()[0]:.1f}")
        if options.part != "bucket":
            by_ray(path, options.turns)
        if options.part != "ray":
            from_bucket(path, options.to, Path(folder) / "cache")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))


def record(path: Path, steps: int) -> None:
    model, train = network(), prepare("mnist").train
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sl.record(model, optimizer, path, layers=["0", "4"]) as recorder:
        for _ in range(steps):
            ids = torch.randint(len(train.inputs), (64,))
            recorder.batch(example=train.ids[ids], label=train.labels[ids])
            optimizer.zero_grad()
            F.cross_entropy(model(train.inputs[ids]), train.labels[ids]).backward()
            optimizer.step()


def trained(memory: sl.Memory) -> tuple[nn.Module, torch.Tensor]:
    """The network with the memory's weights (those of the layer between do not matter here), and test images."""
    return memory.primal(network()), prepare("mnist").test.inputs


def contributions(memory: sl.Memory, model: nn.Module, inputs: torch.Tensor) -> Any:
    return memory.attend(model, inputs)["4"].contributions(target=3)


# -- by Ray -----------------------------------------------------------------------------------------------


def by_ray(path: Path, turns: int) -> None:
    settings = {"1 thread": (1, 0), "2 threads": (2, 0), "1 node": (1, 1), "2 nodes": (1, 2)}
    arms = {name: partial(answering, path, *given) for name, given in settings.items()}
    took, returned = in_processes(arms, turns * len(QUESTIONS))
    print(f"\n{turns} turns; medians of wall time, and in brackets of the CPU time of all processes together\n")
    titles = [*arms, "1 node/1 thread", "2 nodes faster", "2 threads faster"]
    print(f"{'question':40}", *(f"{title:>16}" for title in titles))
    apart = 0.0
    for number, question in enumerate(QUESTIONS):
        wall = {name: took[name][number :: len(QUESTIONS)] for name in arms}
        cpu = {name: returned[name]["cpu"][question][1:] for name in arms}
        cells = [f"{statistics.median(wall[name]):5.2f} ({statistics.median(cpu[name]):5.2f}) s" for name in arms]
        cells.append(f"{ratio(wall['1 node'], wall['1 thread']):.2f}")
        cells += [f"{ratio(wall[f'1 {what}'], wall[f'2 {what}s']):.2f}" for what in ("node", "thread")]
        print(f"{question:40}", *(f"{cell:>16}" for cell in cells))
        first, *others = (returned[name]["answers"][question] for name in arms)
        apart = max(apart, *(difference(first, other) for other in others))
    print(f"\nThe same slots; sums differ by at most {apart:.0e} of the largest one (they are added up in float32).")
    print(returned["2 nodes"]["killed"])


def ratio(one: list[float], other: list[float]) -> float:
    """The median of the ratios of all turns."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def answering(path: Path, threads: int, nodes: int, turns: int) -> Generator[float, None, dict[str, Any]]:
    """One of them: a turn is one question. The first one, which does not count, prepares all questions."""
    torch.set_num_threads(threads)
    memory, cluster = sl.open(path).on(Threads(threads=threads)), None
    if nodes:
        memory, cluster = in_cluster(path, nodes)
    model, inputs = trained(sl.open(path))
    asked = {name: partial(question, memory, model, inputs) for name, question in QUESTIONS.items()}
    answers, wall = {}, 0.0
    cpu: dict[str, list[float]] = {name: [] for name in QUESTIONS}
    for turn in range(turns):
        for name in [*QUESTIONS] if turn == 0 else [[*QUESTIONS][(turn - 1) % len(QUESTIONS)]]:
            before = cpu_seconds()
            wall = seconds(lambda name=name: answers.update({name: numbers(asked[name]())}))
            cpu[name].append(sum(after - before.get(pid, 0.0) for pid, after in cpu_seconds().items()))
        yield wall
    told = kill_one(asked[KILLED], answers[KILLED]) if nodes == 2 else ""
    if cluster is not None:
        import ray

        ray.shutdown()
        cluster.shutdown()
    return {"answers": answers, "cpu": cpu, "killed": told}


def in_cluster(path: Path, nodes: int) -> tuple[sl.Memory, Any]:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 1, "object_store_memory": 500 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=settings | {"include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**settings)
    return sl.open(path).on(cluster.address), cluster


def kill_one(ask: Callable[[], Any], expected: list[np.ndarray]) -> str:
    """kill -9 of a worker while it scans."""
    undisturbed, answer = seconds(ask), []
    asking = threading.Thread(target=lambda: answer.append(numbers(ask())))
    start = time.perf_counter()
    asking.start()
    time.sleep(0.4 * undisturbed)
    while not (scanning := [pid for pid in descendants() if b"_run_share" in _command(pid)]):
        assert asking.is_alive(), "the question was answered before anybody was killed"
    os.kill(scanning[0], signal.SIGKILL)
    asking.join()
    verdict = "the same answer" if difference(answer[0], expected) < 1e-6 else "ANOTHER ANSWER"
    took = time.perf_counter() - start
    return (
        f"kill -9 of one of {len(scanning)} scanning workers after {0.4 * undisturbed:.1f} s: {verdict}, "
        f"in {took:.1f} s instead of {undisturbed:.1f} s"
    )


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def descendants() -> list[int]:
    """The processes that this one has started, theirs, and so on."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def cpu_seconds() -> dict[int, float]:
    """What this process and its descendants have used so far."""
    used = {}
    for pid in [os.getpid(), *descendants()]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def numbers(answer: Any) -> list[np.ndarray]:
    """What an answer says."""
    if isinstance(answer, torch.Tensor):
        return [answer.numpy()]
    return [answer.values.numpy(), *([answer.slots.numpy()] if hasattr(answer, "slots") else [])]


def difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Of sums, relative to the largest one; infinite if other slots were found."""
    apart = 0.0
    for a, b in zip(one, other, strict=True):
        if a.dtype.kind == "i":
            apart = max(apart, 0.0 if np.array_equal(a, b) else np.inf)
        else:
            apart = max(apart, float(np.nanmax(abs(a - b)) / np.nanmax(abs(a))))
    return apart


# -- in a bucket ------------------------------------------------------------------------------------------


def from_bucket(local: Path, address: str | None, cache: Path) -> None:
    if address is None:
        from buckets import new_bucket

        address = str(new_bucket("s3"))
    took = seconds(lambda: sl.open(local).copy(address))
    print(f"\ncopied to a bucket and verified by checksums in {took:.0f} s; then wall time, and CPU time in brackets\n")
    model, inputs = trained(sl.open(local))
    questions: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
        "top of scores": (lambda a: a.top(10), ["4/keys"]),
        "totals by label": (lambda a: a.totals("label"), ["4/keys", "4/column/label"]),
        "top contributions": (
            lambda a: a.contributions(target=3).top(10, by="example"),
            ["4/keys", "4/errors", "4/column/step", "4/column/example"],
        ),
    }
    counted = Counted()
    titles = ["question", "needed", "read", "ratio", "cold", "warm", "on disk", "warm/disk"]
    print(f"{titles[0]:18}", *(f"{title:>15}" for title in titles[1:]))
    for number, (name, (question, tensors)) in enumerate(questions.items()):
        own = cache / str(number)

        def asked(path: str | Path, own: Path = own, question: Any = question) -> tuple[float, float]:
            attention, start = sl.open(path, cache=own).attend(model, inputs[:4])["4"], time.process_time()
            return seconds(lambda: question(attention)), time.process_time() - start

        before = counted.bytes
        sl.open(address, cache=own)
        opening, before = counted.bytes - before, counted.bytes
        cold = asked(address)
        read = counted.bytes - before - opening
        pairs = [(asked(address), asked(local)) for _ in range(PAIRS)][1:]
        assert counted.bytes - before - opening - read == PAIRS * opening, "a later question read more than this"
        cells = [
            cold,
            *(tuple(map(statistics.median, zip(*column, strict=True))) for column in zip(*pairs, strict=True)),
        ]
        slower = [statistics.median(warm[kind] / disk[kind] for warm, disk in pairs) for kind in (0, 1)]
        layouts = [segment.layout for segment in sl.open(local).view.reader.segments]
        needed = sum(
            torch.Size(layout[tensor].shape).numel() * layout[tensor].dtype.itemsize
            for layout in layouts
            for tensor in tensors
        )
        shown = [f"{needed / 1e6:,.1f} MB", f"{read / 1e6:,.1f} MB", f"{read / needed:.3f}"]
        shown += [f"{wall:.2f} ({cpu:.2f}) s" for wall, cpu in cells] + ["{:.2f} ({:.2f})".format(*slower)]
        print(f"{name:18}", *(f"{cell:>15}" for cell in shown), flush=True)


class Counted:
    """Stands before obstore and counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes = 0
        self._obstore, bucket.obstore = bucket.obstore, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._obstore, name)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._obstore.get(*args, **kwargs)
        start, end = answer.range
        self.bytes += end - start
        return answer


if __name__ == "__main__":
    main()
