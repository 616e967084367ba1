"""Documentation: generated pages are in step with the code, links lead somewhere, and the site can be built."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

_spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    assert (generate.REFERENCE / name).read_text() == generate.PAGES[name](), "run `make docs`"


def test_the_board_is_what_the_files_and_stores_say() -> None:
    assert generate.BOARD.read_text(encoding="utf-8") == generate.board_page(), "run `make docs`"


def test_the_page_of_judged_networks_is_what_the_judgements_say() -> None:
    assert generate.JUDGED.read_text() == generate.judgements_page(generate.JUDGED.parent), "run `make docs`"


@pytest.mark.parametrize("name", generate.MARKED)
def test_tables_of_the_zoo_in_a_document_are_what_its_stores_say(name: str) -> None:
    assert (ROOT / name).read_text() == generate.marked_page(name), "run `make docs`"


def test_the_readme_shows_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make quickstart" in text
    assert "make test" in text


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_documents_named_in_the_code_exist() -> None:
    for source in [*(ROOT / "cure_ray").rglob("*.py"), *(ROOT / "studies").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for name in re.findall(r"\bdocs/[\w/.-]+\.md", source.read_text()):
            assert (ROOT / name).exists(), f"{source.relative_to(ROOT)} names {name}"


def test_decisions_are_numbered_without_holes() -> None:
    numbers = sorted(int(p.name[:4]) for p in (ROOT / "docs" / "decisions").glob("0*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_page_has_its_place_in_the_site_and_the_site_builds(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    assert (tmp_path / "site" / "reference" / "api" / "index.html").is_file()
    board = tmp_path / "site" / "board.html"
    assert 'href="board.html"' in (tmp_path / "site" / "index.html").read_text()
    for target in set(re.findall(r'href="([^"#:]+)"', board.read_text())):
        assert (board.parent / unquote(target)).exists(), f"the board of the site links to {target}"
