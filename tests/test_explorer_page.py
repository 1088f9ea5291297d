"""The page in a real browser: choose, see, brush, mask; draw, type; a shared link; nothing leaves the machine."""

import http.server
import importlib.util
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from playwright.sync_api import BrowserContext, Page

import spotlights as sl
import training
from browsing import compared, logits, opened, point, shown, watched
from demos import small_demo
from explorers import coloured, digits, first, get, reader_run, speller
from spotlights.explorer import Served
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.jobs import Preparing
from spotlights.explorer.saved import saved_page
from spotlights.explorer.views import png
from spotlights.selections import parse_selections
from spotlights_paper.subjects import subject_of


@pytest.fixture(scope="module")
def of_digits() -> Iterator[Served]:
    with Served(digits().subject, port=0) as served:
        yield served


@pytest.fixture(scope="module")
def tab(browser: BrowserContext, of_digits: Served) -> Iterator[tuple[Page, list[str]]]:
    """One tab for most tests: a new one takes longer than what they do."""
    page, wrong = watched(browser, of_digits)
    page.goto(of_digits.url)
    yield page, wrong
    page.close()


@pytest.fixture
def page(tab: tuple[Page, list[str]], of_digits: Served) -> Iterator[Page]:
    """The explorer of digits, asked about its first input, and nothing masked."""
    page, wrong = tab
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(f"{of_digits.url}#q=test%3A{first()}")
    shown(page)
    yield page
    assert wrong == []


def audited(page: Page, example: int) -> None:
    page.wait_for_function("example => document.body.dataset.audited === example", arg=str(example))


def masked_by_library(**conditions) -> torch.Tensor:
    """The last layer alone is masked, by default."""
    opened = digits().opened
    masked = opened.memory.without(**conditions).primal(opened.model, layers=["layers.2"])
    return masked(digits().subject.inputs.batch([0]))[0].detach()


def brush(page: Page) -> None:
    """Marks the first half of the steps. A drag is lost if the chart is drawn anew meanwhile: a person tries again."""
    for _ in range(10):
        page.locator("#time .brush").scroll_into_view_if_needed()
        box = page.locator("#time .brush").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 5, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30, steps=4)
        page.mouse.up()
        page.wait_for_timeout(500)
        if "where=step" in page.url:
            return


def test_choose_see_brush_mask(browser, of_digits: Served):
    with opened(browser, of_digits, f"#q=test%3A{first()}") as page:
        shown(page)
        said = page.inner_text("#said")
        assert said == str(int(digits().opened.model(digits().subject.inputs.batch([0])).argmax()))
        page.wait_for_selector(".badge.yes")
        assert page.locator(".badge.yes").count() == 3
        assert page.locator(".card").count() == 20

        page.select_option("#pick-layer", "layers.0")
        shown(page, "location.hash.includes('layers.0')")
        assert page.inner_text("#controls .caution") == "first order"
        page.keyboard.press("m")
        page.keyboard.press("m")
        shown(page, "location.hash.includes('measure=score')")
        assert page.locator(".card").count() == 20

        brush(page)
        shown(page, "location.hash.includes('where=step')")
        assert page.inner_text("#steps-chip").startswith("only steps ")

        page.click(f".chip[data-column=label][data-value='{said}']")
        compared(page, f"label={said}")
        expected = masked_by_library(label=int(said))
        assert logits(page) == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
        assert page.inner_text("#masked-said") == str(int(expected.argmax())) != said


def test_the_answer_follows_the_slider(page: Page):
    page.focus("#steps-1")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    mask = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('mask')")
    compared(page, mask)
    end = int(re.fullmatch(r"step=0-(\d+)", mask).group(1))
    assert logits(page) == pytest.approx(masked_by_library(step=range(end)).tolist(), rel=1e-3, abs=1e-3)


