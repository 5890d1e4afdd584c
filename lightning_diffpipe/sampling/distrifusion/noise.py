"""Noise that a scheduler draws on the way: every band steps the whole latents, so all must draw the same.

A generator in the request is the same on all ranks, as the request is. Where a scheduler is given none, one process
draws from torch's default generators. Ranks that are processes then all draw from the state of rank 0's; those that
are threads of one process share the default ones, so each is given a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from lightning_diffpipe.comm.links import Links, ProcessLinks
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.schedulers import drawing_from, random_states, takes_generator


@contextlib.contextmanager
def drawing_alike(links: Links, device: torch.device) -> Iterator[None]:
    """A context in which default generators of all processes go on from where those of rank 0 are; collective.

    On other ranks they are as they were after it. Threads, which share theirs, are left alone.
    """
    if not isinstance(links, ProcessLinks) or links.num_ranks == 1:
        yield
        return
    states = links.broadcast_object(lambda: random_states(device))
    with drawing_from(states, device) if links.rank else contextlib.nullcontext():
        yield


class OwnGenerators:
    """Generators for threads that each run a request, as if each were a process.

    Args:
        request: What they run.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        given = request.step_kwargs.get("generator")
        self._default = None
        if given is None and takes_generator(request.scheduler):
            self._default = _default_generator(request.latents.device)
        self._copies: list[torch.Generator] = []

    def of_each(self, num_threads: int) -> list[Request]:
        """The request with generators of its own, for each thread."""
        return [self._copied() for _ in range(num_threads)]

    def finish(self) -> None:
        """The default generator goes on where the first thread's copy is, as in one process."""
        if self._default is not None:
            self._default.set_state(self._copies[0].get_state())

    def _copied(self) -> Request:
        copies: dict[int, torch.Generator] = {}  # samples may share one

        def copy(x: Any) -> Any:
            return (
                copies.setdefault(id(x), x.clone_state()) if isinstance(x, torch.Generator) else x
            )

        arguments = pytree.tree_map(copy, dict(self._request.step_kwargs))
        if self._default is not None:
            self._copies.append(self._default.clone_state())
            arguments["generator"] = self._copies[-1]
        return dataclasses.replace(self._request, step_kwargs=arguments)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.cuda.default_generators
    return generators[torch.cuda.current_device() if device.index is None else device.index]
