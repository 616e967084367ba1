"""The report: one self-contained HTML file, made for people. No network, no framework."""

from cure_ray.results.report.build import write_report

__all__ = ["write_report"]