def test_a_link_shows_a_fresh_browser_the_same(browser, of_digits: Served):
    example = digits().subject.inputs.ids[3]
    state = f"#q=test%3A{example}&layer=layers.1&measure=contribution&target=2&by=slot"
    state += "&where=step%3D0-20&mask=label%3D1%2C4&in=layers.2"
    pages = []
    for fresh in (browser.browser.new_context(), browser.browser.new_context()):
        with opened(fresh, of_digits, state) as page:
            shown(page)
            compared(page, "label=1,4")
            pages.append(
                (page.inner_text("#story"), page.inner_text("#examples"), page.inner_text("#outputs"), page.url)
            )
            pressed = page.locator(".chip[aria-pressed=true]").all_inner_texts()
            assert {"layers.2", "1", "4"} <= {text.strip() for text in pressed}
            chosen = [page.input_value(f"#{name}") for name in ("pick-layer", "pick-measure", "pick-by", "target")]
            assert chosen == ["layers.1", "contribution", "slot", "2"]
    assert pages[0] == pages[1]


def test_hovering_a_picture_marks_its_visits_in_time(page: Page):
    before = page.locator("#time path").count()
    page.hover(".card .thumb >> nth=0")
    page.wait_for_function("before => document.querySelectorAll('#time path').length > before", arg=before)
    page.mouse.move(0, 0)
    page.wait_for_function("before => document.querySelectorAll('#time path').length === before", arg=before)


def test_hovering_every_part_of_every_chart_of_the_answer_does_no_harm(page: Page):
    for selector in ("#waterfall .row", "#mosaic .tile", "#cumulative svg", "#time .brush"):
        for place in range(min(4, page.locator(selector).count())):
            for _ in range(2):
                point(page, selector, place)
    page.mouse.move(0, 0)
    page.wait_for_function("() => document.getElementById('peek').hidden")


def test_the_waterfall_leads_from_the_initial_weights_to_the_logit(page: Page):
    rows = page.locator("#waterfall [data-key]")
    values = [float(value) for value in rows.evaluate_all("all => all.map(e => e.dataset.value)")]
    found = get("layer", q=f"test:{first()}", layer="layers.2")
    assert values[0] == pytest.approx(found["initial"])
    assert values[-1] == pytest.approx(found["value"], rel=1e-4)
    assert sum(values[:-1]) == pytest.approx(values[-1], rel=1e-3)
    by_label = {f"label={row['value']}": row["total"] for row in found["totals"]["label"]}
    keys = rows.evaluate_all("all => all.map(e => e.dataset.key)")
    assert dict(zip(keys[1:-1], values[1:-1], strict=True)) == pytest.approx(by_label)


def test_a_bar_opens_into_its_examples_and_is_left_out_by_a_key(page: Page):
    row = page.locator("#waterfall [data-key='label=3']")
    row.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('group-title').textContent.startsWith('label 3:')")
    found = get("layer", q=f"test:{first()}", layer="layers.2", where="label=3", top=60)
    assert found["shares"]["half"] == int(page.inner_text("#half b").replace(",", ""))
    page.wait_for_function("() => document.querySelectorAll('#mosaic .tile').length > 3")
    page.locator("#waterfall [data-key='label=3']").focus()
    page.keyboard.press("x")
    compared(page, "label=3")
    expected = masked_by_library(label=3)
    assert logits(page) == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
    page.wait_for_function("() => Number(document.querySelector('[data-key=\"label=3\"]').dataset.value) === 0")
    total = float(page.get_attribute("#waterfall [data-key=answer]", "data-value"))
    assert total == pytest.approx(float(expected[int(page.inner_text("#said"))]), rel=1e-3)


def test_why_one_output_and_not_another_is_the_difference_of_two(page: Page):
    page.select_option("#versus", "8" if page.inner_text("#said") != "8" else "7")
    shown(page, "location.hash.includes('target=')")
    wanted = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('target')")
    one, other = (int(part) for part in wanted.split("-"))
    with torch.no_grad():
        outputs = digits().opened.model(digits().subject.inputs.batch([0]))[0]
    total = float(page.get_attribute("#waterfall [data-key=answer]", "data-value"))
    assert total == pytest.approx(float(outputs[one] - outputs[other]), rel=1e-3)


def test_the_keyboard_is_enough(page: Page):
    before = page.url
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "look"
    assert page.url == before  # the address is the state of the page
    page.keyboard.press("ArrowRight")
    shown(page, f"location.hash.includes('{digits().subject.inputs.ids[1]}')")
    page.keyboard.press("l")
    shown(page, "location.hash.includes('layer=layers.0')")
    page.focus("#controls .caution")
    assert "first order" in page.inner_text("#bubble")


