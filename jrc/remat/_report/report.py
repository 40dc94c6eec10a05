"""`jrc.Report`: what the gradient of a function saves, recomputes and needs."""

import dataclasses
import pathlib
from collections.abc import Sequence

from jrc._dataclass_json import from_json_text, json_text
from jrc._errors import public
from jrc._text import html_of
from jrc.remat._report.plot import picture_html, plot_reports
from jrc.remat._report.remedies import remedies_of
from jrc.remat._report.remedy import Remedy
from jrc.remat._report.report_data import ReportData
from jrc.remat._report.text import compare_text, report_parts, report_text

_FORMAT = "jrc.Report/6"


@dataclasses.dataclass(frozen=True)
class Report(ReportData):
    """What the gradient of a function saves, recomputes and needs; prints as a table.

    Attributes:
        name: The name of the function.
        saved: Every value that the derivative saves, in program order, with `bytes`, `shape`,
            `dtype`, `primitive`, `mark`, `place` (`net.py:31`), `times` (the number of iterations
            of the loops around it), `origin` (the constructs that it is made inside of) and
            `memory`.
        rerun: What the backward pass recomputes, per operator: `primitive`, `count`, `flops`; the
            most FLOPs first.
        flops: Floating-point operations of value and gradient, loops times their length.
        memory: Bytes of the compiled value and gradient, as XLA states them: `arguments`,
            `outputs`, `temporaries`, `aliased`, and their `peak`.
        live: One entry for each instruction of the compiled program, in the order in which they
            run: `bytes` of temporaries and results so far, but for results in the memory of donated
            arguments; `phase`, `mark`.
        collectives: What a device exchanges with others, that first of which it sends most:
            `kind` (`all-gather`), `arrays` (types of the result), `axes` of the mesh, `devices` of
            a group, `count` (times the iterations of loops), how many of these run in the
            `backward` pass and how many belong to recomputation (`rerun`), `bytes` of the results,
            and bytes `sent`, of recomputation `rerun_sent`, around a ring.
        warnings: Recomputation without effect, each with the way out.
        device: The kind of device that the program was compiled for.
        opaque: What `jrc.plan` cannot look into (functions with a `custom_vjp`), the most bytes
            first: `name`, `place`, `times`, and the `bytes` that it saves besides its operands.
        is_gradient: Whether it is of value and gradient; else, with `argnums=None`, of the function
            as it is: then `saved` has its largest values.
        constants: Bytes of the arrays that the function closes over, which no figure has.
        donatable: Bytes of results that could lie in the memory of arguments, and do not; of a
            function as it is.
        donatable_argnums: The arguments that these bytes are in.
        versions: JAX and the compilers that it was made with: `jaxlib 0.12.0`.
        time: Seconds of the compiled value and gradient on one device: `value`, and the `source`,
            as for `jrc.plan`; `None` where nothing is known of the device's rates.
        tried: The remedies that were compiled, with `try_remedies=True`; those that help little
            too, which `remedies` leaves out.
        argnums: The arguments that are differentiated; none with `argnums=None`.
    """

    def __str__(self) -> str:
        """Return the report as a table, the largest values first and the others summed."""
        return report_text(self)

    def _repr_html_(self) -> str:
        """Return the report for a notebook: tables, and the live bytes if matplotlib is there."""
        return html_of(report_parts(self)) + picture_html(self)

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """What makes the peak smaller; each prints as a sentence.

        Each has `text`, `kind`, `bytes` (how much smaller), `peak_bytes`, `seconds`,
        `seconds_ratio` and `is_compiled`. Those that were compiled come first, the fastest at their
        head; then the others, that which is about the most bytes first.
        """
        return remedies_of(self)

    @public("jrc.Report.compare")
    def compare(self, other: "Report", names: Sequence[str] = ("before", "after")) -> str:
        """Return this report and another one side by side.

        Args:
            other: The other report.
            names: What to call the two.

        Returns:
            A table as text: peak, saved bytes, recomputed FLOPs, and the lines that differ most.

        Raises:
            TypeError: If `other` is no report, or `names` no list of strings.
            ValueError: If there are not two names.
        """
        return compare_text(self, other, names)

    def to_json(self) -> str:
        """Return the report as text that `from_json` reads."""
        return json_text(self, _FORMAT, peak=self.memory.peak)

    @classmethod
    @public("jrc.Report.from_json")
    def from_json(cls, text: str) -> "Report":
        """Return the report that `to_json` wrote.

        Args:
            text: What `to_json` returned.

        Returns:
            An equal report.

        Raises:
            ValueError: If the text is something else, or a report that was changed.
        """
        try:
            return from_json_text(cls, text, _FORMAT)
        except ValueError as error:
            raise ValueError(
                f"text must be what Report.to_json writes, of format {_FORMAT!r}, got {error}. "
                "Write it again with jrc.explain(...).to_json()."
            ) from error

    @public("jrc.Report.plot")
    def plot(
        self, path: str | pathlib.Path, *others: "Report", names: Sequence[str] | None = None
    ) -> None:
        """Draw the live bytes along the program, of this report and of others.

        Args:
            path: The file to write; its suffix is the format (`.png`, `.pdf`, `.svg`).
            *others: More reports, drawn into the same figure.
            names: What to call the reports; by default their functions' names.

        Raises:
            ImportError: If matplotlib is not installed: `pip install '.[plot]'` in a checkout.
            TypeError: If `path` is no path, one of `others` no report, or `names` no strings.
            ValueError: If there are not as many names as reports, the suffix is no format, or a
                report has no live bytes: its program makes no arrays, or the compiler refuses it.
            OSError: If there is no such folder, or the file cannot be written.
        """
        plot_reports(path, (self, *others), names)
