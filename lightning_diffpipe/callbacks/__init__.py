"""Callbacks: frozen work in bubbles, measured and planned, averaged weights, samples, adapters."""

from lightning_diffpipe.callbacks.bubble_filling import BubbleFilling
from lightning_diffpipe.callbacks.ema import EMA
from lightning_diffpipe.callbacks.encoding_cache import EncodingCache
from lightning_diffpipe.callbacks.loss_by_time import LossByTime
from lightning_diffpipe.callbacks.monitor import PipelineMonitor
from lightning_diffpipe.callbacks.sample_images import SampleImages
from lightning_diffpipe.callbacks.sample_metrics import FID, ClipScore, SampleMetric
from lightning_diffpipe.callbacks.save_lora import SaveLora
from lightning_diffpipe.checkpoint_files import FinalCheckpoint

__all__ = [
    "EMA",
    "FID",
    "BubbleFilling",
    "ClipScore",
    "EncodingCache",
    "FinalCheckpoint",
    "LossByTime",
    "PipelineMonitor",
    "SampleImages",
    "SampleMetric",
    "SaveLora",
]
