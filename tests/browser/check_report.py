"""Opens a page of `dsx report` in headless Chromium: a long check, not part of the suite.

    python tests/browser/check_report.py [FOLDER]

FOLDER is where the page and its screenshots go. Needs Chromium (Debian: apt-get install chromium), else it says so and
ends with 0. It checks, at 1200 and 390 pixels, in light and dark: no complaint on the console, no request but for the
page itself, curves drawn in every chart, nothing wider than the screen, values under the pointer, runs that the legend
hides, logarithmic and time axes.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from chromium import Chromium

from dsx.contracts import Evaluation, Report, RunInfo
from dsx_observe import jsonl
from dsx_observe.report.page import page
from dsx_observe.report.read import read_runs

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHARTS = 6


def write_run(folder: Path, name: str, steps: int, rate: float, seed: int) -> None:
    """Metrics of a run that never was: noise, spikes, skipped updates, evaluations."""
    noise, clock = random.Random(seed), 0.3 * rate / 3e-4
    writer = jsonl.Writer(folder, 8)
    writer.start(RunInfo(name, steps, 124_000_000, 8, 64, 1024))
    writer._lap = lambda: clock * noise.uniform(0.9, 1.3)  # type: ignore[method-assign]
    skips = 0
    for step in range(1, steps + 1):
        share = step / steps
        loss = 2.9 + 8 * math.exp(-share * 14) + 1.2 * (1 - share) * rate / 3e-4 + noise.gauss(0, 0.08)
        norm = noise.lognormvariate(0, 0.3) * (40 if noise.random() < 3 / steps else 1)
        if step in (5, 9, steps // 3):
            skips += 1
            writer.report(Report(step - 1, False, True, skips, loss, math.inf, 65536.0 / 2**skips))
        lr = min(1.0, share * 20) * (0.55 + 0.45 * math.cos(math.pi * share)) * rate
        writer.report(Report(step, True, False, skips, loss, norm, 1.0, 1.0, {"decay": lr, "no_decay": lr / 2}))
        if step % (steps // 10) == 0:
            writer.evaluated(Evaluation(step, loss + 0.15, 256, 2.0))
    writer.finish()


def make_page(folder: Path) -> Path:
    """Three runs over each other: one of 100,000 updates, a short one, and one with a name that is markup."""
    chosen = (("wide", 100_000, 3e-4), ("narrow, warm", 600, 6e-4), ("<b>baseline</b> & co", 20_000, 2e-4))
    for number, (name, steps, rate) in enumerate(chosen):
        write_run(folder / str(number), name, steps, rate, number)
    path = folder / "report.html"
    path.write_text(page(read_runs([folder / str(number) for number in range(len(chosen))])), "utf-8")
    return path


def check_page(browser: Chromium) -> None:
    """What holds at any size."""
    wide = browser.run("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], f"the page is {wide[0]} pixels wide on a screen of {wide[1]}"
    curves = browser.run(
        "[...document.querySelectorAll('svg')].map((s) => [...s.querySelectorAll('.curve')]"
        ".map((p) => p.getAttribute('d')))"
    )
    assert len(curves) == CHARTS, f"{len(curves)} charts"
    for chart in curves:
        assert len(chart) >= 3, f"{len(chart)} curves in a chart of three runs"
        for path in chart:
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
            assert len(numbers) >= 20 and "NaN" not in path, path[:80]
    tall = browser.run("Math.max(...[...document.querySelectorAll('button')].map((b) => b.offsetHeight))")
    assert tall < 50, f"the words of a button are broken: it is {tall} pixels high"
    small = browser.run("[...document.querySelectorAll('svg')].map((s) => s.clientWidth)")
    assert min(small) > 300, f"a chart is {min(small)} pixels wide"
    assert "<b>baseline</b> & co" in browser.run("document.body.innerText"), "a name is taken for markup"


def check_pointing(browser: Chromium) -> None:
    """The pointer over the middle of the loss shows all runs; a hidden run is not told of."""
    browser.run("document.querySelector('svg').scrollIntoView({block: 'center'})")
    box = _box(browser, "svg")
    browser.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    told = browser.run("document.getElementById('tip').innerText")
    assert re.search(r"step \d+,\d+", told) and "wide" in told and "& co" in told, told
    assert "narrow" not in told, f"a run that was over by then is told of: {told}"
    assert browser.run("document.querySelectorAll('.hair').length") == CHARTS, "the line is not in every chart"
    tip = _box(browser, "#tip")
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= browser.run("innerWidth"), tip
    browser.run("document.querySelector('#legend button').click()")
    browser.move(box["x"] + box["width"] / 4 + 1, box["y"] + box["height"] / 2)
    told = browser.run("document.getElementById('tip').innerText")
    assert "wide" not in told, told
    browser.run("document.querySelectorAll('#legend button')[0].click()")
    browser.run("document.querySelector('svg').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert browser.run("!document.getElementById('tip').hidden"), "the keyboard moves nothing"


def check_axes(browser: Chromium) -> None:
    """Logarithmic scales and time change the curves; no number goes missing."""
    for script in (
        "document.querySelectorAll('figure button:not([hidden])').forEach((button) => button.click())",
        "document.querySelectorAll('#axis button')[1].click()",
    ):
        before = browser.run("document.querySelector('.curve').getAttribute('d')")
        browser.run(script)
        after = browser.run("document.querySelector('.curve').getAttribute('d')")
        assert after != before and "NaN" not in browser.run("document.getElementById('charts').innerHTML"), script


def _box(browser: Chromium, selector: str) -> dict[str, Any]:
    found: dict[str, Any] = browser.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return found


def check(program: str, folder: Path) -> None:
    """All of it; raises AssertionError."""
    path = make_page(folder)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    with Chromium(program) as browser:
        for width, height in ((1200, 900), (390, 844)):
            for dark in (False, True):
                browser.open(path, width, height, dark=dark)
                check_page(browser)
                browser.shoot(folder / f"report_{width}_{'dark' if dark else 'light'}.png")
            check_pointing(browser)
            browser.shoot(folder / f"report_{width}_pointing.png")
            check_axes(browser)
            browser.shoot(folder / f"report_{width}_axes.png")
            print(f"{width} pixels: well")
        assert browser.errors == [], browser.errors
        elsewhere = [url for url in browser.requests if url != path.absolute().as_uri() and not url.startswith("data:")]
        assert elsewhere == [], elsewhere
    print("no complaint on the console, no request elsewhere")


def main() -> None:
    """Find a browser and check."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print("skipped: no Chromium here (Debian: apt-get install chromium)")
        return
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        check(program, folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        check(program, Path(temporary))


if __name__ == "__main__":
    main()
