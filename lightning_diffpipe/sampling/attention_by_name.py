"""Standing in for attention where blocks look it up by its name.

Nearly all code says `F.scaled_dot_product_attention` when it wants attention, not when it is imported. So the name
is given another meaning while a block runs, for the thread that runs it, and nothing else in the block costs more
than it does without. Code that took the function out of its module beforehand is not seen; the probe counts
whether that happens (`Layout.attention_by_name`), and such models pass every function of torch through
`AttentionIntercepted` instead, at 2 microseconds each.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_diffpipe.sampling.tracing import AttentionHandler, answer_attention


class AttentionByName:
    """Lets a handler answer every attention of this thread that is looked up by name.

    Args:
        handler: As for `AttentionIntercepted`.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 1, 2, 4)
        >>> with AttentionByName(lambda attend, q, k, v, **options: q - 1):
        ...     float(F.scaled_dot_product_attention(x, x, x).sum())
        0.0
        >>> float(F.scaled_dot_product_attention(x, x, x).sum())
        8.0
    """

    def __init__(self, handler: AttentionHandler) -> None:
        self._handler = handler
        self._before: AttentionHandler | None = None

    def __enter__(self) -> AttentionByName:
        _Name.take()
        self._before, _here.handler = getattr(_here, "handler", None), self._handler
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _here.handler = self._before
        _Name.give_back()


_here = threading.local()


class _Name:
    """The name is shared by all threads; the last one that needs it puts the function back."""

    _users = 0
    _plain: Any = None
    _lock = threading.Lock()

    @classmethod
    def take(cls) -> None:
        with cls._lock:
            cls._users += 1
            if cls._users == 1:
                cls._plain = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = cls.answer

    @classmethod
    def give_back(cls) -> None:
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                F.scaled_dot_product_attention = cls._plain

    @classmethod
    def answer(cls, *args: Any, **kwargs: Any) -> Tensor:
        handler = getattr(_here, "handler", None)
        if handler is None:  # of another thread
            plain: Tensor = cls._plain(*args, **kwargs)
            return plain
        return answer_attention(handler, cls._plain, args, kwargs)
