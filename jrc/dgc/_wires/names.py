"""The wire formats by name."""

from jrc.dgc._wires.bfloat16 import BFloat16
from jrc.dgc._wires.eight_bits import EightBits
from jrc.dgc._wires.float32 import Float32
from jrc.dgc._wires.protocol import Wire

WIRES: dict[str, Wire] = {
    "f32": Float32(),
    "bf16": BFloat16(),
    "fp8": EightBits("fp8"),
    "int8": EightBits("int8"),
}