def test_a_training_example_becomes_the_query_with_a_click(page: Page):
    page.click(".card .thumb >> nth=0")
    shown(page, "location.hash.includes('q=train')")
    page.go_back()
    shown(page, "location.hash.includes('q=test')")


def test_an_example_is_left_out_with_a_click(page: Page):
    example = page.get_attribute(".card >> nth=0", "data-example")
    page.hover(".card >> nth=0")
    page.click(".card .out >> nth=0")
    compared(page, f"example={example}")
    assert logits(page) == pytest.approx(masked_by_library(example=int(example)).tolist(), rel=1e-3, abs=1e-3)


def test_the_audit_is_a_queue_whose_decisions_can_be_taken_away(page: Page):
    page.click("#views [data-view=audit]")
    suspects = digits().opened.memory.suspects(60)
    first, second = suspects.examples[:2]
    audited(page, first)
    assert page.locator("#suspect .given").inner_text() == str(suspects.columns["label"][0])
    assert page.locator("#suspect .says").inner_text() == str(suspects.answers[0])
    page.wait_for_selector("#neighbours .card")
    page.click("#see-affected")
    page.wait_for_selector("#affected-answer")
    page.keyboard.press("b")
    audited(page, second)
    page.keyboard.press("d")
    audited(page, suspects.examples[2])
    with page.expect_download() as download:
        page.click("#export-json")
    kept = json.loads(Path(download.value.path()).read_text())["decisions"]
    assert {row["example"]: (row["decision"], row["label"]) for row in kept} == {
        first: ("relabel", suspects.answers[0]),
        second: ("drop", None),
    }
    page.click("#mask-suspects")
    page.wait_for_function("() => (document.body.dataset.compared ?? '').startsWith('example=')")
    expected = masked_by_library(example=suspects.examples)
    assert logits(page) == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
    page.click("#ask-accuracy")
    page.wait_for_selector("#accuracy b")
    page.evaluate("localStorage.clear()")


def test_influence_says_that_it_is_an_estimate(page: Page):
    page.select_option("#pick-measure", "influence")
    shown(page, "location.hash.includes('influence')")
    assert page.inner_text("#controls .caution") == "estimate"
    page.hover("#controls .caution")
    assert "estimate" in page.inner_text("#bubble")
    assert "would be lower" in page.inner_text("#examples")
    assert page.locator("#pick-by").count() == 0


def test_draw_a_digit(page: Page):
    page.click("#ways button:text-is('Draw')")
    box = page.locator("#pad").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 30, steps=8)
    page.mouse.up()
    shown(page, "location.hash.includes('q=pixels')")
    assert page.inner_text("#said").isdigit()
    page.reload()
    shown(page)
    assert page.locator("#story .picture").get_attribute("src").startswith("data:image/png")
    page.click("#ways button:text-is('Test inputs')")


def test_an_uploaded_image_is_ink_whatever_its_paper(page: Page, tmp_path):
    answers = []
    for ink, paper in ((0, 255), (60, 200), (230, 20)):
        pixels = np.full((40, 40), paper, np.uint8)
        pixels[8:32, 18:23] = ink
        (tmp_path / "one.png").write_bytes(png(pixels))
        page.click("#ways >> text=Upload")
        page.set_input_files("#file", tmp_path / "one.png")
        shown(page, "location.hash.includes('pixels')")
        page.wait_for_function(
            "() => document.body.dataset.compared === new URLSearchParams(location.hash.slice(1)).get('q')"
        )
        answers.append(logits(page))
        page.click("#ways >> text=Test inputs")
        page.goto(f"{page.url.split('#')[0]}#q=test%3A{first()}")
        shown(page)
    assert answers[0] == pytest.approx(answers[1], abs=0.05)
    assert answers[0] == pytest.approx(answers[2], abs=0.05)


def test_an_empty_list_says_why_and_leads_back(page: Page):
    empty = '{"matching": 0, "first": 0, "inputs": []}'
    page.route("**/api/inputs?*only=wrong*", lambda route: route.fulfill(body=empty, content_type="application/json"))
    page.select_option("[aria-label='Right or wrong']", "wrong")
    page.wait_for_selector("#inputs >> text=There is no test input that is answered wrong.")
    page.click("#inputs >> text=Show all of them")
    page.wait_for_selector("#inputs .thumb")
    assert page.input_value("[aria-label='Right or wrong']") == "all"


