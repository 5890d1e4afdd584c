"""Callbacks: averaged weights, sample pictures, samples per second."""

from lightning_diffpipe.callbacks.ema import EMA
from lightning_diffpipe.callbacks.samples import SampleImages
from lightning_diffpipe.callbacks.throughput import Throughput

__all__ = ["EMA", "SampleImages", "Throughput"]
