"""Measure heliograph beside a hand-written loop and its peers, and print every figure beside its bar.

A bar that is not held is printed, not raised: on a shared machine a figure is not a test. Each figure is the median
over five fresh processes of the median in each; over three, where there is much to start.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from heliograph.packages.tests.benchmarks.worker import MARK, WHOLE, work


def main() -> None:
    """Print all tables, or measure for the process that does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, all in one process")
    parser.add_argument("--only", action="append", metavar="NAME", help="print this table; several times for several")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the first table, too")
    parser.add_argument(
        "--page", action="store_true", help="write the figures into docs/developers/benchmarks.md, and draw the charts"
    )
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=WHOLE, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        for name in asked.worker:
            print(MARK + json.dumps(work(name, asked.share, asked.seed)), flush=True)
        return

    # Not in a worker: they import every module that measures.
    from heliograph.packages.tests.benchmarks import chart, page, report

    if unknown := set(asked.only or ()) - set(report.NAMES):
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(report.NAMES)}")
    if asked.page and asked.only:
        parser.error("--page needs the figures of all tables, so leave out --only")
    if asked.chart and asked.only and report.FIRST_NAME not in asked.only:
        parser.error(f"--chart draws the table {report.FIRST_NAME}: add --only {report.FIRST_NAME}")
    found = report.show(asked.only or report.NAMES, quick=asked.quick)
    if asked.json:
        report.write_json(found, asked.json)
    if asked.chart:
        chart.draw(found.first, asked.chart)
    if asked.page:
        page.write_page(found)


if __name__ == "__main__":
    main()
