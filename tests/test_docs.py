"""Documentation that is generated stays in step with the code."""

from pathlib import Path

from cure_ray.commands.show import configuration_page

ROOT = Path(__file__).parent.parent


def test_the_configuration_page_is_what_the_fields_say() -> None:
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == configuration_page(), "run `make docs`"


def test_the_readme_shows_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make quickstart" in text
    assert "make test" in text


def test_links_between_documents_lead_somewhere() -> None:
    import re

    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
