"""Pages for people: what finished runs found, as one self-contained HTML page with its figures."""

from spotlights.report.page import write_report

__all__ = ["write_report"]
