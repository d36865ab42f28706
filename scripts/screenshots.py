"""Pictures of a run for README.md and the pages: python scripts/screenshots.py RUN [docs/images]

RUN is the folder of a run that has ended. The panel is drawn from its metrics, as a terminal showed it after two thirds
of the steps, and the report is the page of `verl report RUN`, in the light and the dark colors. Needs playwright, and a
Chromium in the PATH or in the variable CHROMIUM.
"""

import argparse
import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme

from verl.tracking.console import TrainingProgress

COLUMNS = 104
WIDTH, HEIGHT = 1200, 630
#: background, text, and the eight colors of a terminal
DARK = TerminalTheme(
    (14, 17, 23),
    (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207)]
    + [(177, 186, 196)],
)
COLORS = {"light": DEFAULT_TERMINAL_THEME, "dark": DARK}
PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>{stylesheet}
body {{ margin: 0; padding: 14px 18px; width: max-content; background: {background}; color: {foreground}; }}
pre {{ margin: 0; font: 15px/1.17 "DejaVu Sans Mono", monospace; }}</style>
<pre>{code}</pre>"""


def panel_page(run: Path, theme: TerminalTheme) -> str:
    """The panel of a run as HTML."""
    console = Console(width=COLUMNS, record=True, force_terminal=True, color_system="truecolor", file=io.StringIO())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {
        line["step"]: line for line in map(json.loads, (run / "steps.jsonl").read_text(encoding="utf-8").splitlines())
    }
    total = max(record["step"] for record in records)
    running = {"gen": time.perf_counter()}
    progress = TrainingProgress(total, run.name, total + 1, console, details=False, running=lambda: running)
    shown = [record for record in records if record["step"] <= total * 2 // 3]
    for record in shown:
        metrics = {name: value for name, value in record.items() if isinstance(value, int | float)}
        if "critic/score/mean" in metrics:
            progress.update(record["step"], metrics)
            progress.show_samples(_samples(steps.get(record["step"], {})))
        else:
            progress.validated(record["step"], metrics)
    progress._durations.clear()  # of the replay
    progress._durations.append(metrics.get("timing_s/step", 1.0))
    progress._start -= sum(record.get(f"timing_s/{name}", 0.0) for record in shown for name in ("step", "testing"))
    console.export_text(clear=True)  # the lines of a run without a terminal
    console.print(progress._panel())
    return console.export_html(theme=theme, code_format=PAGE)


def _samples(step: dict[str, Any]) -> list[tuple[str, str, float]]:
    """The best and the worst sample of a step."""
    samples = sorted(step.get("samples", []), key=lambda sample: -sample["score"])
    return [(sample["input"], sample["output"], sample["score"]) for sample in samples[:1] + samples[-1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a run with report.html")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for scheme, theme in COLORS.items():
            page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.set_content(panel_page(options.run, theme))
            page.locator("body").screenshot(path=options.out / f"panel-{scheme}.png")
            page.goto((options.run / "report.html").resolve().as_uri())
            page.screenshot(path=options.out / f"report-{scheme}.png")
        chromium.close()


if __name__ == "__main__":
    main()
