"""Deep gradient compression: each step sends the few gradient entries of largest magnitude.

`scale_by_dgc` takes the place of the all-reduce: it turns local gradients into the aggregated
direction and keeps what it did not send. `dgc_momentum` is the whole optimizer. Selectors, wire
formats and exchanges are small values; an object of your own with the methods of `Selector`,
`Wire`, `EntryExchange` or `TensorExchange` works as well.
"""

from jrc.dgc._ef21 import scale_by_ef21 as scale_by_ef21
from jrc.dgc._entries import Entries as Entries
from jrc.dgc._entries import Space as Space
from jrc.dgc._exchanges import AllGather as AllGather
from jrc.dgc._exchanges import Arrived as Arrived
from jrc.dgc._exchanges import Auto as Auto
from jrc.dgc._exchanges import DenseSum as DenseSum
from jrc.dgc._exchanges import EntryExchange as EntryExchange
from jrc.dgc._exchanges import Sent as Sent
from jrc.dgc._exchanges import Sharded as Sharded
from jrc.dgc._exchanges import TensorExchange as TensorExchange
from jrc.dgc._exchanges import Transfer as Transfer
from jrc.dgc._exchanges import encoded as encoded
from jrc.dgc._optimizer import dgc_momentum as dgc_momentum
from jrc.dgc._regularize import l1_penalty as l1_penalty
from jrc.dgc._regularize import l2_penalty as l2_penalty
from jrc.dgc._reshard import reshard_dgc as reshard_dgc
from jrc.dgc._selectors import Blocked as Blocked
from jrc.dgc._selectors import Exact as Exact
from jrc.dgc._selectors import Global as Global
from jrc.dgc._selectors import Sampled as Sampled
from jrc.dgc._selectors import Selector as Selector
from jrc.dgc._selectors import TwoStage as TwoStage
from jrc.dgc._selectors import choose_each as choose_each
from jrc.dgc._state import DGCState as DGCState
from jrc.dgc._state import EF21State as EF21State
from jrc.dgc._state_specs import dgc_specs as dgc_specs
from jrc.dgc._stats import DGCStats as DGCStats
from jrc.dgc._stats import dgc_stats as dgc_stats
from jrc.dgc._transform import apply_gradients as apply_gradients
from jrc.dgc._transform import scale_by_dgc as scale_by_dgc
from jrc.dgc._wires import BFloat16 as BFloat16
from jrc.dgc._wires import EightBits as EightBits
from jrc.dgc._wires import Float32 as Float32
from jrc.dgc._wires import Wire as Wire
