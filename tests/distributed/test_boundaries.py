"""What crosses a stage boundary may be anything a module returns."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.scenarios import check_parity, fit
from tests.distributed.tiny import WIDTH, TinyDiffusion

pytestmark = pytest.mark.distributed


class Front(nn.Module):
    """Returns tensors of many types; no children, so that it is one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        wide = x + torch.tanh(x @ self.weight)
        planes = wide.transpose(1, 2).reshape(len(x), 3, 4, 5)
        return {
            "wide": wide, "narrow": (wide * 0.5).float(), "ids": wide.argmax(-1), "mask": wide.sum(-1) > 0,
            "image": planes.contiguous(memory_format=torch.channels_last), "still": wide.detach() * 2,
            "only_looked_at": wide.mean((1, 2)) + 1,
        }  # fmt: skip


class Back(nn.Module):
    """Reads all of them, one without gradient only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, h, parts, noise):
        with torch.no_grad():
            scale = parts["only_looked_at"].abs() + 1
        h = h @ self.weight + self.table[parts["ids"]] + parts["narrow"].double()
        h = torch.where(parts["mask"][..., None], h, parts["still"])
        image = (parts["image"] * noise).flatten(1).sum(-1)
        return h / scale[:, None, None] + image[:, None, None]


class Mixed(TinyDiffusion):
    """Many tensors from the first layer to the last, past the stage between."""

    def __init__(self) -> None:
        super().__init__(num_blocks=6)
        self.front, self.back = Front(), Back()

    def denoise(self, noisy, t, text):
        parts = self.front(noisy)
        noise = torch.randn_like(parts["image"])  # depends on the strides of what was received
        h = super().denoise(parts["wide"], t, text)
        return F.layer_norm(self.back(h, parts, noise), (WIDTH,))


class Messages(L.Callback):
    """Notes what the message into each stage holds."""

    def __init__(self) -> None:
        self.specs = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for step in trainer.strategy.pipeline.engine.layout.steps._made.values():
            for stage, message in enumerate(step.messages["activation"]):
                self.specs[stage] = [
                    (str(spec.dtype), spec.requires_grad, spec.stride)
                    for spec in message.layout.specs
                ]


def fit_noting_messages(rank, settings, world_size):
    messages = Messages()
    settings.trainer["callbacks"] = [messages]
    outcome = fit(rank, settings, world_size)
    outcome.messages = messages.specs
    return outcome


def test_many_tensors_of_many_types():
    (outcome, *_), _ = check_parity(
        3, 3, tolerance=1e-6, run=fit_noting_messages, module_class=Mixed, strategy={"num_stages": 3},
        data={"batch_size": 7, "size": 35},
    )  # fmt: skip
    for stage in (1, 2):
        specs = outcome.messages[stage]
        types = {dtype.removeprefix("torch.") for dtype, _, _ in specs}
        assert types == {"float64", "float32", "int64", "bool"}
        assert (60, 1, 15, 3) in [stride for _, _, stride in specs], "channels last"
        floating = [grad for dtype, grad, _ in specs if dtype == "torch.float64"]
        assert True in floating
        assert False in floating


class Packed(TinyDiffusion):
    """Recurrent layers in front, which hand each other sequences of unlike lengths, packed."""

    def __init__(self, **options):
        super().__init__(num_blocks=2, **options)
        self.cells = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.last = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def denoise(self, noisy, t, text):
        lengths = 3 + torch.arange(len(noisy)) % 3
        packed = nn.utils.rnn.pack_padded_sequence(
            noisy, lengths, batch_first=True, enforce_sorted=False
        )
        for cell in self.cells:
            packed, (state, _) = cell(packed)
        packed, _ = self.last(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=5)
        return super().denoise(padded + state[-1][:, None], t, text)


@pytest.mark.parametrize(
    "strategy", [{"num_stages": 2}, {"num_stages": 4, "schedule": "interleaved"}]
)
def test_packed_sequences(strategy):
    """History: their sizes are read past the dispatcher, so that the next stage got none and could not unpack."""
    check_parity(2, module_class=Packed, strategy=strategy)
