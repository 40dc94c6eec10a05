"""The only code that reads jaxprs: walking, dataflow, costs and slicing, on public JAX alone."""

from jrc._jaxpr._change import changed as changed
from jrc._jaxpr._cost import equation_flops as equation_flops
from jrc._jaxpr._cost import flops as flops
from jrc._jaxpr._cost import nbytes as nbytes
from jrc._jaxpr._gate import gate as gate
from jrc._jaxpr._given import with_results_given as with_results_given
from jrc._jaxpr._inline import inline_all as inline_all
from jrc._jaxpr._inline import inline_marked as inline_marked
from jrc._jaxpr._mark import bind_mark as bind_mark
from jrc._jaxpr._mark import mark_of as mark_of
from jrc._jaxpr._program import INPUT as INPUT
from jrc._jaxpr._program import Program as Program
from jrc._jaxpr._program import Traced as Traced
from jrc._jaxpr._program import evaluate as evaluate
from jrc._jaxpr._program import is_atom as is_atom
from jrc._jaxpr._program import is_variable as is_variable
from jrc._jaxpr._program import trace as trace
from jrc._jaxpr._rebuild import can_rebuild as can_rebuild
from jrc._jaxpr._rebuild import rebuild as rebuild
from jrc._jaxpr._tag import tag_of as tag_of
from jrc._jaxpr._tag import tagged as tagged
from jrc._jaxpr._walk import call_name as call_name
from jrc._jaxpr._walk import inner_programs as inner_programs
from jrc._jaxpr._walk import label as label
from jrc._jaxpr._walk import primitive_name as primitive_name
from jrc._jaxpr._walk import walk as walk
