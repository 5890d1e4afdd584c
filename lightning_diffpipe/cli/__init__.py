"""`diffpipe`: every verb of this package on the command line, configured with Hydra.

    registry   verbs and how they are registered
    session    what holds for a process: offline, threads, seed, log; config to plain values
    training   train, demo
    sampling   sample
    launch     several processes for one verb, and one for each job of a sweep
    plans      profile, plan, show, diff
    main       finds the verb, lets Hydra compose its config, tells errors in a line

A verb is a function of one composed config, `conf/<verb>.yaml`, found as a package from any directory.
This is the only place that imports Hydra. The library sees plain values.
"""

from lightning_diffpipe.cli import plans, sampling, training  # noqa: F401  registers the verbs
from lightning_diffpipe.cli.main import main
from lightning_diffpipe.cli.registry import VERBS

__all__ = ["VERBS", "main"]
