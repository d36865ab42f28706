"""A page in headless Chromium. Tests are skipped without the package playwright or a Chromium."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@contextmanager
def open_page(path: Path, width: int) -> Iterator[tuple[Any, list[str]]]:
    """Yield the page, and the list of its console messages and errors. CHROMIUM: path of the browser."""
    api = pytest.importorskip("playwright.sync_api")
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=_FLAGS)
        page = running.new_page(viewport={"width": width, "height": 900})
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(path.resolve().as_uri())
        yield page, messages
        running.close()
