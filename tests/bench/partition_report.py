"""Tables and plots of what `partition.py --json` wrote.

    python tests/bench/partition_report.py RESULT.json... [--plot FOLDER]

Prints a Markdown table of each; draws one SVG for each question, with a panel for each result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from partition_systems.report import plots, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path)
    choices = parser.parse_args()
    results = [json.loads(file.read_text()) for file in choices.results]
    print("\n\n".join(table(result) for result in results))
    if choices.plot:
        print("\n".join(str(file) for file in plots(results, choices.plot)))


if __name__ == "__main__":
    main()
