"""Pages for people: what finished runs found, as one self-contained HTML page with its figures."""

from spotlights.report.audit import write_audit
from spotlights.report.page import write_report

__all__ = ["write_audit", "write_report"]
