"""Tables that never cut: columns side by side where they fit, one below the other where they don't.

A terminal that is too narrow would have figures and ids cropped, and 12.50000 is not 12.500000. So those columns keep
their width; text is folded, down to a width at which it can still be read; and where even that is too wide, each row is
shown as lines of `name  value`, which the terminal itself may break.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

TEXT_WIDTH_MIN = 16  # a path or a reason can still be read when it is folded to this
BETWEEN = 2  # cells between two columns


class TextTable:
    """Rows for a terminal of any width."""

    def __init__(
        self,
        names: Sequence[str],
        rows: Sequence[Sequence[Text]],
        *,
        title: str | None,
        right: Collection[str],
        whole: Collection[str],
    ) -> None:
        self._names = names
        self._rows = rows
        self._title = title
        self._right = right
        self._whole = {*right, *whole}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._side_by_side() if self._least() <= options.max_width else self._stacked()

    def _least(self) -> int:
        """The columns that it takes to cut nothing and to fold only text, and that not too much."""
        least = BETWEEN * max(0, len(self._names) - 1)
        for number, name in enumerate(self._names):
            wide = max([Text(name).cell_len, *(row[number].cell_len for row in self._rows)])
            least += wide if name in self._whole else min(wide, TEXT_WIDTH_MIN)
        return least

    def _side_by_side(self) -> Table:
        made = Table(
            box=box.SIMPLE_HEAD,
            title=self._title,
            title_justify="left",
            title_style="bold",
            padding=(0, 0, 0, BETWEEN - 1),
            pad_edge=False,
            show_edge=False,
        )
        for name in self._names:
            made.add_column(
                name,
                justify="right" if name in self._right else "left",
                no_wrap=name in self._whole,
                overflow="fold",
            )
        for row in self._rows:
            made.add_row(*row)
        return made

    def _stacked(self) -> Text:
        wide = max(map(len, self._names))
        lines = [] if self._title is None else [Text(self._title, style="bold")]
        for row in self._rows:
            lines += [Text(f"{name:<{wide}}  ").append(cell) for name, cell in zip(self._names, row, strict=True)]
            lines.append(Text())
        return Text("\n", no_wrap=True, overflow="ignore").join(lines[:-1] if self._rows else lines)
