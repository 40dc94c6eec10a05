"""Let autodoc read docstrings that are written in Markdown: code spans, fences and formulas."""

import inspect
import re

import jrc

CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
FORMULA = re.compile(r"^( *)\$\$(.*?)\$\$$", re.M | re.S)


def to_rst(text):
    """Return a docstring as reStructuredText; its sections are left to napoleon."""
    kept = []

    def keep(match, directive, body):
        """Put a directive aside, so that its content is not taken for text."""
        kept.append((match[1], f".. {directive}", inspect.cleandoc("\n" + body)))
        return f"@kept{len(kept) - 1}@"

    text = FENCE.sub(lambda m: keep(m, f"code-block:: {m[2] or 'text'}", m[3]), text)
    text = FORMULA.sub(lambda m: keep(m, "math::", m[2]), text)
    text = "".join(inline(part) for part in re.split(r"((?<!`)`[^`]+`(?!`)\w?)", text))
    for i, (indent, head, body) in enumerate(kept):
        lines = [head, "", *("    " + line for line in body.splitlines())]
        text = text.replace(f"@kept{i}@", "\n".join((indent + line).rstrip() for line in lines))
    return text


def inline(part):
    """Return a piece of text, or one span of code, as reStructuredText."""
    if match := CODE.fullmatch(part):
        code = " ".join(match[1].split())
        of_jrc = code.startswith("jrc.") and hasattr(jrc, code[4:])
        span = f":py:obj:`{code}`" if of_jrc else f"``{code}``"
        return span + (f"\\ {match[2]}" if match[2] else "")  # a letter behind it: "`Plan`s"
    part = re.sub(r"(?<=[\s(])([*|])(?=\w)", r"\\\1", part)
    return re.sub(r"\$([^$]+)\$", r":math:`\1`", part)


def process(app, what, name, obj, options, lines):
    """Rewrite the lines of a docstring in place."""
    lines[:] = to_rst("\n".join(lines)).splitlines()


def setup(app):
    """Come before napoleon, which reads the sections."""
    app.connect("autodoc-process-docstring", process, priority=100)
    return {"parallel_read_safe": True}
