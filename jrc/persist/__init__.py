"""Save and restore a whole training state, through orbax.

    jrc.save("run/state", state)
    state = jrc.restore("run/state", like=state)

A save goes to a numbered folder under the given path. The previous save is removed only when the
new one is complete, so that a process killed at any moment leaves a save that can be read. A
manifest next to the arrays lists their places in the tree, shapes and dtypes: a mismatch is an
error and never a silent cast.

Several processes agree before each collective step of orbax: an error on one process is an error on
all, because the others would wait for it.
"""

from jrc.persist._restore import restore as restore
from jrc.persist._save import save as save
