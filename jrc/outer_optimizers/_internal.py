"""What `jrc.train` and `jrc.advice` need of this package, and users do not."""

from jrc.outer_optimizers._fragments import INNER as INNER
from jrc.outer_optimizers._fragments import Fragment as Fragment
from jrc.outer_optimizers._fragments import Turn as Turn
from jrc.outer_optimizers._fragments import blend_of as blend_of
from jrc.outer_optimizers._fragments import fragment_count as fragment_count
from jrc.outer_optimizers._fragments import fragments_of as fragments_of
from jrc.outer_optimizers._fragments import overlap_of as overlap_of
from jrc.outer_optimizers._fragments import shapes_of_fragments as shapes_of_fragments
from jrc.outer_optimizers._fragments import turn_at as turn_at
from jrc.outer_optimizers._packets import Header as Header
from jrc.outer_optimizers._packets import Packet as Packet
from jrc.outer_optimizers._packets import bytes_of_exchange as bytes_of_exchange
from jrc.outer_optimizers._packets import cut_to as cut_to
from jrc.outer_optimizers._packets import header_like as header_like
from jrc.outer_optimizers._packets import header_words as header_words
from jrc.outer_optimizers._packets import padded as padded
from jrc.outer_optimizers._state import Kept as Kept
from jrc.outer_optimizers._state import as_rows as as_rows
from jrc.outer_optimizers._state import first_kept as first_kept
from jrc.outer_optimizers._state import initial_state as initial_state
from jrc.outer_optimizers._state import row_of as row_of
from jrc.outer_optimizers._words import from_words as from_words
from jrc.outer_optimizers._words import to_words as to_words
