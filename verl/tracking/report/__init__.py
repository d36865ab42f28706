"""One HTML file about a run, which needs no server and no network."""

from verl.tracking.report.report import report_data, write_report

__all__ = ["report_data", "write_report"]
