# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Tables as text: aligned for a terminal, or Markdown."""

import re


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """First column to the left, the others to the right, two blanks between."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells):
        first, *rest = zip(cells, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "-" * len(line(header)), *map(line, rows)])


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    # Codecs one behind the other have bars in their names, and those end cells, in code too.
    lines = [[re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells] for cells in [header, rule, *rows]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def megabytes(count: float | None) -> str:
    """MB = 10^6 bytes."""
    return "-" if count is None else f"{count / 1e6:.2f}" if count < 1e8 else f"{count / 1e6:.0f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
