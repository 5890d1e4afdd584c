"""What the data module uses of the package webdataset, which is optional, so that its tests always run."""

import io
import random
import re
import tarfile
from itertools import islice

from PIL import Image
from torch.utils.data import IterableDataset


class SimpleShardList:
    """The shards of a brace pattern such as `{0..2}.tar`, shuffled if there is a seed."""

    def __init__(self, pattern, seed=None):
        self.urls, self.seed = _expanded(pattern), seed

    def __len__(self):
        return len(self.urls)

    def __call__(self):
        shards = list(self.urls)
        if self.seed is not None:
            random.Random(self.seed).shuffle(shards)
        return iter(shards)


class DataPipeline(IterableDataset):
    """A source and what is done to all that comes from it."""

    def __init__(self, source, *stages):
        self.source, self.stages = source, stages

    def __iter__(self):
        items = self.source()
        for stage in self.stages:
            items = stage(items)
        return iter(items)


def slice(*bounds):  # names as in the package
    return lambda items: islice(items, *bounds)


def tarfile_to_samples(handler):
    def samples(shards):
        for shard in shards:
            try:
                yield from _samples(shard)
            except tarfile.TarError as error:
                error.args += (shard,)
                if not handler(error):
                    break

    return samples


def shuffle(size, seed):
    def shuffled(items):
        held, draw = [], random.Random(seed)
        for item in items:
            held.append(item)
            if len(held) == size:
                yield held.pop(draw.randrange(size))
        draw.shuffle(held)
        yield from held

    return shuffled


def _expanded(pattern):
    found = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern)
    if not found:
        return [pattern]
    before, first, last, after = found.groups()
    return [f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1)]


def _samples(shard):
    by_key = {}
    with tarfile.open(shard) as tar:
        for entry in tar:
            key, _, end = entry.name.partition(".")
            sample = by_key.setdefault(key, {"__key__": key, "__url__": str(shard)})
            sample[end] = tar.extractfile(entry).read()
    return by_key.values()


def red_images(numbers):
    """Files of a shard: for each number a red image, and the number as its caption."""
    files = {}
    for number in numbers:
        image = io.BytesIO()
        Image.new("RGB", (20, 20), (number, 0, 0)).save(image, "PNG")
        files |= {f"{number}.png": image.getvalue(), f"{number}.txt": b"%d" % number}
    return files


def write_shard(path, files):
    """Writes a shard of files, given by name."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
