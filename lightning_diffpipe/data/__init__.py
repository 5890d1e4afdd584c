"""Data modules: captioned images, as `{"image": (B, 3, H, W) in [-1, 1], "caption": list of B str}`.

Every data module here yields that one kind of batch, so that a `LatentDiffusion` can be trained on
any of them; with a `condition`, `(B, 3, H, W)` in [0, 1], a `ControlNetDiffusion`, too. Tensors and lists split
along their first dimension into microbatches.
"""

from lightning_diffpipe.data.captioned import CaptionedDataModule
from lightning_diffpipe.data.glyphs import GlyphDataModule, GlyphDataset
from lightning_diffpipe.data.image_folder import ImageFolderDataModule
from lightning_diffpipe.data.webdataset_shards import WebDatasetDataModule

__all__ = [
    "CaptionedDataModule",
    "GlyphDataModule",
    "GlyphDataset",
    "ImageFolderDataModule",
    "WebDatasetDataModule",
]
