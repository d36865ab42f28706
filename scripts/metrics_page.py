"""Write the tables of docs/metrics.md from verl/tracking/metric_names.yaml: python scripts/metrics_page.py"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

from verl.tracking.report.report import metrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
MARK = "<!-- tables -->\n"


def text() -> str:
    """The page: what is above the mark, and the tables."""
    above, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    return f"{above}{mark}\n{tables().rstrip()}\n"


def tables() -> str:
    """The tables of the page."""
    lines = []
    for section, entries in itertools.groupby(metrics(), lambda metric: metric.section):
        lines += [f"## {section}", "", "| metric | unit | meaning | healthy, or what to do |", "|---|---|---|---|"]
        for metric in entries:
            cells = (f"`{metric.names}`", metric.unit, metric.meaning, metric.watch)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
