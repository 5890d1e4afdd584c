"""Two ranks on one GPU: each a process that takes the GPU for its own, as if on a host of its own.

`devices=1, num_nodes=2` on one machine: the other way, two devices, would be refused where there is one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import socket
import statistics
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.multiprocessing as multiprocessing
from torch.utils.data import DataLoader

from benchmarks.one_rank_overhead.main import Samples, StableDiffusion, quiet_trainer
from lightning_diffpipe import DiffPipeStrategy

_SAID = 1500


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        options: Of the strategy.
        precision: Of the trainer.
        steps: Optimizer steps.
    """

    options: dict[str, Any]
    precision: Any = "32-true"
    steps: int = 6


def train_together(
    num_ranks: int, backend: str, on_gpu: bool, runs: Sequence[Run], limit_s: float = 85.0
) -> list[list[dict[str, Any]]]:
    """Trains a small Stable Diffusion on some ranks, once for each run.

    Args:
        num_ranks: Ranks, all on the first GPU.
        backend: "gloo" or "nccl".
        on_gpu: Rather than on the CPU.
        runs: What to train.
        limit_s: Seconds after which all are ended.

    Returns:
        By run, what each rank found.

    Raises:
        RuntimeError: A rank failed, or they were not done in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if num_ranks > 1:  # what NCCL refuses otherwise, since it knows this name
        meeting["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    ranks = [
        context.Process(
            target=_main, args=(meeting, rank, num_ranks, backend, on_gpu, runs, outcomes)
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < num_ranks:
            number, outcome = outcomes.get(timeout=limit_s)
            if isinstance(outcome, str):
                raise RuntimeError(f"rank {number} of {num_ranks} over {backend}: {outcome}")
            found[number] = outcome
    except queue.Empty:
        raise RuntimeError(f"{num_ranks} ranks over {backend}: not done in {limit_s} s") from None
    finally:
        for rank in ranks:
            rank.join(5.0 if len(found) == num_ranks else 0.0)
            rank.kill()
    return [[found[rank][index] for rank in range(num_ranks)] for index in range(len(runs))]


def _main(
    meeting: dict[str, str],
    rank: int,
    num_ranks: int,
    backend: str,
    on_gpu: bool,
    runs: Sequence[Run],
    outcomes: Any,
) -> None:
    os.environ |= meeting | {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    warnings.filterwarnings("ignore")
    try:
        torch.set_num_threads(1)
        outcomes.put((rank, [_train(num_ranks, backend, on_gpu, run) for run in runs]))
    except BaseException:
        outcomes.put((rank, traceback.format_exc()[-_SAID:]))


class _Steps(L.Callback):
    """Notes losses, and what each step was spent on."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.recordings: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(outputs["loss"].detach())
        self.recordings.append(trainer.strategy.last_step.recording)


class _Verified(logging.Handler):
    """Keeps what `verify=True` says."""

    found: dict[str, float] = {}  # noqa: RUF012

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("verified"):
            arguments: Any = record.args
            self.found = {"loss_error": arguments[0], "gradient_error": arguments[1]}


def _train(num_ranks: int, backend: str, on_gpu: bool, run: Run) -> dict[str, Any]:
    verified, noted = _Verified(), _Steps()
    logger = logging.getLogger("lightning_diffpipe.training.verification")
    logger.setLevel(logging.INFO)
    logger.addHandler(verified)
    logger.propagate = False
    pixels, batch_size = (128, 8) if on_gpu else (16, 4)
    torch.manual_seed(0)
    module = StableDiffusion(64) if on_gpu else StableDiffusion(16, levels=2, layers_per_block=1)
    strategy = DiffPipeStrategy(process_group_backend=backend, timeout_s=30, seed=1, **run.options)
    trainer = quiet_trainer(
        strategy,
        accelerator="gpu" if on_gpu else "cpu",
        num_nodes=num_ranks,
        max_steps=run.steps,
        precision=run.precision,
        callbacks=[noted],
    )
    trainer.fit(module, DataLoader(Samples(batch_size * run.steps, pixels), batch_size))
    weights = torch.cat([p.detach().float().cpu().reshape(-1) for p in module.parameters()])
    typical = {
        name: statistics.median(
            getattr(each, name) for each in noted.recordings[1:] or noted.recordings
        )
        for name in ("compute_s", "waiting_s", "filled_s", "encode_s")
    }
    return {
        "losses": [float(loss) for loss in noted.losses],
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "loss": float(noted.losses[-1]),
        "verified": verified.found,
        **typical,
    }
