"""What the data module uses of the package webdataset, which is optional, so that its tests always run."""

import io
import random
import re
import tarfile
from itertools import islice

from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info


class SimpleShardList:
    """The shards of a brace pattern such as `{0..2}.tar`, shuffled if there is a seed."""

    def __init__(self, pattern, seed=None):
        self.shards, self.seed = _expanded(pattern), seed

    def __len__(self):
        return len(self.shards)

    def __call__(self):
        shards = list(self.shards)
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

    def compose(self, *stages):
        return DataPipeline(self.source, *self.stages, *stages)


def slice(*bounds):  # names as in the package
    return lambda items: islice(items, *bounds)


def split_by_worker(items):
    worker = get_worker_info()
    return islice(items, worker.id, None, worker.num_workers) if worker else items


def tarfile_to_samples():
    return lambda shards: (sample for shard in shards for sample in _samples(shard))


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


def to_tuple(*choices):
    def chosen(sample):
        ends = [next(end for end in choice.split(";") if end in sample) for choice in choices]
        return tuple(sample[end] for end in ends)

    return map(chosen)


def map(function):
    return lambda items: (function(item) for item in items)


def batched(size, collation_fn):
    def batches(items):
        items = iter(items)
        while batch := list(islice(items, size)):
            yield collation_fn(batch)

    return batches


def _expanded(pattern):
    found = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern)
    if not found:
        return [pattern]
    before, first, last, behind = found.groups()
    return [
        f"{before}{number:0{len(first)}}{behind}" for number in range(int(first), int(last) + 1)
    ]


def _samples(shard):
    by_key = {}
    with tarfile.open(shard) as tar:
        for entry in tar:
            key, _, end = entry.name.partition(".")
            by_key.setdefault(key, {})[end] = tar.extractfile(entry).read()
    return by_key.values()


def red_pictures(numbers):
    """Files of a shard: for each number a red picture, and the number as its caption."""
    files = {}
    for number in numbers:
        picture = io.BytesIO()
        Image.new("RGB", (20, 20), (number, 0, 0)).save(picture, "PNG")
        files |= {f"{number}.png": picture.getvalue(), f"{number}.txt": b"%d" % number}
    return files


def write_shard(path, files):
    """Writes a shard of files, given by name."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
