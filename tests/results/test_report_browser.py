"""The report in a real Chromium: no console errors, sorting, filtering, gallery, keyboard, themes, two widths.

Set CURE_RAY_SCREENSHOTS to a directory to keep the pictures.
"""

from pathlib import Path
from typing import Any

import browser_helpers
import pandas as pd
import pytest
from browser_helpers import STICKS_OUT, contrast

from cure_ray.results.report import write_report
from cure_ray.testing import fabricate, stores

pytestmark = browser_helpers.NEEDED


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    runs = {m: stores.experiment(m) for m in ("linf", "max", "scratch")} | {"again": stores.experiment("scratch", seed=1)}
    runs["balls"] = stores.experiment("max", norms=("linf", "l2", "l1"), regions={"l2": "ball"}, lambda_2=0.25)  # a long name
    stores.write_store(folder / "results", runs)
    for name, about in runs.items():
        stores.write_run(folder / "runs" / name, about)
    return write_report(folder / "results", images=9)


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser_helpers.look(browser, 1280)
    browser.get(page.as_uri())
    return browser


def column(driver: Any, table: str, index: int) -> list[str]:
    cells = driver.find_elements("css selector", f"#{table} tbody tr:not([hidden]) > *:nth-child({index + 1})")
    return [c.get_attribute("data-v") or c.text for c in cells]


def shown(driver: Any) -> list[Any]:
    return driver.find_elements("css selector", "#g-1 .card:not([hidden])")


