"""The app of examples/ in headless Chromium: search, examples, heat map, mining and download.

    pip install --constraint constraints.txt '.[app]' playwright
    python -m pytest -m slow tests/slow/test_app_in_browser.py

Playwright drives the Chromium that is installed (`chromium` on the path), or its own.
"""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, synthetic_pairs

pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

SOURCE, TARGET = (list(side) for side in zip(*synthetic_pairs("de", 12), strict=True))
PATIENCE = 60_000  # milliseconds


@pytest.fixture(scope="module")
def address(tiny_bert_dir: Path) -> Iterator[str]:
    """Start the app with a tiny encoder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = str(REPOSITORY / "examples" / "app.py")
    command = [sys.executable, app, "--model", str(tiny_bert_dir), "--port", str(port)]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(url)
                break
            except OSError:
                assert process.poll() is None, "the app ended"
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(params=[(1000, 900), (390, 844)], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, address: str) -> Iterator[Any]:
    """Open the app in a window of this size."""
    width, height = request.param
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(address)
        yield page
        browser.close()


def test_an_example_is_searched_and_its_words_are_shown(page: Any) -> None:
    page.wait_for_selector(".word-map td", timeout=PATIENCE)
    page.get_by_text("मेरी चाबी खो गई है।", exact=True).first.click()
    heading = page.locator(".word-map tbody th").first
    sync_api.expect(heading).to_have_text("मेरी", timeout=PATIENCE)
    cell = page.locator(".word-map td", has_text="0.").first.bounding_box()
    assert cell["width"] >= 44
    assert cell["height"] >= 36
    # the page itself does not scroll sideways
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_two_files_are_mined_and_downloaded(page: Any, tmp_path: Path) -> None:
    for name, sentences in (("a.de", SOURCE), ("a.en", TARGET)):
        (tmp_path / name).write_text("\n".join(sentences), encoding="utf-8")
    page.wait_for_selector(".word-map td", timeout=PATIENCE)
    page.get_by_role("tab", name="Mine").click()
    panel = page.get_by_role("tabpanel").last
    panel.get_by_text("Source sentences").wait_for(timeout=PATIENCE)
    for name in ("a.de", "a.en"):  # the field of an uploaded file is gone
        panel.locator("input[type=file]").first.set_input_files(tmp_path / name)
        panel.get_by_text(name.split(".")[0], exact=False).first.wait_for(timeout=PATIENCE)
        page.wait_for_timeout(1500)
    panel.get_by_role("button", name="Mine", exact=True).click()
    panel.get_by_text("pairs have a score").wait_for(timeout=PATIENCE)
    with page.expect_download() as download:
        panel.get_by_text("Download as TSV").click()
    header, *rows = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert header.split("\t")[0] == "score"
    assert rows
