"""What the site has besides its pages: the zoo, and the board with links into that copy of it. Read by mkdocs (mkdocs.yml, hooks)."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location("generate", Path(__file__).parent / "generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


def on_post_build(config: Any) -> None:
    site = Path(config["site_dir"])
    shutil.copytree(generate.ROOT / "zoo", site / "zoo", dirs_exist_ok=True)
    page = site / generate.BOARD.name
    page.write_text(generate.board_page(page, site / "zoo"), encoding="utf-8")
