"""What other packages of jrc need of this one, and users do not."""

from jrc.dgc._collectives import as_local as as_local
from jrc.dgc._collectives import gather as gather
from jrc.dgc._config import DGCConfig as DGCConfig
from jrc.dgc._config import checked_sparsity as checked_sparsity
from jrc.dgc._entries import fits as fits
from jrc.dgc._flush import apply_residuals as apply_residuals
from jrc.dgc._leaves import served as served
from jrc.dgc._phases import plan_phases as plan_phases
from jrc.dgc._reshard import changed as changed
from jrc.dgc._reshard import check_shardings_known as check_shardings_known
from jrc.dgc._reshard import mixed_rows as mixed_rows
from jrc.dgc._state import dgc_states as dgc_states
from jrc.dgc._state import is_floating as is_floating
from jrc.dgc._state import with_states as with_states
from jrc.dgc._state import without_axes as without_axes
from jrc.dgc._state_specs import state_specs as state_specs
from jrc.dgc._transform import applies_in_place as applies_in_place
