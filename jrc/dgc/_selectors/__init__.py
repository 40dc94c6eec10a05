"""Selectors: which entries of the accumulated gradients a step sends."""

from jrc.dgc._selectors.blocked import Blocked as Blocked
from jrc.dgc._selectors.blocked import Blocks as Blocks
from jrc.dgc._selectors.blocked import blocks_of as blocks_of
from jrc.dgc._selectors.exact import Exact as Exact
from jrc.dgc._selectors.exact import Global as Global
from jrc.dgc._selectors.names import SELECTORS as SELECTORS
from jrc.dgc._selectors.protocol import Selector as Selector
from jrc.dgc._selectors.protocol import choose_each as choose_each
from jrc.dgc._selectors.sampled import Sampled as Sampled
from jrc.dgc._selectors.threshold import largest_masks as largest_masks
from jrc.dgc._selectors.top_k import GROUP as GROUP
from jrc.dgc._selectors.two_stage import TwoStage as TwoStage
