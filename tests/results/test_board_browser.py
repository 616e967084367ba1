"""The board in a real Chromium: sorting, filtering, the keyboard, panels, both schemes, two widths, and without its script.

Set CURE_RAY_SCREENSHOTS to a directory to keep the pictures.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import board_helpers
import browser_helpers
import pytest
from browser_helpers import STICKS_OUT, contrast

import cure_ray

pytestmark = browser_helpers.NEEDED
DIGITS = "digits-linf-0.1-l2-0.35-l1-0.7"
TABLE = f'[id="{DIGITS}"] table'
PROVEN, CLAIMS = f"{TABLE} tbody.proven", f"{TABLE} tbody.claims"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board-page")
    zoo, toy = board_helpers.write_zoo(folder / "zoo"), board_helpers.write_description(folder)
    return cure_ray.board(folder / "board.html", zoo=zoo, published=[toy])


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser.get_log("browser")
    browser_helpers.look(browser, 1400)
    browser.get(page.as_uri())
    return browser


def values(driver: Any, body: str, column: int) -> list[str]:
    cells = driver.find_elements("css selector", f"{body} tr[data-id]:not([hidden]) > *:nth-child({column + 1})")
    return [c.get_attribute("data-v") or c.text for c in cells]


def rows(driver: Any) -> list[Any]:
    return [r for r in driver.find_elements("css selector", ".protocol tr[data-id]") if r.is_displayed()]


def heading(driver: Any, index: int) -> Any:
    return driver.find_elements("css selector", f"{TABLE} thead button")[index]


def choose(driver: Any, name: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(driver.find_element("name", name)).select_by_value(value)


def test_it_loads_without_a_console_message_and_asks_the_network_for_nothing(opened: Any) -> None:
    assert opened.get_log("browser") == []
    assert opened.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []


def test_every_column_sorts_both_ways_each_group_on_its_own_and_what_is_missing_last(opened: Any) -> None:
    count = len(opened.find_elements("css selector", f"{TABLE} thead th"))
    assert count == 15
    for index in range(count):
        directions = set()
        for _ in range(2):
            opened.execute_script("arguments[0].click()", heading(opened, index))
            th = opened.find_elements("css selector", f"{TABLE} thead th")[index]
            direction = th.get_attribute("aria-sort")
            directions.add(direction)
            for body in (PROVEN, CLAIMS):
                found = values(opened, body, index)
                known = [v for v in found if v not in ("–", "")]
                if "n" in th.get_attribute("class").split():
                    assert found[: len(known)] == known, "what is missing comes last"
                    assert [float(v) for v in known] == sorted(map(float, known), reverse=direction == "descending")
                else:
                    lowered = [v.strip().lower() for v in found]
                    assert lowered == sorted(lowered, key=lambda v: (v,), reverse=direction == "descending")
        assert directions == {"ascending", "descending"}
    groups = opened.execute_script(
        "return [...document.querySelectorAll('tbody')].filter(b => b.querySelector('.group')).every(b => b.rows[0].matches('.group'))"
    )
    assert groups


def test_filters_hide_rows_points_groups_and_protocols_and_say_how_many_are_left(opened: Any) -> None:
    every = len(rows(opened))
    choose(opened, "kind", "recertified")
    assert [r.get_attribute("data-id") for r in rows(opened)] == ["toy-again"]
    assert opened.find_element("css selector", "#filters output").text == f"1 of {every} rows"
    points = opened.execute_script(
        "return [...document.querySelectorAll('.point')].filter(p => getComputedStyle(p).display !== 'none').length"
    )
    assert points == 1
    choose(opened, "kind", "")
    choose(opened, "dataset", "mnist")
    assert 0 < len(rows(opened)) < every
    choose(opened, "threats", DIGITS)
    assert rows(opened) == []
    assert opened.find_element("id", "nothing").is_displayed()
    opened.find_element("css selector", "#filters [type=reset]").click()
    opened.execute_script("return new Promise(r => setTimeout(r, 50))")
    opened.find_element("name", "text").send_keys("uthor second")
    assert [r.get_attribute("data-id") for r in rows(opened)] == ["toy-published-second"]


def test_the_keyboard_sorts_opens_what_a_number_rests_on_and_comes_back(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    heading(opened, 1).send_keys(Keys.ENTER)
    falling = [float(v) for v in values(opened, PROVEN, 1)]
    heading(opened, 1).send_keys(Keys.SPACE)
    assert [float(v) for v in values(opened, PROVEN, 1)] == falling[::-1]
    number = opened.find_element("css selector", f"{PROVEN} tr[data-id=linf] td.key a")
    number.send_keys(Keys.ENTER)
    panel = opened.find_element("id", "panel")
    assert panel.is_displayed()
    assert opened.execute_script("return document.getElementById('panel').contains(document.activeElement)")
    assert "cure-ray certify linf" in panel.text
    assert "SHA-256" in panel.text
    assert opened.execute_script("return location.hash") == "#net-linf"
    opened.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not panel.is_displayed()
    assert opened.switch_to.active_element == number


def test_a_point_says_what_it_is_when_it_is_focused_and_opens_its_row(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    point = opened.find_element("css selector", ".point[data-row=linf]")
    opened.execute_script("arguments[0].focus()", point)
    readout = point.find_element("xpath", "ancestor::figure").find_element("css selector", ".readout")
    assert readout.text == point.get_attribute("aria-label")
    assert "certified union" in readout.text
    assert "not broken" in readout.text or "clean" in readout.text
    assert opened.find_element("css selector", "tr[data-id=linf]").get_attribute("class") == "lit"
    opened.switch_to.active_element.send_keys(Keys.ENTER)
    assert opened.find_element("id", "panel").is_displayed()


def test_the_rows_that_are_shown_are_copied_as_csv(opened: Any) -> None:
    opened.execute_script(
        "window.kept = []; Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (t) => kept.push(t)}})"
    )
    choose(opened, "kind", "recertified")
    opened.find_element("id", "copy").click()
    text = opened.execute_script("return kept[0]")
    head, *lines = text.split("\n")
    assert head.startswith("id,dataset,threats,")
    assert len(lines) == 1
    assert lines[0].startswith('toy-again,digits,"linf=0.1,l2=0.35,l1=0.7",')


@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (360, "light"), (360, "dark")])
def test_nothing_overflows_and_text_has_contrast(opened: Any, width: int, theme: str) -> None:
    browser_helpers.look(opened, width, theme)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    assert opened.execute_script(STICKS_OUT) == []
    ink, paper = opened.execute_script("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    assert contrast(ink, paper) > 10
    for selector in (".lead", ".certifier", ".who", ".terms dd"):
        soft = opened.execute_script("return getComputedStyle(document.querySelector(arguments[0])).color", selector)
        assert contrast(soft, paper) > 4.5, selector
    browser_helpers.keep(opened, f"board-{width}-{theme}")


def test_the_theme_button_switches_and_print_is_light(opened: Any) -> None:
    before = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    opened.find_element("id", "theme").click()
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.execute_script("return getComputedStyle(document.querySelector('#filters')).display") == "none"


@pytest.mark.parametrize("width", [1320, 360])
def test_the_board_of_the_repository_fits_too(browser: Any, width: int) -> None:
    browser.get_log("browser")
    browser_helpers.look(browser, width)
    browser.get((Path(__file__).parent.parent.parent / "docs" / "board.html").as_uri())
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(STICKS_OUT) == []
    assert len(rows(browser)) == len(browser.execute_script("return records"))
    browser_helpers.keep(browser, f"protocol-{width}", ".protocol")  # at 1320, docs/images/board.png


@pytest.fixture
def scriptless(browser: Any, page: Path) -> Iterator[Any]:
    browser_helpers.look(browser, 1400)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get("about:blank")  # else only the address would change
    browser.get(page.as_uri() + "#net-linf")
    yield browser
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_without_its_script_it_is_a_plain_table_whose_numbers_lead_to_their_sources(scriptless: Any) -> None:
    assert len(rows(scriptless)) > 20
    assert not scriptless.find_element("id", "filters").is_displayed()
    links = scriptless.find_elements("css selector", ".protocol td.n a")
    anchors = {a.get_attribute("id") for a in scriptless.find_elements("css selector", "article.source")}
    assert {a.get_attribute("href").rpartition("#")[2] for a in links} <= anchors
    assert scriptless.find_element("id", "net-linf").is_displayed()
