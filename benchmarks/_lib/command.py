"""The `main` of every benchmark: command line, report file, tables and exit status.

A benchmark is a module that measures, makes tables of what it measured, and ends in

    BENCHMARK = Benchmark("memory.segments", __doc__, measure, tables)
    main = BENCHMARK.main

    if __name__ == "__main__":
        main()
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks._lib import platform
from benchmarks._lib.report import Report, opened, opened_parts, write, write_parts
from benchmarks._lib.table import Table


@dataclasses.dataclass
class Run:
    """One run of a benchmark, which `measure` is called with.

    Attributes:
        options: The command line.
        report: What was measured so far: the content of `--out`, and `toy`.
        console: The terminal.
        status: Shows in one line what is being measured.
        files: As of the benchmark.
    """

    options: argparse.Namespace
    report: Report
    console: Console
    status: Callable[[str], None]
    files: tuple[str, ...] = ()

    def save(self) -> None:
        """Write the report to `--out`, if there is one."""
        if self.options.out and self.files:
            write_parts(self.options.out, self.report, self.files)
        elif self.options.out:
            write(self.options.out, self.report)

    def sections(self, studies: Mapping[str, Callable[[], Report]]) -> None:
        """Measure each section of `--only`; the others stay in the report as they were."""
        for name in self.options.only:
            self.status(name)
            about = self.about()
            self.report[name] = about | studies[name]()
            self.save()

    def about(self) -> Report:
        """Return the machine, its load now, and the options that the figures depend on."""
        skip = {"out", "plot", "platform", "cache"}
        settings = {k: _plain(v) for k, v in vars(self.options).items() if k not in skip}
        return platform.machine() | {"settings": settings}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark as a command.

    Attributes:
        name: The module below `benchmarks`: `memory.plan`.
        doc: The module's docstring, whose first line is the description.
        measure: Fills `run.report`.
        tables: Makes the tables of a report.
        add_options: Adds options to the parser.
        check_options: Refuses options that do not fit each other, with `parser.error`.
        toy: Values of options with `--toy`.
        keys: What every report of this benchmark has; with keys, a run adds to the report in
            `--out`, and refuses a file without them.
        files: Names of parts of the report; with files `--out` is a folder, with a JSON file for
            each part, which have the `keys`.
        problems: What a report breaks of the promises; any is an exit status of 1.
        plot: Writes the picture of a report into a folder; returns its path, or None.
        platform: The default of `--platform`; None is what JAX finds.
    """

    name: str
    doc: str
    measure: Callable[[Run], None]
    tables: Callable[[Report], Sequence[Table]]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    check_options: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = (
        lambda parser, options: None
    )
    toy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    problems: Callable[[Report], Iterable[str]] = lambda report: ()
    plot: Callable[[Report, pathlib.Path], pathlib.Path | None] | None = None
    platform: str | None = None

    def main(self, argv: Sequence[str] | None = None) -> Report:
        """Measure, write the report, print its tables.

        Args:
            argv: The command line; `sys.argv` by default.

        Returns:
            The report.

        Raises:
            SystemExit: If an option or the file of `--out` is refused, or a promise is broken.
        """
        options = self.parse(argv)
        platform.use(options.platform)
        console = Console()
        report = self._begun(options)
        columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("")
            run = Run(
                options, report, console,
                lambda text: progress.update(task, description=text), self.files,
            )  # fmt: skip
            self._measured(run)
        for table in self.tables(report):
            console.print(table.terminal())
        if self.plot and options.plot:
            options.plot.mkdir(parents=True, exist_ok=True)
            if path := self.plot(report, options.plot):
                console.print(f"Written: {path}")
        self._judged(report, console)
        return report

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options, checked, with the values of `--toy` put in."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}", description=self.doc.splitlines()[0]
        )
        self.add_options(parser)
        add = parser.add_argument
        add("--toy", action="store_true", help="tiny sizes, to see that it runs")
        add("--platform", default=self.platform, help="cpu, gpu or tpu (default: what JAX finds)")
        verb = "continue and to write" if self.keys else "write"
        what = "folder of JSON files" if self.files else "JSON file"
        add("--out", type=pathlib.Path, help=f"{what} to {verb}")
        if self.plot:
            add("--plot", type=pathlib.Path, help="folder for the picture")
        options = parser.parse_args(argv)
        self.check_options(parser, options)
        if options.toy:
            vars(options).update(self.toy)
        return options

    def _begun(self, options: argparse.Namespace) -> Report:
        if self.files:
            old = opened_parts(options.out, self.name, self.files, *self.keys)
        else:
            old = opened(options.out, self.name, *self.keys) if self.keys else {}
        if old.get("toy", options.toy) != options.toy:
            sizes = "toy" if old["toy"] else "full"
            sys.exit(
                f"{self.name}: --out must name a file of {'toy' if options.toy else 'full'} "
                f"figures, got {options.out} with {sizes} ones. Choose another file."
            )
        return {**old, "toy": options.toy}

    def _measured(self, run: Run) -> None:
        try:
            self.measure(run)
        except KeyboardInterrupt:
            kept = "Without --out nothing is kept."
            if run.options.out and self.keys:
                kept = f"{run.options.out} has what was measured; the same command continues."
            run.console.print(f"\nStopped. {kept}")
            raise SystemExit(130) from None
        run.save()

    def _judged(self, report: Report, console: Console) -> None:
        broken = list(self.problems(report))
        for line in broken:
            console.print(f"[red]broken:[/red] {line}", highlight=False)
        if broken:
            sys.exit(1)


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: names of `known`, separated by commas."""
    allowed = tuple(known)

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(
                f"must be some of {', '.join(allowed)}, got {', '.join(unknown)}."
            )
        return names

    return parse


def numbers_of(is_allowed: Callable[[float], bool], rule: str) -> Callable[[str], list[float]]:
    """Return an argparse type: numbers, separated by commas, that follow a rule."""

    def parse(text: str) -> list[float]:
        try:
            # Each once; -0.0 is 0.0.
            numbers = list(dict.fromkeys(float(each) + 0.0 for each in text.split(",")))
        except ValueError:
            numbers = [float("nan")]
        if not all(map(is_allowed, numbers)):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}.")
        return numbers

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number that is not below `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}.")
        return int(text)

    return parse


def _plain(value: Any) -> Any:
    """Return an option's value as JSON takes it."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, int | float | str | None) else str(value)
