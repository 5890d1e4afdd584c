"""Runs Python, with these arguments, where torch believes in GPUs."""

import os
import sys

from tests import gpu_like

library = str(gpu_like.built())
os.environ |= {"LD_PRELOAD": library, gpu_like.LIBRARY: library}
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # or it warns that gloo's operators are replaced
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
