"""Exchanges: how the entries that each replica sends become their mean on every replica."""

from jrc.dgc._exchanges.allgather import AllGather as AllGather
from jrc.dgc._exchanges.dense_sum import DenseSum as DenseSum
from jrc.dgc._exchanges.names import EXCHANGES as EXCHANGES
from jrc.dgc._exchanges.names import Auto as Auto
from jrc.dgc._exchanges.protocol import Arrived as Arrived
from jrc.dgc._exchanges.protocol import EntryExchange as EntryExchange
from jrc.dgc._exchanges.protocol import Exchange as Exchange
from jrc.dgc._exchanges.protocol import Sent as Sent
from jrc.dgc._exchanges.protocol import TensorExchange as TensorExchange
from jrc.dgc._exchanges.protocol import Transfer as Transfer
from jrc.dgc._exchanges.protocol import encoded as encoded
from jrc.dgc._exchanges.sharded import Sharded as Sharded
