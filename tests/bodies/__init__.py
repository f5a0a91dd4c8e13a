"""The table of module bodies, by subject. A new body is one row; ``corpus`` says what is claimed of each."""

from bodies.arguments import ARGUMENTS, CACHES, RESULTS
from bodies.around import HOOKS, MODES, READS, UNDER
from bodies.autograd import FUNCTIONS, GRADIENTS
from bodies.buffers import BUFFERS
from bodies.captures import CAPTURES
from bodies.first_runs import FIRST_RUNS
from bodies.library import LIBRARIES
from bodies.memory import ALIASES, CHANGES, VIEWS
from bodies.modules import ATTRIBUTES, COMPARISONS, EFFECTS, MODULES
from bodies.random import DRAWS, REACHED
from bodies.unseen import UNSEEN
from bodies.updates import UPDATES
from bodies.wrappers import WRAPPERS

TABLES = {
    "argument": ARGUMENTS, "cache": CACHES, "result": RESULTS, "draw": DRAWS, "reached": REACHED,
    "attribute": ATTRIBUTES, "compares": COMPARISONS, "effect": EFFECTS, "module": MODULES, "alias": ALIASES,
    "view": VIEWS, "change": CHANGES, "gradient": GRADIENTS, "function": FUNCTIONS, "capture": CAPTURES,
    "unseen": UNSEEN, "buffer": BUFFERS, "mode": MODES, "under": UNDER, "hooks": HOOKS, "reads": READS,
    "library": LIBRARIES, "first run": FIRST_RUNS, "wrapper": WRAPPERS, "update": UPDATES,
}  # fmt: skip
BODIES = {f"{subject}: {name}": body for subject, table in TABLES.items() for name, body in table.items()}