def test_type_a_prompt_and_click_a_token(browser):
    with Served(speller().subject, port=0) as served, opened(browser, served) as page:
        shown(page)
        page.click("#ways button:text-is('Prompt')")
        page.fill("#prompt", "the wo")
        page.click("#send")
        shown(page, "location.hash.includes('text%3Athe+wo')")
        page.click("#tokens button >> nth=1")
        shown(page, "location.hash.includes('at=1')")
        tokens = torch.tensor([speller().subject.tokenizer.encode("the wo")])
        said = int(speller().opened.model(tokens)[0, 1].argmax())
        assert page.text_content("#said").replace("␣", " ") == speller().subject.tokenizer.decode([said])
        assert page.locator(".cards.text .card").count() > 0


def test_tokens_are_shaded_by_what_they_add_and_the_network_writes_on(browser: BrowserContext):
    with Served(speller().subject, port=0) as served, opened(browser, served, "#q=text%3Athe%20wolf&at=5") as page:
        shown(page)
        opened_, tokens = speller().opened, torch.tensor([speller().subject.tokenizer.encode("the wolf")])
        said = int(opened_.model(tokens)[0, 5].argmax())
        spot = opened_.memory.attend(opened_.model, tokens)
        through = spot["embed"].contributions(lambda output: output[:, 5, said], rows=True).totals("step", bins=1)
        tones = page.locator("#tokens button").evaluate_all(
            "all => all.map(e => e.classList.contains('pro') ? 1 : e.classList.contains('con') ? -1 : 0)"
        )
        assert tones == through.values[:, 0].sign().int().tolist()
        assert {place for place, tone in enumerate(tones) if tone} <= {4, 5}  # the network reads two tokens
        card = page.locator(".cards.text .card >> nth=0")
        example = int(card.get_attribute("data-example") or 0)
        part = spot["head"].at(5).contributions(lambda output: output[:, 5, said])
        slots = part.within(opened_.memory.where(example=example)).totals("position")
        shares = (slots.values[0] / slots.values[0].abs().max()).abs().tolist()
        drawn = card.locator(".shaded").evaluate_all("all => all.map(e => Number(e.style.getPropertyValue('--share')))")
        assert [share / max(drawn) for share in drawn[: len(shares)]] == pytest.approx(shares, abs=0.01)
        page.click("#write-on")
        shown(page, "location.hash.includes('the+wolf+')")
        written = page.locator("#tokens button").all_text_contents()
        assert len(written) == len("the wolf") + 8
        numbers = speller().subject.tokenizer.encode("".join(written))
        for place in range(len("the wolf"), len(numbers)):
            assert numbers[place] == int(opened_.model(torch.tensor([numbers[:place]]))[0, -1].argmax())


def test_a_language_run_shows_the_passages_that_a_clicked_token_attends_to(browser: BrowserContext):
    subject = subject_of(reader_run())
    prompt, token = "the wolf and", 7
    with Served(subject, port=0) as served, opened(browser, served) as page:
        shown(page)
        page.click("#ways button:text-is('Prompt')")
        page.fill("#prompt", prompt)
        page.press("#prompt", "Enter")
        shown(page, "location.hash.includes('text%3Athe+wolf')")
        assert page.locator("#tokens button").all_text_contents() == list(prompt)
        page.click(f"#tokens button >> nth={token}")
        shown(page, f"location.hash.includes('at={token}')")
        memory, tokens = subject.open(), torch.tensor([subject.tokenizer.encode(prompt)])
        spot = memory.attend(subject.network(memory), tokens, kernel=subject.kernel)
        expected = spot[next(iter(memory.layers))].at(token).top(20, by="example").columns["example"][0][0]
        cards = page.locator(".cards.text .card")
        assert cards.evaluate_all("all => all.map(e => Number(e.dataset.example))") == expected
        assert cards.first.locator("mark").inner_text() == prompt[token]
        assert "folded" in page.inner_text("#mask-controls")
        page.click(".mover button:text-is('›')")
        shown(page, f"location.hash.includes('at={token + 1}')")


