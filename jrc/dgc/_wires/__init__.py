"""Wire formats: how entries become 32-bit words, and what the receiver reads."""

from jrc.dgc._wires.bfloat16 import BFloat16 as BFloat16
from jrc.dgc._wires.eight_bits import EightBits as EightBits
from jrc.dgc._wires.float32 import Float32 as Float32
from jrc.dgc._wires.names import WIRES as WIRES
from jrc.dgc._wires.protocol import Wire as Wire
