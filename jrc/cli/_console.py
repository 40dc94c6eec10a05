"""What the command line prints: the only results of jrc that are printed."""

from rich.console import Console


def print_text(text: str) -> None:
    """Print a result to standard output; a terminal breaks long lines."""
    _print(Console(soft_wrap=True, emoji=False), text)


def print_error(text: str) -> None:
    """Print an error to standard error."""
    _print(Console(stderr=True, soft_wrap=True, emoji=False), text)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)
