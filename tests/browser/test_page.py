"""The page in a real browser: what it shows of a known cache, live, by keyboard, in light and in dark."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Locator, expect

from hicache.service.client import EngineWork, Prompt
from hicache.service.server.process import Server
from hicache.tier import HOST, NVME
from tests.browser.looking import WAIT_MS, Looking
from tests.service.stored import NAMESPACE, PAGE, store
from tests.service.test_deadlines import leave_the_host
from tests.tools.served import COLD, WARM, known_server

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)

Look = Callable[..., Looking]
SHARED: Final = "0 1 2 3"
COLD_TAIL: Final = "32 33 34"
WARM_TAIL: Final = "900 901 902"
LIGHT: Final = {"host": "rgb(14, 116, 144)", "nvme": "rgb(162, 28, 175)"}
DARK: Final = {"host": "rgb(24, 127, 155)", "nvme": "rgb(180, 69, 192)"}
REMEMBER_NANS: Final = """() => {
    window.seen = [];
    const look = () => document.body.innerText.includes("NaN") && window.seen.push(document.body.innerText);
    new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Keeps in `seen` what the page shows whenever a number of it is none."""


def colour(cell: Locator) -> str:
    return str(cell.evaluate("cell => getComputedStyle(cell).backgroundColor"))


def begins(name: str) -> re.Pattern[str]:
    return re.compile("^" + re.escape(name))


def test_the_known_prefixes_have_the_colours_of_their_tiers(look: Look) -> None:
    looking = look()
    looking.open()
    shared, cold, warm = [looking.cell(label) for label in (SHARED, COLD_TAIL, WARM_TAIL)]
    assert [colour(cell) for cell in (shared, cold, warm)] == [LIGHT["nvme"], LIGHT["nvme"], LIGHT["host"]]
    # As wide as they are large, and below each other: 7 pages, of which 2 and 3 end with their own.
    boxes = [cell.bounding_box() for cell in (shared, cold, warm)]
    wide, narrow, middle = [round(box["width"]) for box in boxes if box is not None]
    assert abs(narrow / wide - 2 / 7) < 0.01
    assert abs(middle / wide - 3 / 7) < 0.01
    tops = [box["y"] for box in boxes if box is not None]
    assert tops[0] < tops[1] == tops[2]
    page = looking.page
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#legend")).to_contain_text("hostNVMe")
    expect(page.locator("#used")).to_contain_text("12.0 KiB of 256 KiB")
    expect(page.locator("#totals")).to_contain_text("Pages that lefthost 4 (kept elsewhere)")
    # Nothing is asked of anybody else, the token is in no address, and the one in the bar has lost it.
    origin = page.url.rstrip("/")
    assert looking.asked
    assert all(address.startswith(origin) for address in looking.asked)
    token = looking.url.partition("#")[2]
    assert [address for address in [*looking.asked[1:], page.url] if token in address] == []
    looking.picture("known")


def test_an_insert_and_an_eviction_are_seen_as_they_happen(look: Look) -> None:
    looking = look()
    looking.open()
    expect(looking.cell("70 71 72")).to_have_count(0)
    store(looking.client, range(70, 70 + 3 * PAGE))
    new = looking.cell("70 71 72")
    expect(new).to_be_visible()
    assert colour(new) == LIGHT["host"]
    assert colour(looking.cell(WARM_TAIL)) == LIGHT["host"]
    looking.server.run(leave_the_host(looking.server))
    for cell in (new, looking.cell(WARM_TAIL)):
        expect(cell).to_have_css("background-color", LIGHT["nvme"])
    with looking.client.acquire(Prompt(NAMESPACE, WARM)):
        expect(looking.cell(WARM_TAIL)).to_have_css("background-color", LIGHT["host"])
        expect(looking.cell(WARM_TAIL)).to_have_class("cell host leased")
        expect(looking.page.locator("#about")).to_contain_text("1 lease")
        looking.picture("leased")
    expect(looking.page.locator("#found .big")).to_contain_text("100.0 % of 80 tokens")
    looking.server.call(lambda inside: inside.cache.tree.flush())
    expect(looking.page.get_by_role("treeitem")).to_have_count(1)


def test_hovering_shows_all_about_a_prefix(look: Look) -> None:
    looking = look()
    looking.open()
    looking.cell(WARM_TAIL).hover()
    details = looking.page.locator("#details")
    for told in ("48, the 33rd to 80th", "12.0 KiB", "Inhost", "Usednot yet", "Leasesnone", "900 901 902"):
        expect(details).to_contain_text(told)
    expect(details.locator("pre")).to_have_text(" ".join(map(str, WARM[2 * PAGE :])))
    for times in ("1 time", "2 times"):
        with looking.client.acquire(Prompt(NAMESPACE, WARM)):
            pass
        expect(details).to_contain_text(f"Used{times}")
    expect(looking.cell(WARM_TAIL)).to_have_attribute("aria-label", re.compile(r"used .* ago, 2 times in all$"))


def test_a_server_that_was_started_again_is_shown_from_its_beginning(look: Look, tmp_path: Path) -> None:
    looking = look()
    looking.open()
    page, dashboard = looking.page, looking.server.server.dashboard
    assert dashboard is not None
    expect(page.locator("#state")).to_have_text("live")
    page.locator("#pause").click()
    expect(page.locator("#state")).to_have_text("paused")
    looking.server.close()
    page.evaluate(REMEMBER_NANS)
    (tmp_path / "again").mkdir()
    with known_server(tmp_path / "again", http__listen=dashboard.address.port) as (server, _):
        page.locator("#pause").click()
        expect(page.locator("#entry-why")).to_contain_text("it was started again")
        assert server.server.dashboard is not None
        page.locator("#token").fill(server.server.dashboard.url)
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#saved .big")).to_have_text("0 s of prefill")
        expect(page.locator("#found .big")).to_contain_text("of 0 tokens")
        assert page.evaluate("window.seen") == []
        page.locator("#pause").click()
        expect(page.locator("#state")).to_have_text("paused")
    refused = [complaint for complaint in looking.complaints if "401" in complaint]
    assert refused
    looking.complaints[:] = [complaint for complaint in looking.complaints if complaint not in refused]


def test_the_icicle_by_keyboard(look: Look) -> None:
    looking = look()
    looking.open()
    page = looking.page
    page.locator("#pause").focus()
    page.keyboard.press("Tab")
    charts = page.locator(".chart svg")
    for index in range(4):
        expect(charts.nth(index)).to_be_focused()
        page.keyboard.press("Tab")
    focused = page.locator(":focus")
    for key, name in (
        ("ArrowDown", NAMESPACE.model), ("ArrowDown", SHARED), ("ArrowDown", WARM_TAIL), ("ArrowRight", COLD_TAIL),
        ("ArrowLeft", WARM_TAIL), ("ArrowUp", SHARED), ("Home", "everything"), ("ArrowUp", "everything"),
        ("ArrowDown", NAMESPACE.model), ("ArrowDown", SHARED),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect(focused).to_have_attribute("aria-label", begins(name))
        expect(focused).to_have_attribute("role", "treeitem")
        expect(page.locator(".cell[tabindex='0']")).to_have_count(1)
    page.keyboard.press("Enter")
    crumbs = page.locator("#path li")
    expect(crumbs).to_have_count(3)
    expect(focused).to_have_attribute("aria-label", begins(SHARED))
    expect(focused).to_have_attribute("aria-level", "1")
    expect(page.locator("#details")).to_contain_text("Tokens32, the 1st to 32nd")
    looking.picture("zoomed")
    page.keyboard.press("Escape")
    expect(crumbs).to_have_count(2)
    page.keyboard.press("Escape")
    expect(crumbs).to_have_count(1)
    expect(focused).to_have_attribute("aria-label", begins("everything"))
    # Tab leaves it by one step.
    page.keyboard.press("Shift+Tab")
    expect(charts.nth(3)).to_be_focused()


def test_branches_too_small_to_be_drawn_are_named(look: Look) -> None:
    """Some hundred of one page each, beside one that is much larger; from there to one of them by keyboard."""
    looking = look()
    looking.server.call(six_hundred_prefixes)
    looking.open()
    page = looking.page
    more = looking.cell("… and 600 more")
    expect(more).to_have_count(1)
    expect(more).to_have_attribute("aria-label", re.compile(r"^… and 600 more: 600 prefixes, 2.34 MiB$"))
    cells = page.locator(".cell")
    assert cells.count() < 10
    widths = cells.evaluate_all("cells => cells.map(cell => cell.offsetWidth)")
    assert min(widths) >= 2
    more.click()
    expect(page.locator("#details h3")).to_have_text(f"… and 600 more below {NAMESPACE.model}")
    expect(page.locator("#path li")).to_have_count(2)
    more.click()
    buttons = page.locator("#details button")
    expect(buttons).to_have_count(24)
    page.keyboard.press("Tab")
    expect(buttons.first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#path li")).to_have_count(3)
    expect(page.locator(":focus")).to_have_attribute("aria-level", "1")
    expect(page.locator("#details")).to_contain_text("Tokens16, the 1st to 16th")
    looking.server.call(lambda inside: inside.cache.tree.flush())


def six_hundred_prefixes(inside: Server) -> None:
    for number in range(600):
        inside.cache.tree.insert(NAMESPACE, [5_000 + number] * PAGE, tier=HOST, slots=[1_000 + number], now=1.0)
    inside.cache.tree.insert(NAMESPACE, [4_000] * (1_000 * PAGE), tier=NVME, slots=list(range(1_000)), now=1.0)


def test_a_hundred_thousand_prefixes(look: Look) -> None:
    """More than a look walks through: what is drawn is apart and to scale, and what is zoomed to is shown at once."""
    looking = look()
    all_prefixes = looking.server.call(hundred_thousand_prefixes)
    looking.open()
    page, progress = looking.page, looking.page.locator("#progress")
    expect(progress).to_contain_text(re.compile(r"^looked at [\d,]+ of "))
    expect(progress).to_have_text(re.compile(rf"^999 prefixes of {all_prefixes:,}"))
    assert rows_are_apart(looking)
    looking.picture("hundred thousand")
    namespace = looking.cell(NAMESPACE.model)
    with page.expect_response("**/data/tree?focus=*") as response:
        namespace.click()
    told = response.value.json()
    assert not told["is_whole"]
    assert told["branches"][0]["total"]["prefixes"] == all_prefixes
    assert 500 < len(told["branches"]) <= 1_000
    assert len(response.value.body()) < 1 << 20
    expect(page.locator("#path li")).to_have_count(2)
    expect(progress).to_contain_text(f" of {all_prefixes:,}")
    assert rows_are_apart(looking)
    page.locator(".cell.host[aria-level='2']").first.click()
    expect(page.locator("#path li")).to_have_count(3)
    expect(progress).to_have_text(re.compile(rf"^[\d,]+ prefixes of {all_prefixes:,}"))
    assert rows_are_apart(looking)
    looking.server.call(lambda inside: inside.cache.tree.flush())


def hundred_thousand_prefixes(inside: Server) -> int:
    """Beginnings that fewer and fewer prompts share; how many prefixes there are then."""
    tree, slot = inside.cache.tree, 1_000
    for number in range(1, 401):
        for user in range(max(18_000 // number, 25)):
            tokens = [number] * (2 * PAGE) + [10_000 + user] * PAGE
            tree.insert(NAMESPACE, tokens, tier=NVME if user % 3 else HOST, slots=[slot, slot + 1, slot + 2], now=1.0)
            slot += 3
    return tree.num_nodes


def rows_are_apart(looking: Looking) -> bool:
    """Whether no cell of the icicle lies over another, once those that move have come to rest."""
    page = looking.page
    page.evaluate("Promise.allSettled(document.getAnimations().map(each => each.finished)).then(() => {})")
    rows: dict[float, list[tuple[float, float]]] = {}
    for left, top, right in page.locator(".cell").evaluate_all(
        "cells => cells.map(cell => cell.getBoundingClientRect()).map(box => [box.left, box.top, box.right])"
    ):
        rows.setdefault(top, []).append((left, right))
    neighbours = [pair for row in rows.values() for pair in pairwise(sorted(row))]
    return all(one[1] <= other[0] for one, other in neighbours)


def test_a_prefix_that_is_zoomed_to_and_leaves(look: Look) -> None:
    looking = look()
    looking.open()
    looking.cell(SHARED).click()
    expect(looking.page.locator("#path li")).to_have_count(3)
    looking.server.call(lambda inside: inside.cache.tree.flush())
    expect(looking.page.locator("#path li")).to_have_count(1)


def test_dark(look: Look) -> None:
    looking = look(color_scheme="dark")
    looking.open()
    assert colour(looking.cell(WARM_TAIL)) == DARK["host"]
    assert colour(looking.cell(SHARED)) == DARK["nvme"]
    assert str(looking.page.evaluate("getComputedStyle(document.body).backgroundColor")) == "rgb(16, 21, 29)"
    looking.picture("dark")


def test_a_narrow_window_needs_no_scrolling_sideways(look: Look) -> None:
    looking = look()
    looking.page.set_viewport_size({"width": 390, "height": 800})
    looking.open()
    assert looking.page.evaluate("document.documentElement.scrollWidth") <= 390
    looking.picture("narrow")


def test_it_asks_nothing_while_it_is_hidden_or_paused(look: Look) -> None:
    looking = look()
    looking.page.clock.install()
    looking.open()
    page = looking.page

    def asks(within_ms: int) -> bool:
        """Whether something is asked in that time of the page's, after all that was asked before."""
        looking.asked.clear()
        page.clock.run_for(within_ms)
        page.evaluate("fetch('icon.svg').then(reply => reply.text())")
        return any("/data/" in address for address in looking.asked)

    def goes_on() -> bool:
        return any(asks(2_100) for _ in range(1_000))

    def hide(is_hidden: str) -> None:
        page.evaluate(f"Object.defineProperty(document, 'hidden', {{ value: {is_hidden}, configurable: true }})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    assert goes_on()
    hide("true")
    assert not asks(600_000)
    hide("false")
    assert goes_on()
    page.locator("#pause").click()
    expect(page.locator("#state")).to_have_text("paused")
    assert not asks(600_000)
    page.locator("#pause").click()
    expect(page.locator("#state")).to_have_text("live")
    assert goes_on()


def test_the_curves_tell_their_values_and_show_a_day(look: Look) -> None:
    looking = look()
    looking.open()
    page = looking.page
    chart, told = page.locator("#used svg"), page.locator("#used .readout")
    expect(chart).to_have_attribute("aria-label", re.compile(r"^Occupancy: host \d+ %, NVMe \d+ %$"))
    expect(page.locator("#used path.line.host")).to_be_visible()  # of two moments at least
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(told).to_have_text(re.compile(r": host \d+ %, NVMe \d+ %$"))
    page.keyboard.press("Escape")
    expect(told).to_have_text("")
    chart.hover()
    expect(told).to_contain_text("NVMe")
    with page.expect_response("**/data/now?span=day*") as response:
        page.get_by_text("24 h").click()
    assert response.value.ok
    expect(page.locator("#used svg")).to_contain_text("The curves begin in a moment.")
    page.get_by_text("15 min").click()
    expect(page.locator("#used path.line.nvme")).to_be_visible()


def test_what_moves_and_what_hits_save(look: Look) -> None:
    looking = look()
    looking.open()
    moved, saved = looking.page.locator("#moved"), looking.page.locator("#saved")
    for lane in ("host → NVMe", "NVMe → host"):
        expect(moved).to_contain_text(lane)
    expect(saved).to_contain_text("no engine has said yet how fast it computes")
    looking.client.report(EngineWork(prefill_tokens=1000, prefill_s=1000.0))
    looking.server.until(lambda inside: inside.sessions.work.prefill_tokens == 1000, within_s=WAIT_MS / 1000)
    looking.client.acquire(Prompt(NAMESPACE, WARM)).release()
    expect(saved.locator(".big")).to_have_text("80.0 s of prefill")
    expect(moved.locator("svg path.line")).to_have_count(2)
    told = re.compile(r"^Lanes: host → NVMe .+/s, NVMe → host .+/s$")
    expect(moved.locator("svg")).to_have_attribute("aria-label", told)


def test_without_the_token_it_is_asked_for(look: Look) -> None:
    looking = look()
    page = looking.page
    page.goto(looking.url.partition("#")[0])
    expect(page.locator("#entry")).to_be_visible()
    expect(page.locator("#main")).to_be_hidden()
    expect(page.locator("#token")).to_be_focused()
    page.keyboard.type("http://127.0.0.1/#wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#entry-why")).to_contain_text("does not know the token")
    assert all("401" in complaint for complaint in looking.complaints)
    looking.complaints.clear()
    page.locator("#token").fill(looking.url)
    page.keyboard.press("Enter")
    expect(looking.cell(WARM_TAIL)).to_be_visible()
    page.reload()
    expect(looking.cell(WARM_TAIL)).to_be_visible()


def test_what_names_say_is_shown_and_not_run(look: Look) -> None:
    """Names come from clients."""
    looking = look()
    hostile = NAMESPACE.__class__(model="<img src=x onerror=alert(1)>", layout=NAMESPACE.layout)
    looking.server.call(
        lambda inside: inside.cache.tree.insert(hostile, COLD, tier=HOST, slots=[40, 41, 42, 43], now=1.0)
    )
    looking.open()
    expect(looking.cell("<img src=x")).to_be_visible()
    assert looking.page.locator("img").count() == 0
    looking.server.call(lambda inside: inside.cache.tree.flush(hostile))
