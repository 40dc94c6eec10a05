"""Saving and restoring a whole training state, through orbax.

A save goes to a numbered folder under the path that the user gives, and the one before is removed
only when the new one is whole: a kill at any moment leaves one that can be read. Next to the
arrays lies a list of their places in the tree, their shapes and dtypes, so that what does not
match is an error and never a silent cast.

Several processes agree before each of orbax's collective steps: an error on one is an error on all,
where the others would wait for the one that failed.
"""

from jrc.persist._restore import restore as restore
from jrc.persist._save import save as save
