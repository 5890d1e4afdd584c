"""PipeFusion, and sequence parallelism inside its stages or by itself: a transformer that runs in parts.

Reading order: `sampler.py` (what is decided), `run.py` (the loop over turns), `patch.py` (who runs which block,
and the model on some tokens), `kv_cache.py` (keys of other patches); `sequence_attention.py` (shared tokens).
"""

from lightning_diffpipe.sampling.pipefusion.run import PipeFusionSetting
from lightning_diffpipe.sampling.pipefusion.sampler import PipeFusion, SequenceParallel

__all__ = ["PipeFusion", "PipeFusionSetting", "SequenceParallel"]
