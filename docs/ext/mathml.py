"""Render formulas as MathML: browsers show it without a script and without a network."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def inline(self, node):
    """Write a formula in a line."""
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block(self, node):
    """Write a formula of its own."""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(tex2mathml(node.astext(), as_block=True) + "</div>")
    raise nodes.SkipNode


def setup(app):
    """Register the renderer `mathml`, for `html_math_renderer`."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True}
