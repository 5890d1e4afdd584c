"""`diffpipe`: every verb of this package on the command line, configured with Hydra.

    launch     processes: what holds for one (offline, threads, seed, log), and several for a verb
    values     verbs by name, types of their settings; what cannot be is refused by the name the user gave it
    training   train, bench, export
    sampling   sample
    plans      profile, plan, show, diff
    data       data
    main       finds the verb, lets Hydra compose its config, says errors in a line

A verb is a function of one composed config, `conf/<verb>.yaml`, found as a package from any directory.
This is the only place that imports Hydra. The library sees plain values.
"""

import gc

# What is imported stays: to look for what does not is a tenth of the time to the first line.
gc.disable()

from lightning_diffpipe.cli import training  # noqa: E402, F401  its verbs come first

# isort: split
from lightning_diffpipe.cli import data, plans, sampling  # noqa: E402, F401  register
from lightning_diffpipe.cli.main import main  # noqa: E402
from lightning_diffpipe.cli.values import VERBS  # noqa: E402

gc.freeze()
gc.enable()

__all__ = ["VERBS", "main"]