def choose(driver: Any, by: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(driver.find_element("css selector", f"[data-gallery='g-1'] [{by}]")).select_by_value(value)


def test_it_loads_without_a_console_message_and_asks_the_network_for_nothing(opened: Any) -> None:
    assert opened.get_log("browser") == []
    loads = opened.execute_script("return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))")
    assert loads == []


def test_a_click_on_a_heading_sorts_and_a_second_click_turns_it_round(opened: Any) -> None:
    heading = opened.find_element("css selector", "#t-union-1 th.key button")
    heading.click()
    falling = [float(v) for v in column(opened, "t-union-1", 1)]
    assert falling == sorted(falling, reverse=True)
    heading.click()
    assert [float(v) for v in column(opened, "t-union-1", 1)] == sorted(falling)
    assert opened.find_element("css selector", "#t-union-1 th.key").get_attribute("aria-sort") == "ascending"


def test_sorting_works_from_the_keyboard(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    button = opened.find_element("css selector", "#t-union-1 th button")
    button.send_keys(Keys.ENTER)
    names = column(opened, "t-union-1", 0)
    assert names == sorted(names, key=str.lower)
    button.send_keys(Keys.SPACE)
    assert column(opened, "t-union-1", 0) == names[::-1]


def test_the_filter_hides_other_methods(opened: Any) -> None:
    opened.find_element("css selector", "[data-filter='t-union-1']").send_keys("scratch")
    assert column(opened, "t-union-1", 0) == ["CURE-Scratch"]


def test_the_gallery_filters_by_method_status_and_class_and_sorts_by_margin(opened: Any) -> None:
    assert len(shown(opened)) == 9
    choose(opened, "data-by='method'", "")
    assert len(shown(opened)) == 36
    choose(opened, "data-by='status'", "falsified")
    kept = shown(opened)
    assert 0 < len(kept) < 36
    assert all("falsified" in c.get_attribute("data-status").split() for c in kept)
    assert opened.find_element("css selector", "[data-gallery='g-1'] output").text == f"{len(kept)} of 36 cards"
    choose(opened, "data-sort", "worst")
    margins = [float(c.get_attribute("data-worst")) for c in shown(opened)]
    assert margins == sorted(margins)


def test_the_gallery_shows_images_witnesses_and_red_negative_margins(opened: Any) -> None:
    sizes = opened.execute_script("return [...document.querySelectorAll('#g-1 .card:not([hidden]) img')].map(i => i.naturalWidth)")
    assert len(sizes) >= 9
    assert all(s == 8 for s in sizes)
    assert opened.find_elements("css selector", "#g-1 .card:not([hidden]) .witness img")
    colours = opened.execute_script(
        "return [...new Set([...document.querySelectorAll('.margins rect.bad')].map(r => getComputedStyle(r).fill))]"
    )
    assert len(colours) == 1
    red, green, blue = (int(v) for v in colours[0].removeprefix("rgb(").removesuffix(")").split(","))
    assert red > green + 60
    assert red > blue + 60


def test_arrow_keys_walk_through_the_gallery(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    first, second = shown(opened)[:2]
    first.send_keys(Keys.ARROW_RIGHT)
    assert opened.switch_to.active_element == second
    second.send_keys(Keys.ARROW_LEFT)
    assert opened.switch_to.active_element == first


def test_following_a_number_opens_its_source(opened: Any) -> None:
    opened.execute_script("document.querySelector('#t-union-1 td.key a').click()")
    opened.execute_script("return new Promise(r => setTimeout(r, 100))")
    assert opened.execute_script("return document.querySelector('.source:target details').open")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (420, "light"), (420, "dark")])
def test_nothing_overflows_and_text_has_contrast(opened: Any, width: int, theme: str) -> None:
    browser_helpers.look(opened, width, theme)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    assert opened.execute_script(STICKS_OUT) == []
    ink, paper = opened.execute_script("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    assert contrast(ink, paper) > 10
    soft = opened.execute_script("return getComputedStyle(document.querySelector('.lead')).color")
    assert contrast(soft, paper) > 4.5
    browser_helpers.keep(opened, f"report-{width}-{theme}")


def test_the_theme_button_switches_and_print_is_light(opened: Any) -> None:
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]})
    before = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    opened.find_element("id", "theme").click()
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.execute_script("return getComputedStyle(document.querySelector('.top')).display") == "none"
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.fixture
def words(browser: Any, tmp_path: Path) -> Any:
    """A report with attacks on words beside certificates."""
    runs = {m: stores.experiment(m) for m in ("linf", "max")}
    rows = fabricate.verdicts(3, 30, tuple(runs))
    stores.write_store(
        tmp_path / "results", runs, frame=pd.concat([rows, fabricate.attacked(rows, "pwws"), fabricate.attacked(rows, "cf8", 1)])
    )
    browser_helpers.look(browser, 420)
    browser.get(write_report(tmp_path / "results").as_uri())
    return browser


def test_attacked_sentences_can_be_sorted_and_filtered_and_say_what_is_not_proven(words: Any) -> None:
    from selenium.webdriver.support.ui import Select

    assert words.get_log("browser") == []
    assert words.execute_script(STICKS_OUT) == []
    assert "nothing is proven about words" in words.find_element("tag name", "h1").text
    assert "Nothing is proven about words" in words.find_element("css selector", "#words .lead").text
    heading = words.find_elements("css selector", "#t-words-1 th button")[2]
    words.execute_script("arguments[0].click()", heading)
    accuracies = [float(v) for v in column(words, "t-words-1", 2)]
    assert accuracies == sorted(accuracies, reverse=True)
    cards = "#w-1 .card:not([hidden])"
    assert len(words.find_elements("css selector", cards)) == 48  # of the best method, 24 for each attack
    for by, value in (("attack", "cf8"), ("status", "falsified")):
        Select(words.find_element("css selector", f"[data-gallery='w-1'] [data-by='{by}']")).select_by_value(value)
    kept = words.find_elements("css selector", cards)
    assert 0 < len(kept) < 24
    for card in kept:
        assert (card.get_attribute("data-attack"), card.get_attribute("data-status")) == ("cf8", "falsified")
        assert card.find_element("tag name", "ins").text == "<film> & co"
        assert card.find_element("tag name", "del").text == "film"
