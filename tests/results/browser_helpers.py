"""Pages in a real Chromium: how it is found, how it looks at a page, and what no page may do."""

import base64
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

BROWSER = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
DRIVER = shutil.which("chromedriver")
NEEDED = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="no Chromium with chromedriver on this machine: the pages were NOT tested in a browser (apt install chromium chromium-driver)",
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
STICKS_OUT = """return [...document.querySelectorAll('main *')].filter(e => { const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest('.scroll, .wide-chart, pre'); }).map(e => e.outerHTML.slice(0, 80))"""


def look(driver: Any, width: int, theme: str = "light") -> None:
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})


def keep(driver: Any, name: str, part: str = "html") -> None:
    """A picture of the page, or of the first element like `part`, where CURE_RAY_SCREENSHOTS names a directory for it."""
    folder = os.environ.get("CURE_RAY_SCREENSHOTS")
    if folder:
        script = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [innerWidth, b.top + scrollY, b.height]"
        width, top, height = driver.execute_script(script, part)
        clip = {"x": 0, "y": top, "width": width, "height": min(height, 12000), "scale": 1}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def contrast(one: str, two: str) -> float:
    """WCAG contrast ratio of two rgb(...) colours."""

    def luminance(colour: str) -> float:
        channels = [int(float(v)) / 255 for v in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
