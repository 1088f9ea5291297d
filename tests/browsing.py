"""What tests of the page share: tabs that notice what goes wrong in them, and waiting for what is shown."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import BrowserContext, Page

from spotlights.explorer import Served


def watched(browser: BrowserContext, served: Served) -> tuple[Page, list[str]]:
    """A new tab, and what goes wrong in it: console errors, requests to elsewhere."""
    page, wrong = browser.new_page(), []
    page.set_viewport_size({"width": 1280, "height": 800})
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((served.url, "data:", "blob:")) else None)
    return page, wrong


@contextmanager
def opened(browser: BrowserContext, served: Served, state: str = "") -> Iterator[Page]:
    """The page in a tab of its own."""
    page, wrong = watched(browser, served)
    try:
        page.goto(served.url + state)
        yield page
    finally:
        page.close()
    assert wrong == []


def shown(page: Page, condition: str = "true") -> None:
    page.wait_for_function(f"() => document.body.dataset.shown === location.hash && ({condition})")


def compared(page: Page, mask: str) -> None:
    page.wait_for_function("mask => (document.body.dataset.compared ?? '').startsWith(mask)", arg=mask)


def logits(page: Page) -> list[float]:
    return [
        float(value)
        for value in page.locator("#outputs [data-logit]").evaluate_all("all => all.map(e => e.dataset.logit)")
    ]


def point(page: Page, selector: str, place: int) -> None:
    """Moves the mouse over a part of a chart that may be drawn again meanwhile: Playwright's hover would refuse it."""
    found = page.wait_for_function(
        """([selector, place]) => {
            const part = document.querySelectorAll(selector)[place];
            part?.scrollIntoView({ block: "center" });
            const { x, y, width, height } = part?.getBoundingClientRect() ?? {};
            return width && [x + width / 2, y + height / 2];
        }""",
        arg=[selector, place],
    )
    page.mouse.move(*found.json_value())