def test_a_memory_under_recording(browser, tmp_path):
    model = training.network(dtype=torch.float32)
    optimizer = training.sgd(model)
    path = tmp_path / "live.memory"
    with ExitStack() as stack:
        with sl.record(model, optimizer, path, segment_bytes=1) as recorder:
            training.train(model, optimizer, range(5), recorder)
            while sl.open(path).steps < 1:
                pass
            served = stack.enter_context(Served(sl.Subject(path, model, torch.randn(3, 5)), port=0))
            page = stack.enter_context(opened(browser, served))
            shown(page)
            assert "Still being recorded" in page.inner_text("#notice")
            training.train(model, optimizer, range(5, 12), recorder)
            page.wait_for_selector("#newest")
            page.click("#newest")
            page.wait_for_function("() => / (1[0-2]|[6-9]) steps/.test(document.getElementById('title').textContent)")
        # What the page still shows is made of the memory: whether that is the trained network is not known yet.
        page.wait_for_selector("#badges >> text=not verified")
        page.click("#newest")
        page.wait_for_selector("#badges .badge.yes")


def test_mistakes_are_said_where_they_are(browser, of_digits: Served):
    page = browser.new_page()  # not `opened`: the browser writes the 404 on its console
    page.goto(f"{of_digits.url}#q=test:5")
    page.wait_for_selector("#story .error")
    assert "No test input has the id 5" in page.inner_text("#story")
    page.close()


@pytest.mark.parametrize("view", ["", "audit", "history", "map"])
def test_it_fits_a_phone(page: Page, view: str):
    page.set_viewport_size({"width": 390, "height": 844})
    if view:
        page.click(f"#views [data-view={view}]")
        page.wait_for_function("() => document.body.dataset.audited || document.body.dataset.shown === location.hash")
    page.wait_for_function("() => document.documentElement.scrollWidth <= 390")  # figures follow a turn of the phone
    page.click("#help")
    assert page.is_visible("dialog#guide")
    page.keyboard.press("Escape")


def test_what_a_mask_is_not_is_said_where_masks_are_made(page: Page):
    page.focus("#leave .caution")
    assert "not retraining" in page.inner_text("#bubble")
    page.click("#views [data-view=audit]")
    page.wait_for_selector("#decisions")
    assert "is a mask, not retraining" in page.inner_text("#decisions")


@pytest.mark.parametrize(
    "text", ['label=3,5 step=0-300; source="old; \\"mail\\"",x', "step=0-10,20-30", " ; example=12  label=3;", ""]
)
def test_the_page_reads_and_writes_selections_as_python_does(page: Page, text: str):
    script = "async text => { const s = await import('./static/selections.js'); return s.%s }"
    written = page.evaluate(script % "formatSelections(s.parseSelections(text))", text)
    assert parse_selections(written) == parse_selections(text)
    for value in (3, -2.5, "mnist", "3", "0-3", "1e5", 'old; "mail"', "a\\b", "é", "2019-01-02"):
        spelled = page.evaluate(script % "spell(text)", value)
        assert parse_selections(f"column={spelled}") == [{"column": value}]


def test_the_demo_says_how_to_open_it():
    assert f"spotlights explore {small_demo().settings.out}" in small_demo().printed


