"""Chromium, in which tests open pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["QUIET", "dom_of", "eventually", "needs_browser"]

# Without them Chromium looks up hosts of its own.
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None,
    reason="needs chromium; tools/browser.sh installs it",
)


def dom_of(page: Path, profile: Path) -> str:
    """The document of a file after its scripts ran for five seconds of their time.

    Args:
        page: the file.
        profile: an empty folder.
    """
    options = ("--headless", "--dump-dom", f"--user-data-dir={profile}")
    return subprocess.run(
        ["chromium", *QUIET, *options, "--virtual-time-budget=5000", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout


def eventually(element):
    """Playwright's assertions about an element, which look again for a minute.

    A page answers a click some time later: what is read right away is what stood there
    before.

    Args:
        element: a page or a locator of Playwright.
    """
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    return expect(element)
