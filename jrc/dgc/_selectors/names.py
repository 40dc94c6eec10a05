"""The selectors by name."""

from jrc.dgc._selectors.blocked import Blocked
from jrc.dgc._selectors.exact import Exact, Global
from jrc.dgc._selectors.protocol import Selector
from jrc.dgc._selectors.sampled import Sampled
from jrc.dgc._selectors.two_stage import TwoStage

SELECTORS: dict[str, Selector] = {
    "exact": Exact(),
    "two_stage": TwoStage(),
    "blocked": Blocked(),
    "global": Global(),
    "sampled": Sampled(),
}
