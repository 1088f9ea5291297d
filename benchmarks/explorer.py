"""How quick the explorer is, measured in a real browser: first view of a query, moves of a mask, memory, many users.

spotlights demo && python benchmarks/explorer.py runs/demo
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FIRST_VIEWS, MOVES, USERS = 10, 100, 8

# Until the examples and the figures are drawn.
VIEW = """async (query) => {
  const started = performance.now();
  location.hash = `#q=${encodeURIComponent(query)}`;
  while (document.body.dataset.shown !== location.hash) await new Promise(requestAnimationFrame);
  return performance.now() - started;
}"""
# The page and its parts, without answers and pictures.
WEIGHT = """() => performance.getEntries().filter(({ name }) => !name.includes("/api/"))
  .reduce((sum, { encodedBodySize }) => sum + (encodedBodySize ?? 0), 0)"""
# Until the new answer stands on the page: the slider moves, the server answers, the bars are drawn.
MOVE = """async (to) => {
  const slider = document.getElementById("steps-1");
  const started = performance.now();
  slider.focus();
  slider.value = to;
  slider.dispatchEvent(new Event("input"));
  const mask = new URLSearchParams(location.hash.slice(1)).get("mask") ?? "";
  while (!(document.body.dataset.compared ?? "").startsWith(mask + "test:")) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - started;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of many users at once")
    given = parser.parse_args()
    code = "from spotlights.cli import app; app()"
    command = [sys.executable, "-c", code, "explore", str(given.run), "--port", "0", "--no-browser", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        printed = ""
        while "}" not in printed:
            printed += server.stdout.readline()
        found = re.search(r"http://\S+/", printed)
        assert found is not None
        url, started = found.group(), time.perf_counter()
        while b'"masks":1.0,"verified":{' not in _get(f"{url}api/status"):
            time.sleep(0.5)
        print(f"masks prepared and memory verified after {time.perf_counter() - started:.0f} s")
        with sync_playwright() as playwright:
            path = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            started = time.perf_counter()
            page.goto(url)
            page.wait_for_function("() => document.body.dataset.shown === location.hash")
            opened, weight = time.perf_counter() - started, page.evaluate(WEIGHT)
            print(f"the page opens within {opened:.2f} s; it weighs {weight / 1e3:.0f} kB")
            _say("first view of a query", _views(page))
            _say("move of a mask", _moves(page))
            _map(page, url)
            browser.close()
        print(f"server: {_memory(server.pid)}")
        _users(url, given.seconds)
        print(f"server: {_memory(server.pid)}")
    finally:
        server.terminate()


def _views(page: Page) -> list[float]:
    taken = []
    for number in range(FIRST_VIEWS):
        taken.append(page.evaluate(VIEW, f"test:{60_100 + number}"))
        page.wait_for_function("() => document.body.dataset.shown === location.hash")
    return taken


def _map(page: Page, url: str) -> None:
    """How long each frame takes while the points of the map move to their places in another layer."""
    page.goto(f"{url}#q=test%3A60008&view=map")
    page.wait_for_function("() => document.body.dataset.shown === location.hash", timeout=300_000)
    layers = page.locator("#pick-layer option").evaluate_all("all => all.map(each => each.value)")
    taken = []
    for layer in (*layers, *layers[:-1]):
        page.select_option("#pick-layer", layer)
        page.wait_for_function(
            "layer => location.hash.includes(layer) && document.body.dataset.shown === location.hash",
            arg=layer,
            timeout=300_000,
        )
        frames = [int(each) for each in (page.get_attribute("#map-canvas", "data-frames") or "").split(",") if each]
        taken += [float(after - before) for before, after in itertools.pairwise(frames)]
    _say(f"a frame of the map, {page.inner_text('#map-title').split(' training')[0]} points", taken)


def _moves(page: Page) -> list[float]:
    last = int(page.get_attribute("#steps-1", "max") or 0)
    places = [random.Random(0).randint(0, last)]
    generator = random.Random(1)
    while len(places) < MOVES:
        places.append(generator.choice([place for place in range(1, last + 1) if place != places[-1]]))
    return [page.evaluate(MOVE, str(place)) for place in places]


def _users(url: str, seconds: float) -> None:
    """Everybody chooses, looks and masks, as fast as the answers come."""
    end = time.monotonic() + seconds
    asked, failed = [0] * USERS, [0] * USERS
    seen = re.search(rb'"example": ?(\d+)', _get(f"{url}api/layer?q=test:60000&measure=score"))
    example = "7" if seen is None else seen[1].decode()  # not every image of the data set was trained on

    def use(user: int) -> None:
        generator = random.Random(user)
        while time.monotonic() < end:
            query = f"test:{generator.randrange(60_000, 60_400)}"
            steps = f"{generator.randrange(0, 10) * 100}-{generator.randrange(10, 30) * 100}"
            for address in (
                f"query?q={query}",
                f"layer?q={query}&measure=score",
                f"mask?q={query}&mask=label={generator.randrange(10)};step={steps}",
                f"examples/{example}",
            ):
                asked[user] += 1
                try:
                    _get(f"{url}api/{address}")
                except OSError as error:
                    failed[user] += 1
                    print(f"{address}: {error}")

    users = [threading.Thread(target=use, args=(user,)) for user in range(USERS)]
    for each in users:
        each.start()
    for each in users:
        each.join()
    print(f"{USERS} users for {seconds:.0f} s: {sum(asked):,} requests, {sum(failed)} errors")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def _say(what: str, milliseconds: list[float]) -> None:
    ordered = sorted(milliseconds)
    late = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    print(f"{what}: median {statistics.median(ordered):.0f} ms, 95 % within {late:.0f} ms ({len(ordered)} times)")


def _memory(pid: int) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    now, most = (int(re.search(rf"{name}:\s+(\d+)", text).group(1)) / 2**20 for name in ("VmRSS", "VmHWM"))  # type: ignore[union-attr]
    return f"{now:.2f} GB of memory now, {most:.2f} GB at most"


if __name__ == "__main__":
    main()
