"""One entry of the zoo: a class of diffusers, a tiny configuration and the inputs of its forward.

A zoo of ninety models is only readable when an entry is data. So a case names the class, its
constructor arguments and, for every argument of `forward`, how to draw it: `normal(4, 16, 24)` is a
float tensor of that shape per sample, `steps()` a timestep, `tokens(100, 9)` nine ids below 100.
What is drawn this way forms the batch (leading dimension: samples) and can be split into
microbatches; everything else is a constant that is the same for all samples. The classes with an
unusual signature bring a `call`.

The models are built directly, without the hub, with random weights. Parameters that start at zero
(gates, output layers) would hide whole blocks from a comparison of gradients, so `build` perturbs
every one. Dropout is switched off: a split run draws masks from other streams than a plain run.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import lightning as L
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

Batch = dict[str, Tensor]
Draw = Callable[[int, torch.Generator], Tensor]
"""(number of samples, generator) -> tensor whose leading dimension counts samples."""


def normal(*shape: int) -> Draw:
    """Latents, embeddings: standard normal, `shape` per sample."""
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def uniform(*shape: int) -> Draw:
    """Times of flow-matching models, guidance: in [0, 1), `shape` per sample."""
    return lambda n, generator: torch.rand(n, *shape, generator=generator)


def tokens(bound: int, *shape: int) -> Draw:
    """Ids below `bound`, `shape` per sample."""
    return lambda n, generator: torch.randint(bound, (n, *shape), generator=generator)


def steps() -> Draw:
    """One integer timestep below 1000 per sample."""
    return tokens(1000)


def times() -> Draw:
    """Like `steps`, in floating point."""
    return lambda n, generator: 1000 * torch.rand(n, generator=generator)


def filled(value: float, *shape: int) -> Draw:
    """The same number everywhere, e.g. a mask that hides nothing."""
    return lambda n, generator: torch.full((n, *shape), value)


def mask(length: int) -> Draw:
    """A text mask of zeros and ones: sample i sees all but the last i tokens."""
    return lambda n, generator: (
        torch.arange(length) < length - torch.arange(n)[:, None] % 3
    ).long()


def listed(item: Any) -> Callable[[int, torch.Generator], list[Any]]:
    """The same Python object for every sample, e.g. the height and width of its latents."""
    return lambda n, generator: [item] * n


class DenoisingStep(L.LightningModule):
    """A LightningModule around one denoiser: mean squared error of its outputs against noise."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Batch], Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def outputs(self, batch: Batch) -> list[Tensor]:
        """All floating-point tensors that the model returns."""
        leaves = pytree.tree_leaves(self.call(self.model, batch))
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return sum((x - torch.randn_like(x)).square().mean() for x in self.outputs(batch))


@dataclass(frozen=True)
class Case:
    """One tiny denoiser.

    Attributes:
        name: Class name in diffusers; what follows a space tells variants apart.
        config: Keyword arguments of the constructor.
        batch: How to draw each per-sample argument of `forward`.
        constants: Arguments of `forward` that do not depend on the sample.
        call: Runs the model on a batch where keyword arguments are not enough.
        make: Builds the module where the constructor of the class is not enough.
        num_samples: Samples of the batch; 1 where the class cannot take more.
        reason: Why no training step of this class can be run here; None if one can.
        error: With a reason: part of the message of the error that a step raises.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Draw] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    call: Callable[[nn.Module, Batch], Any] | None = None
    make: Callable[[], nn.Module] | None = None
    num_samples: int = 2
    reason: str | None = None
    error: str = ""

    @property
    def class_name(self) -> str:
        return self.name.split()[0]

    def build(self, seed: int = 0) -> tuple[DenoisingStep, Batch]:
        """The module in training mode, all parameters perturbed, and a batch; default dtype."""
        torch.manual_seed(seed)
        make = self.make or (lambda: getattr(diffusers, self.class_name)(**self.config))
        root = DenoisingStep(make().to(torch.get_default_dtype()), self.call or self._call_by_name)
        generator = torch.Generator().manual_seed(seed)
        perturb(root, generator)
        silence(root)
        return root.train(), {
            name: draw(self.num_samples, generator) for name, draw in self.batch.items()
        }

    def _call_by_name(self, model: nn.Module, batch: Batch) -> Any:
        return model(**batch, **self.constants)


def perturb(root: nn.Module, generator: torch.Generator) -> None:
    """Adds noise to every parameter, so that no zero or one of its initialisation remains."""
    with torch.no_grad():
        for parameter in root.parameters():
            fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 36
            scale = 0.3 / math.sqrt(max(fan_in, 1))
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def silence(root: nn.Module) -> None:
    """Sets every dropout probability to zero."""
    for module in root.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):  # class labels dropped for classifier-free guidance
            module.dropout_prob = 0.0


def grid_ids(*sizes: int, num_axes: int | None = None) -> Tensor:
    """Coordinates of every cell of a grid, row-major: (cells, axes); leading axes are zero."""
    cells = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(-1, len(sizes))
    pad = (num_axes or len(sizes)) - len(sizes)
    return torch.nn.functional.pad(cells, (pad, 0)).double()
