"""Write the tables of docs/metrics.md from verl/tracking/metric_names.yaml: python scripts/metrics_page.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

from verl.tracking.metric_names import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
MARK = "<!-- tables -->\n"


def text() -> str:
    """The page: what is above the mark, and the tables."""
    above, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    return f"{above}{mark}\n{page().rstrip()}\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