def test_a_page_of_another_site_reaches_nothing_that_costs_or_has_effects(
    browser: BrowserContext, of_digits: Served, monkeypatch: pytest.MonkeyPatch
):
    """A page of another port of this machine, which a browser lets come closest, tries pictures, fetches and a form."""
    asked: list[str] = []
    for name in ("refresh", "answer", "kept"):
        monkeypatch.setattr(of_digits.explorer, name, lambda *_, name=name: asked.append(name))
    address = f"{of_digits.url}api/"
    evil = f"""<!doctype html><title>evil</title>
        <img src="{address}layer?q=test:{first()}"><iframe src="{address}run" name="frame"></iframe>
        <form method="post" action="{address}refresh" target="frame"></form>"""
    attack = f"""async () => {{
        document.forms[0].submit();
        const tries = ["GET query?q=test:{first()}", "GET audit", "POST refresh"].map(async (line) => {{
            const [method, path] = line.split(" ");
            const asked = fetch("{address}" + path, {{ method, mode: "no-cors" }}).catch(() => ({{ type: "refused" }}));
            return (await asked).type;
        }});
        return Promise.all(tries);
    }}"""

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(evil.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://localhost:{server.server_port}/")
        assert set(page.evaluate(attack)) <= {"opaque", "refused"}
        page.wait_for_timeout(500)
        page.close()
        server.shutdown()
    assert asked == []


# -- the other views --------------------------------------------------------------------------


def test_the_history_is_scrubbed_played_and_says_who_taught(page: Page):
    page.click("#views [data-view=history]")
    shown(page, "location.hash.includes('view=history')")
    page.wait_for_selector("#areas svg")
    box = page.locator("#curve .brush").bounding_box()
    assert box is not None
    for place in (0.3, 0.6):
        page.mouse.move(box["x"] + place * box["width"], box["y"] + 40)
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 40)
    page.wait_for_function("() => Number(document.getElementById('scrub').value) > 0")
    page.wait_for_selector("#during .card")
    page.focus("#scrub")
    page.keyboard.press("Home")
    page.wait_for_function("() => document.getElementById('at-step').textContent.startsWith('After step 0 ')")
    before = float(page.inner_text("#number-at-step").replace("−", "-"))
    opened = digits().opened
    with torch.no_grad():
        outputs = opened.memory.as_of(0).primal(opened.model)(digits().subject.inputs.batch([0]))[0]
    assert before == pytest.approx(float(outputs[int(page.inner_text("#said"))]), abs=0.01)
    page.click("#play")
    page.wait_for_function("() => Number(new URLSearchParams(location.hash.slice(1)).get('step')) > 1")
    page.click("#play")


def test_a_line_around_points_of_the_map_adds_them_up_and_leaves_them_out(page: Page):
    page.click("#views [data-view=map]")
    shown(page, "location.hash.includes('view=map')")
    page.wait_for_selector("#chosen .card")
    page.select_option("#pick-layer", "layers.0")
    shown(page, "location.hash.includes('layers.0')")
    page.locator("#map-canvas").scroll_into_view_if_needed()
    box = page.locator("#map-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(2, 2)
    corners = [(0.4, 0.4), (0.6, 0.4), (0.6, 0.6), (0.4, 0.6)]
    for number, (x, y) in enumerate(corners):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=3)
        if not number:
            page.mouse.down()
    page.mouse.up()
    page.wait_for_function("() => Number(document.body.dataset.chosen) > 0")
    count = page.evaluate("Number(document.body.dataset.chosen)")
    page.wait_for_selector("#mask-chosen")
    page.click("#mask-chosen")
    page.wait_for_function("() => (document.body.dataset.compared ?? '').startsWith('example=')")
    left_out = parse_selections(page.evaluate("new URLSearchParams(location.hash.slice(1)).get('mask')"))[0]["example"]
    left_out = left_out if isinstance(left_out, list) else [left_out]
    assert len(left_out) == count
    assert logits(page) == pytest.approx(masked_by_library(example=left_out).tolist(), rel=1e-3, abs=1e-3)


def test_a_map_by_umap_says_what_to_install_and_leads_back(page: Page, tab, monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "umap" else real(name, *more))
    page.click("#views [data-view=map]")
    page.wait_for_selector("#map-canvas[data-drawn]")
    with page.expect_response(lambda response: response.status == 422):
        page.select_option("#projection", "umap")
    page.wait_for_selector("#map-note .error")
    assert "pip install 'spotlights[umap]'" in page.inner_text("#map-note")
    page.click("#map-note button:text-is('Two directions instead')")
    page.wait_for_function("() => document.getElementById('map-note').textContent.includes('of their variance')")
    assert all("422" in message for message in tab[1])  # which the browser says of every refusal
    tab[1].clear()


