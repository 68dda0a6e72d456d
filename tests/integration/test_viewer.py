"""The viewer in a browser: curves that move, tokens that are coloured, texts that stay texts, keys, themes, widths."""

import re
import shutil
import socket
import threading

import pytest
from patience import patience
from viewed_runs import append, make_run, metrics, rollout, write_tokens

from openrlhf.viewer.server import ViewServer, serve

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")
pil = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install -e '.[test]'")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium"),
]

ATTACK = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
WORDS = ["What is ", "it?", "One", " two", "\n", ATTACK]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: `plain` has curves and rollouts, `tokens` has one group with tokens, and texts that are HTML."""
    folder = tmp_path_factory.mktemp("viewed")
    make_run(folder / "plain", steps=30, groups=40)
    run = make_run(folder / "tokens", steps=4, groups=0)
    write_tokens(run, 4, WORDS, ordinal=8, error=f"Traceback (most recent call last):\nValueError: {ATTACK}")
    append(run.rollouts, rollout(5, 9, 0, prompt=ATTACK, response=ATTACK, label=ATTACK, choice="worst"))
    picture = "rollout_images/00ff00ff00ff00ff.png"
    (run.path / picture).parent.mkdir()
    pil.new("RGB", (40, 20), "red").save(run.path / picture)
    looked = {"role": "user", "action": False, "text": "Look: [image 1: 9 tokens]", "tokens": 12}
    looked["images"] = [{"number": 1, "at": 6, "start": 2, "tokens": 9, "size": [40, 20], "file": picture}]
    append(run.rollouts, rollout(6, 10, 0, turns=[looked]))
    return folder


@pytest.fixture(scope="module")
def address(runs):
    listener = socket.create_server(("127.0.0.1", 0))
    server = ViewServer([runs], token="secret")
    ready = threading.Event()
    threading.Thread(target=serve, args=(server, listener), kwargs={"ready": ready.set}, daemon=True).start()
    assert ready.wait(patience(20))
    return f"http://127.0.0.1:{listener.getsockname()[1]}/secret/"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        # The sandbox needs rights that containers do not give; the page is this test's own.
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, address):
    """Opens the page at a hash; whatever it reports as an error fails the test."""
    contexts, errors = [], []

    def open_page(place, *, width=1300, height=800, theme="light"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(patience(20) * 1000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked: errors.append(asked.url) if not asked.url.startswith(address) else None)
        page.goto(f"{address}#{place}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def until(page, condition, argument=None):
    page.wait_for_function(condition, arg=argument)


def test_curves_move_while_the_file_grows_and_zoom_stays(open_page, runs):
    page = open_page("view=curves&runs=plain")
    chart = page.locator('[data-metric="reward"][data-kind="train"]')
    until(page, "() => document.querySelector('[data-metric=reward] canvas')")
    assert chart.locator(".latest").inner_text() == "3"
    steps = "() => { const { plot } = document.querySelector('[data-metric=reward]').chart; return [plot.data[0].length, plot.scales.x.max]; }"
    assert page.evaluate(steps) == [30, 30]
    page.evaluate("window.kept = 'the page is not loaded again'")
    append(runs / "plain" / "metrics.jsonl", metrics(31), {**metrics(31), "kind": "eval", "eval_x_pass1": 0.5})
    until(page, "() => document.querySelector('[data-metric=reward] .latest')?.textContent === '3.1'")
    assert page.evaluate(steps) == [31, 31]
    assert page.evaluate("window.kept") == "the page is not loaded again"
    until(page, "() => document.querySelector('[data-metric=eval_x_pass1]')")
    # A drag over the chart zooms all of them; a double click shows everything again.
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 50, steps=4)
    assert chart.locator(".tip").is_visible()
    page.mouse.up()
    until(page, "() => document.querySelector('[data-metric=reward]')?.chart.plot?.scales.x.min > 10")
    page.get_by_role("button", name="Whole axis").click()
    until(page, "() => document.querySelector('[data-metric=reward]')?.chart.plot?.scales.x.min === 1")
    page.keyboard.press("l")
    until(page, "() => document.querySelector('[data-metric=reward]')?.chart.plot?.scales.y.distr === 3")
    page.get_by_label("Filter metrics").fill("no such metric")
    until(page, "() => document.querySelector('.sections .empty')")


def test_tokens_are_coloured_by_the_chosen_column_and_a_link_points_at_one(open_page):
    page = open_page("view=rollouts&run=tokens&step=4&prompt=8&sample=0&token=5")
    token = page.locator(".sample[data-sample='0'] .t[data-token='5']")
    token.wait_for()
    classes = "() => [...document.querySelectorAll('.sample[data-sample=\"0\"] .t')].map((token) => [...token.classList].find((name) => /^([nps][1-8]|k)/.test(name)) ?? '')"
    # Advantages -1, 0, 1, 2: of eight levels, half as much as the largest has the fourth.
    assert page.evaluate(classes) == ["", "", "n4", "", "p4", "p8"]
    assert "at" in token.get_attribute("class").split()
    facts = page.locator(".facts").inner_text()
    assert "Advantage" in facts
    assert "id 5" in facts
    page.get_by_label("Colour by").select_option("mask")
    until(page, "() => document.querySelector('.t.k-action')")
    assert page.evaluate(classes) == ["k-read"] * 2 + ["k-action"] * 4
    page.keyboard.press("c")
    until(page, "() => location.hash.includes('column=versions')")
    page.keyboard.press("C")
    page.keyboard.press("ArrowLeft")
    until(page, "() => location.hash.includes('token=4') && location.hash.includes('column=mask')")
    page.keyboard.press("2")
    page.locator(".sample[data-sample='1'] .error summary", has_text="ValueError").wait_for()
    page.keyboard.press("0")
    until(page, "() => document.querySelectorAll('.sample').length === 2")
    page.keyboard.press("t")
    until(page, "() => document.querySelector('.turns.chat .said')")
    assert page.locator(".t").count() == 0


def test_what_a_rollout_says_is_text_and_no_script_of_it_runs(open_page):
    page = open_page("view=rollouts&run=tokens&step=5&prompt=9")
    page.locator(".sample .said, .sample .turn").first.wait_for()
    assert ATTACK in page.locator(".prompt .said").inner_text()
    assert ATTACK in page.locator(".label").inner_text()
    page.keyboard.press("j")
    page.locator(".t", has_text="<script>").first.wait_for()
    assert page.locator("main script, main img").count() == 0
    assert page.title() != "taken"


def test_images_of_a_rollout_are_shown(open_page):
    page = open_page("view=rollouts&run=tokens&step=6&prompt=10")
    page.locator(".picture img").wait_for()
    until(page, "() => document.querySelector('.picture img').naturalWidth === 40")
    assert page.locator(".picture img").get_attribute("alt") == "image 1"


def test_keys_walk_through_groups_steps_and_views(open_page):
    page = open_page("view=rollouts&run=plain")
    until(page, "() => document.querySelector('.row[aria-selected=true]')")

    def at():
        return tuple(int(re.search(rf"{name}=(\d+)", page.url)[1]) for name in ("step", "prompt"))

    def moved(step, prompt):
        until(
            page,
            "([a, b]) => location.hash.includes(`step=${a}&`) && location.hash.includes(`prompt=${b}`)",
            [step, prompt],
        )

    assert at() == (30, 0)
    page.keyboard.press("j")
    moved(30, 1)
    page.keyboard.press("k")
    moved(30, 0)
    page.keyboard.press("K")
    moved(29, 0)
    page.keyboard.press("J")
    moved(30, 0)
    page.keyboard.press("/")
    page.keyboard.insert_text("step:7 is:typical")
    until(page, "() => document.querySelector('#found')?.textContent.startsWith('40 groups')")
    # Of 40 rows only those in sight are elements.
    assert page.locator(".row").count() < 40
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("m")
    page.locator(".chart").first.wait_for()
    page.keyboard.press("s")
    page.locator(".settings-table").wait_for()
    page.keyboard.press("e")
    page.locator(".events-list").wait_for()


def test_narrow_and_dark_screens(open_page):
    page = open_page("view=rollouts&run=plain", width=390, height=800, theme="dark")
    background = "() => getComputedStyle(document.body).backgroundColor"
    page.locator(".row").first.wait_for()
    assert page.evaluate(background) == "rgb(19, 20, 22)"
    page.locator(".row").first.click()
    page.locator(".sample").first.wait_for()
    assert not page.locator(".table").is_visible()
    page.get_by_role("button", name="← Groups").click()
    until(page, "() => document.querySelector('.table').clientHeight > 0")
    for view in ("curves", "rollouts", "events", "settings"):
        page.evaluate("(view) => { location.hash = `view=${view}&runs=plain`; }", view)
        until(page, "(view) => document.querySelector('main').className.startsWith(view)", view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(background) == "rgb(246, 246, 243)"
    page.get_by_role("button", name="Runs").click()
    page.get_by_label("tokens").wait_for()


def test_rollouts_that_are_written_meanwhile_appear_and_the_open_group_stays(open_page, runs):
    page = open_page("view=rollouts&run=plain&step=3&prompt=2")
    until(page, "() => document.querySelector('#found')?.textContent.startsWith('1,200 groups')")
    page.locator(".sample").first.wait_for()
    append(runs / "plain" / "rollouts.jsonl", rollout(32, 7, 0), rollout(32, 7, 1, error="boom", outcome="failed"))
    until(page, "() => document.querySelector('#found')?.textContent.startsWith('1,201 groups')")
    assert "Step 3, prompt 2" in page.locator(".group-head h1").inner_text()
    page.get_by_role("button", name="failed", exact=True).click()
    until(page, "() => document.querySelector('#found')?.textContent.startsWith('1 group ')")
    page.locator(".row").click()
    page.locator(".error pre", has_text="boom").wait_for()
