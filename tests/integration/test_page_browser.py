"""The status page in a real browser, before a real stack: what a person sees, and a screen reader.

Its screenshots are for people: UMAD_SCREENSHOTS names a folder for them.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.integration.plain_stack import RUNTIME_MIB, PlainStack, plain_stack
from umad import __version__

pytestmark = [pytest.mark.slow, pytest.mark.models]
WITHIN_MS = 30_000
PHONE = {"width": 320, "height": 640}
DESK = {"width": 1100, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root has no sandbox in it; the page is our own.
        yield playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def made() -> Iterator[PlainStack]:
    """Two models, and room for one of them."""
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        settings = {"budget_mib": RUNTIME_MIB + 100, "model": 'load = "request"'}
        leases = 'residence_min = "0s"\nrival_rest = "0s"'
        with plain_stack(Path(folder), ["llama", "qwen"], leases=leases, **settings) as stack:
            yield stack


@pytest.fixture
def look(browser: Browser, made: PlainStack) -> Iterator[Any]:
    """Opens the page; fails the test for whatever the console has to say, or is fetched abroad."""
    contexts, said, fetched = [], [], set()

    def opened(*, clock: bool = False, **more: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": DESK, **more}))
        page = contexts[-1].new_page()
        if clock:
            page.clock.install()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.add(request.url))
        page.goto(f"http://{made.address}/")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    own = re.compile(rf"http://{re.escape(made.address)}/(page/[a-z.]+)?$")
    assert [url for url in fetched if not own.match(url)] == []


def row(page: Page, model: str) -> Any:
    return page.locator(f"#model-{model} .state")


def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("UMAD_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_it_follows_loads_and_evictions_by_itself(look: Any, made: PlainStack) -> None:
    page = look()
    expect(page.locator("#live")).to_have_text("Live", timeout=WITHIN_MS)
    expect(page.locator("#models tbody tr")).to_have_count(2)
    expect(page.locator("h1")).to_have_text("All 2 models take requests")
    page.evaluate("window.same = document.getElementById('model-llama')")
    page.locator("#pause").focus()
    for model, other in (("llama", "qwen"), ("qwen", "llama")):
        assert made.chat(model).status == 200
        expect(row(page, model)).to_have_text("ready", timeout=WITHIN_MS)
        expect(row(page, other)).to_have_text("cold", timeout=WITHIN_MS)
        expect(page.locator("#news")).to_contain_text(f"{model} has loaded", timeout=WITHIN_MS)
    expect(page.locator("#news")).to_contain_text("llama is asked to go for qwen")
    expect(page.locator("#workers")).to_contain_text("64.0 MiB")
    assert "?" not in page.locator("main").inner_text()
    # It was mended, not made anew: who reads a row or stands on the button keeps their place.
    assert page.evaluate("window.same === document.getElementById('model-llama')")
    assert page.evaluate("document.activeElement.id") == "pause"
    keep(page, "live")


def test_paused_or_out_of_sight_it_asks_for_nothing(look: Any) -> None:
    page = look(clock=True)
    live, pause = page.locator("#live"), page.get_by_role("button", name="Pause")
    expect(live).to_have_text("Live", timeout=WITHIN_MS)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def goes_on() -> None:
        with page.expect_request(page.url, timeout=WITHIN_MS):
            page.clock.run_for(60_000)

    def stands_still() -> None:
        expect(live).to_have_text(re.compile("Live|Paused at"))  # no turn is under way
        page.wait_for_load_state("networkidle")
        asked.clear()
        page.clock.run_for(60_000)
        assert asked == []

    goes_on()
    pause.click()
    expect(live).to_contain_text("Paused at")
    stands_still()
    pause.click()
    expect(live).to_have_text("Live", timeout=WITHIN_MS)
    goes_on()
    turned = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, writable: true })")
    page.evaluate(turned)
    stands_still()
    page.evaluate(f"document.hidden = false; {turned}")
    goes_on()


def test_after_an_upgrade_it_loads_itself_anew(browser: Browser, made: PlainStack) -> None:
    page = browser.new_page()
    version = page.locator("html")

    def of_before(route: Route) -> None:
        html = route.fetch().text()
        route.fulfill(body=re.sub('data-version="[^"]*"', 'data-version="0.0.0"', html))

    page.route(f"http://{made.address}/", of_before, times=1)
    page.goto(f"http://{made.address}/", wait_until="commit")
    expect(version).to_have_attribute("data-version", __version__, timeout=WITHIN_MS)
    page.close()


def test_without_scripts_it_is_a_picture_of_the_moment(look: Any) -> None:
    page = look(java_script_enabled=False)
    assert page.locator("#live").inner_text().startswith("As of ")
    assert page.locator("#models tbody tr").count() == 2
    assert page.locator("#workers tbody tr").count() >= 2
    assert not page.locator("#pause").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_is_for_everybody(look: Any, scheme: str, size: dict[str, int]) -> None:
    page = look(viewport=size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    expect(page.locator("#live")).to_have_text("Live", timeout=WITHIN_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    report = Axe().run(page)
    assert report.violations_count == 0, report.generate_report()
    for landmark in ("banner", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1
    for name in ("Memory", "Models", "Memory by worker", "Who waits", "What happened"):
        assert page.get_by_role("region", name=name, exact=True).count() == 1
    table = page.get_by_role("table", name="Memory by worker")
    assert table.get_by_role("columnheader").count() == 7
    assert table.get_by_role("rowheader", name="runtime").count() == 1
    moving = "getComputedStyle(document.querySelector('.bar rect')).transitionDuration"
    assert page.evaluate(moving) == "0s"
    keep(page, f"{scheme}-{size['width']}")


def test_it_says_when_the_daemon_is_away_and_when_the_server_is(
    browser: Browser, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        with plain_stack(Path(folder), ["llama"], budget_mib=RUNTIME_MIB + 100) as made:
            page = browser.new_page(viewport=PHONE)
            page.goto(f"http://{made.address}/")
            title = page.locator("h1")
            expect(title).to_have_text("The model takes requests", timeout=WITHIN_MS)
            made.daemon.kill()
            expect(title).to_have_text("The memory daemon does not answer", timeout=WITHIN_MS)
            expect(page.locator("#notes")).to_contain_text("start it with `systemctl start umad`")
            expect(page.locator("#live")).to_have_text("Live")
            keep(page, "no-daemon")
            made.daemon.start()
            expect(title).to_have_text("The model takes requests", timeout=WITHIN_MS)
            expect(page.locator("#worker-1")).to_be_visible()
        expect(page.locator("#live")).to_contain_text("Not live since", timeout=WITHIN_MS)
        expect(page.locator("#model-llama")).to_be_visible()  # what was known last stays
        keep(page, "not-live")
        page.close()