@pytest.mark.parametrize("view", ["", "history", "map", "audit"])
def test_a_saved_page_works_from_a_file_without_a_server(browser: BrowserContext, tmp_path, view: str):
    waiting = {"q": f"test:{first()}", "view": view}
    for _ in range(600):
        try:
            saved_page(digits(), waiting).save(tmp_path / "answer.html")
            break
        except Preparing:
            continue
    page, wrong = browser.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
    page.goto(f"file://{tmp_path}/answer.html")
    if view:
        page.wait_for_selector({"history": "#areas svg", "map": "#map-canvas[data-drawn]", "audit": "#suspect"}[view])
    else:
        page.wait_for_selector("#mosaic .tile")
        page.click("#waterfall [data-key='label=4']")
        page.wait_for_function("() => document.getElementById('group-title').textContent.startsWith('label 4:')")
        page.click("#mask-group")
        compared(page, "label=4")
        assert logits(page) == pytest.approx(masked_by_library(label=4).tolist(), rel=1e-3, abs=1e-3)
        page.select_option("#pick-per", "step")
        page.wait_for_selector("#waterfall [data-key^='step=']")
        page.click("#waterfall [data-key^='step='] >> nth=1")
        page.wait_for_function("() => document.getElementById('group-title').textContent.startsWith('steps ')")
    assert page.locator(".error").count() == 0
    page.close()
    assert wrong == []


def test_the_save_button_gives_the_page(page: Page):
    with page.expect_download() as download:
        page.click("#save")
    assert "<!doctype html>" in Path(download.value.path()).read_text()


def test_a_chart_is_taken_away_as_png_and_svg(page: Page):
    for kind, begins in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as download:
            page.click(f"#sum-title button:text-is('{kind}')")
        assert Path(download.value.path()).read_bytes().startswith(begins)


# -- for everyone -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_view(page: Page, scheme: Literal["light", "dark"]):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python").Axe()
    page.emulate_media(color_scheme=scheme)
    for view in ("", "history", "map", "audit"):
        page.goto(page.url.split("&view=")[0] + (f"&view={view}" if view else ""))
        shown(page, "!document.querySelector('.busy, progress')")
        found = axe.run(page).response["violations"]
        serious = {each["id"]: each["nodes"][0]["html"] for each in found if each["impact"] in ("serious", "critical")}
        assert serious == {}, view
    page.emulate_media(color_scheme="light")


# -- any data, any screen ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [(360, 740), (2560, 1440)])
def test_named_classes_and_colour_images_fit_every_screen_in_the_dark(browser: BrowserContext, size):
    with Served(coloured(), port=0) as served:
        dark = browser.browser.new_context(color_scheme="dark", viewport={"width": size[0], "height": size[1]})
        with opened(dark, served, "#q=test:1") as page:
            page.set_viewport_size({"width": size[0], "height": size[1]})
            shown(page)
            assert page.inner_text("#said") in ("red disc", "green square", "a blue triangle")
            page.wait_for_function("wide => document.documentElement.scrollWidth <= wide", arg=size[0])
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
            assert "red disc" in page.locator("#waterfall text").all_text_contents()
            small = page.evaluate(
                "() => [...document.querySelectorAll('body *')].filter(e => e.childNodes.length && e.offsetParent "
                "&& [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) "
                "&& parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 80))"
            )
            assert small == []
        dark.close()


def test_the_widget_s_page_works_without_a_server(browser: BrowserContext):
    """A page of a notebook's kind: it loads the widget's module, and hands messages on to the kernel's side."""
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    from spotlights.explorer.widget import reply_to

    subject = digits().subject
    widget = subject.widget(first(), height=700)
    explorer = Explorer(subject)
    module = (files("spotlights.explorer") / "static" / "widget.js").read_text()
    host = """async ([module, page]) => {
        const { default: widget } = await import(`data:text/javascript,${encodeURIComponent(module)}`);
        const heard = [];
        const tell = async (asked) => JSON.parse(await kernel(JSON.stringify(asked)));
        const send = async (asked) => { const answer = await tell(asked); heard.forEach((hear) => hear(answer)); };
        const get = (name) => ({ page, height: 700 })[name];
        widget.render({ model: { get, send, on: (_, hear) => heard.push(hear), off() {} }, el: document.body });
    }"""
    wrong: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.expose_function("kernel", lambda asked: json.dumps(reply_to(explorer, json.loads(asked)), default=str))
    page.evaluate(host, [module, widget.page])
    frame = page.frame_locator("iframe")
    frame.locator("#mosaic .tile").first.wait_for()
    frame.locator("#waterfall [data-key='label=4']").click()
    frame.locator("#group-title >> text=label 4").wait_for()
    frame.locator("#inputs .thumb").nth(1).click()
    frame.locator(f"#which >> text=test input {subject.inputs.ids[1]}").wait_for()
    page.close()
    assert wrong == []
