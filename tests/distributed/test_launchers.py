"""A user's script, started in all the ways users start one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest

from lightning_diffpipe import DiffPipeStrategy
from tests.command import ROOT, TORCHRUN, run, run_on_forks
from tests.rows import row

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MARK = "DIFFPIPE_TEST_RUN"
SCRIPT = """
import json, sys
from pathlib import Path
{imports}
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])

    def training_step(self, batch, batch_idx):
        if CASE == "raise" and batch_idx == 2 and self.trainer.global_rank == 1:
            (FOLDER / "raised").touch()
            raise RuntimeError("rank 1 has had enough")
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Note(L.Callback):
    losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


if __name__ == "__main__":
    L.seed_everything(3, verbose=False)
    data = torch.randn(16, 8)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[Note()], use_distributed_sampler=False,
        {strategy}
    )
    trainer.fit(Module(), DataLoader(data, 4))
    report = {{"losses": Note.losses, "strategy": type(trainer.strategy).__name__}}
    (FOLDER / f"{{trainer.global_rank}}.json").write_text(json.dumps(report))
"""
INSTANCE = (
    'strategy=DiffPipeStrategy(num_stages=2, num_microbatches=2, profile="flops", timeout_s=60),'
)


def write(
    folder: Path, imports="from lightning_diffpipe import DiffPipeStrategy", strategy=INSTANCE
):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(imports=imports, strategy=strategy))
    return script


def start(folder: Path, launcher=(), case="train", **environment: str):
    """Starts the script in a session of its own, marked so that its processes can be found."""
    return subprocess.Popen(
        [sys.executable, *launcher, str(folder / "script.py"), str(folder), case],
        cwd=folder,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(folder), **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def left_behind(folder: Path) -> list[int]:
    """Processes that this run started and that still live."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def finish(process, folder: Path, timeout_s=150.0) -> tuple[int, str]:
    """Waits for the end; kills what is left over, and fails if anything was."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"did not end in {timeout_s:.0f} s:\n{output}")
    deadline = time.monotonic() + 5.0
    while (left := left_behind(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}\n{output}"
    return process.returncode, output


def reports(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def losses_of(folder, launcher=(), **environment):
    code, output = finish(start(folder, launcher, **environment), folder)
    assert code == 0, output
    first, second = reports(folder)
    assert first == second
    assert first["strategy"] == "DiffPipeStrategy"
    return first["losses"], output


def test_python_and_torchrun_give_the_same_losses(tmp_path):
    write(tmp_path)
    losses, output = losses_of(tmp_path)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert output.count("4/4 ") == 1, f"progress bar of one rank only:\n{output}"
    again, _ = losses_of(tmp_path, TORCHRUN)
    assert again == losses


TWICE = "import lightning_diffpipe, importlib; importlib.reload(lightning_diffpipe)"


@pytest.mark.parametrize("run", [run_on_forks, row(run)])
def test_chosen_by_name_and_imported_twice(run, tmp_path):
    script = write(tmp_path, TWICE, 'strategy="diffpipe",')
    ended = run(script, tmp_path, "train", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [report["strategy"] for report in reports(tmp_path)] == ["DiffPipeStrategy"] * 2


def test_chosen_by_the_environment(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "diffpipe")
    trainer = L.Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, DiffPipeStrategy)


@pytest.mark.parametrize("launcher", [(), row(TORCHRUN)], ids=["python", "torchrun"])
def test_an_error_on_one_rank_ends_the_script(tmp_path, launcher):
    write(tmp_path)
    process = start(tmp_path, launcher, case="raise")
    code, output = finish(process, tmp_path)
    assert code != 0
    assert "rank 1 has had enough" in output
    assert time.time() - (tmp_path / "raised").stat().st_mtime < 40.0  # of the timeout of 60


@pytest.mark.parametrize("run", [run_on_forks, row(run)])
def test_the_example_of_a_module_of_ones_own_learns(run, tmp_path):
    """The loss falls from 2 to 0.6 in sixty steps; a pipeline that trained nothing would stay above 1.5."""
    ended = run(ROOT / "examples" / "train_own_module.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert float(re.search(r"^loss (\d+\.\d+)$", ended.stdout, re.MULTILINE)[1]) < 0.8
