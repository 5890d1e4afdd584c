"""Models kept as diffusers keeps them: a folder with one sub-folder per part, and an index.

    folder/model_index.json    {"unet": ["diffusers", "UNet2DConditionModel"], "vae": [...], ...}
    folder/unet/               config.json, diffusion_pytorch_model.safetensors
    folder/vae/ ...

A `PartsModule` is a LightningModule built from such parts. It is read from a folder or hub id, and
written back so that diffusers and transformers load every part with their own `from_pretrained`.
Several modules may write into one folder: each adds its parts to the index. A folder on disk may leave parts to
another one, named in its index relative to itself: `"_other_parts": "../glyphs"`.

A training checkpoint holds weights but no configs. So the configs and vocabularies of all parts,
which are small text files, travel in the checkpoint, and `from_checkpoint` needs nothing else; where adapters are
trained, the folder of the model below them (`part_files`).
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import diffusers
import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_diffpipe.checkpoint_files import mapped
from lightning_diffpipe.checkpoint_shards import consolidated, is_optimizer_state
from lightning_diffpipe.comm.mesh import is_first_process
from lightning_diffpipe.errors import CheckpointError, ConfigurationError, raised_by_all
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.graph.placement import quantizations_noted, quantize_all
from lightning_diffpipe.modules.adapters import (
    Lora,
    adapted_parts,
    copied,
    lora_weights,
    merged,
    refuse_others,
    settings_of,
    write_lora,
)
from lightning_diffpipe.modules.noise import LOSS_BY_TIME
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.part_files import (
    BASE_KEY,
    OTHER_PARTS,
    SINGLE_FILE,
    BaseModel,
    PartOutline,
    fetched,
    folder_of_part,
    from_base,
    from_stored,
    frozen_dtypes,
    frozen_weights,
    index_entry,
    load_for_training,
    outline_of_part,
    read_index,
    text_files,
    write_part,
)
from lightning_diffpipe.quantization import (
    has_quantized,
    keep_outputs_apart,
    quantizations_of,
    quantize_components,
    require_kernels,
)
from lightning_diffpipe.runtime.optimizer_states import switches_weights
from lightning_diffpipe.sampling.adapters import (
    SECOND,
    StoredLora,
    lora_files,
    refuse_adapted,
    weights_of,
)
from lightning_diffpipe.sampling.loop import PipelineCall
from lightning_diffpipe.sampling.source import class_of

_FILES_KEY = "diffpipe_parts"
_INDEX_KEY = "diffpipe_index"


said_of_cut: set[str] = set()
"""Tokenizers of which a warning has said that they cut captions; emptied when a training begins."""
BUILT_IN = ("glyphs", "glyphs_transformer")


def warn_of_cut(tokenizer: Any, texts: Sequence[str], encoded: Any, length: int) -> None:
    """Warns, once, of texts that a tokenizer has cut to a length; reads no tensor."""
    reads = f"the {length} that {type(tokenizer).__name__} reads"
    if reads in said_of_cut:
        return
    if (parts := encoded.encodings) is not None:
        cut = sum(bool(part.overflowing) for part in parts)
    else:
        whole = tokenizer(list(texts), verbose=False)["input_ids"]
        cut = sum(len(ids) > length for ids in whole)
    if cut:
        said_of_cut.add(reads)
        rank_zero_warn(
            f"{cut} of {len(texts)} captions have more tokens than {reads}, and their ends are cut off, as may "
            "those of others. Shorten them, or raise max_sequence_length if the pipeline's call takes it"
        )


def in_float32(part: nn.Module, *dtypes: torch.dtype, only_trained: bool = False) -> None:
    """Makes float32 of the tensors of a part that have one of some types."""
    for module in part.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        for tensor in (x for x in tensors if x is not None and x.dtype in dtypes):
            if tensor.requires_grad or not only_trained:
                tensor.data = tensor.data.float()


def _do_nothing() -> None: ...


class PartsModule(L.LightningModule):
    """A LightningModule made of diffusers and transformers parts.

    Subclasses take the parts as keyword arguments of `__init__` and name those that are there in
    `part_names`. Parts in `frozen_parts` are never trained, whatever toggles `train()`. What is left is
    trained as `optimization` says.
    """

    part_names: ClassVar[tuple[str, ...]] = ()
    frozen_parts: tuple[str, ...] = ()
    edits_images: bool = False
    optimization: Optimization

    def __init__(self) -> None:
        super().__init__()
        # Entries of `model_index.json` that are no parts, such as diffusers' pipeline class.
        self.pipeline_index: dict[str, Any] = {}
        self._lora: Lora | None = None
        self._base: BaseModel | None = None
        self._left_out: dict[str, frozenset[str]] = {}
        # Puts plain weights in the places of those that `setup` has quantized, and back.
        self._swap_quantized: Callable[[], None] = _do_nothing

    @property
    def parts(self) -> dict[str, Any]:
        """The parts this module has, by the name of their sub-folder."""
        named = {name: getattr(self, name, None) for name in self.part_names}
        return {name: part for name, part in named.items() if part is not None}

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, but frozen parts stay in evaluation mode: no dropout in a frozen encoder."""
        super().train(mode)
        for name in self.frozen_parts:
            getattr(self, name).eval()
        return self

    def freeze_parts(self) -> None:
        """Takes the frozen parts out of training; call at the end of `__init__`.

        Trained parts go into training mode: `from_pretrained` of diffusers leaves them in evaluation
        mode, and Lightning keeps whatever mode it finds.
        """
        for name in self.frozen_parts:
            getattr(self, name).requires_grad_(False)
        self.train()

    def train_in_float32(self) -> None:
        """Converts trained weights to float32, in which an optimizer's small steps are not rounded away.

        Raises:
            ConfigurationError: Quantized weights would be among them.
        """
        for part in self.parts.values():
            if isinstance(part, nn.Module) and any(p.requires_grad for p in part.parameters()):
                has_adapters = bool(getattr(part, "peft_config", None))
                if has_quantized(part) and not has_adapters:
                    raise ConfigurationError(
                        f"the {type(part).__name__} is stored quantized, and only adapters can be trained over it: "
                        "set lora, or open a folder with its plain weights"
                    )
                in_float32(part, torch.float16, torch.bfloat16, only_trained=has_adapters)

    @property
    def denoisers(self) -> tuple[Any, ...]:
        """All parts that are denoisers and trained."""
        return (self.denoiser,)

    def add_lora(self, lora: Lora | None, train_text_encoder: bool, loader: type) -> None:
        """Adds adapters to the denoiser, and to text encoders that are trained; none without `lora`.

        Args:
            lora: Their settings, and the file to go on from.
            train_text_encoder: Whether text encoders are trained.
            loader: A pipeline's class, which reads such a file.

        Raises:
            ConfigurationError: The file has adapters of a part that is not trained.
            CheckpointError: The file cannot be read, or is of another model.
        """
        self._lora = lora
        if lora is None:
            return
        adapted = {
            name: part
            for name, part in self.parts.items()
            if any(part is d for d in self.denoisers)
            or (train_text_encoder and name.startswith("text_encoder"))
        }
        if lora.lora_from is not None and not adapted_parts(self.parts):
            config = getattr(getattr(self, "unet", None), "config", None)
            for path, parts in lora_files(Path(lora.lora_from), adapted).items():
                stored = StoredLora(path, 1.0, loader, config, is_second=SECOND in parts)
                if others := sorted(stored.parts() - parts.keys()):
                    raise ConfigurationError(
                        f"lora_from={path} has adapters of {', '.join(others)}, and {', '.join(parts)} is "
                        "trained: add train_text_encoder=true if it is one of this model, or choose another file"
                    )
                for name in sorted(stored.parts()):
                    stored.adapt(name, parts[name])
        for part in adapted.values():
            lora.add_to(part)

    def setup(self, stage: str) -> None:
        """Determines the weights that are as they were read, which checkpoints need not have.

        Processors compute float16, a type of files, many times slower than float32: on those frozen parts get that.
        Quantizations are tried before, as the conversion reads weights.
        """
        if self._trainer is not None:  # not `trainer`, which raises without one
            strategy = self.trainer.strategy
            slow = self.frozen_parts if strategy.root_device.type == "cpu" else ()
            tried = dict[Any, None]()
            for name, part in self.named_children():
                for how, dtype in quantizations_noted(part):
                    is_slow = name in slow and dtype == torch.float16
                    tried[how, torch.float32 if is_slow else dtype] = None
            require_kernels(tried, strategy.root_device)
            for name in slow:
                in_float32(getattr(self, name), torch.float16)
            keep_outputs_apart(self)
            # `DiffPipeStrategy` has each rank quantize what it trains with.
            if stage != "fit" or not hasattr(strategy, "is_resident"):
                self._swap_quantized()
                self._swap_quantized = quantize_all(self, strategy.root_device)
        self._left_out = {}
        # Lightning's averages have all weights, and are loaded as a whole.
        if self._base is not None and not any(
            isinstance(callback, WeightAveraging) for callback in self.trainer.callbacks
        ):
            self._left_out = self._base.left_out(self.parts)

    def teardown(self, stage: str) -> None:
        """Makes weights plain again that `setup` has quantized, so that adapters can be merged into them."""
        self._swap_quantized()
        self._swap_quantized = _do_nothing

    def _absent(self) -> dict[str, frozenset[str]]:
        """Returns, by part, names of weights to leave out; none of a part that has been trained since."""
        return {
            name: names
            for name, names in self._left_out.items()
            if names <= dict(frozen_weights(self.parts.get(name))).keys()
        }

    def without_base(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a state dict that a checkpoint needs; others are in the model below adapters."""
        left = {f"{part}.{name}" for part, names in self._absent().items() for name in names}
        return {name: value for name, value in state.items() if name not in left}

    def leave_to_base(self, checkpoint: dict[str, Any]) -> None:
        """Takes weights out of a checkpoint that are in the model below adapters, and stores where that is.

        `on_save_checkpoint` does so, and `DiffPipeStrategy`, which leaves them out in any case: also for a subclass
        whose `on_save_checkpoint` does not call this one.
        """
        absent = self._absent()
        if self._base is not None and absent:
            samples = {name: self._base.samples[name] for name in absent}
            checkpoint[BASE_KEY] = {"path": self._base.path, "samples": samples}
            checkpoint["state_dict"] = self.without_base(checkpoint["state_dict"])

    def refuse_folder(self, path: str | Path) -> None:
        """Refuses a folder for `save_pretrained`, before training.

        Raises:
            ConfigurationError: Checkpoints leave weights to it.
        """
        if self._base is not None:
            self._base.refuse_folder(path)

    def _note_base(self, path: str | Path, names: Collection[str]) -> None:
        """Records the origin of parts of these names, which checkpoints of adapters name in place of weights.

        All checkpoints leave those there that are stored quantized.
        """
        stores_all = self._lora is None or self._lora.store_all
        left = {n: p for n, p in self.parts.items() if not stores_all or has_quantized(p)}
        if any(name in names for name in left):
            self._base = BaseModel.of(path, {n: p for n, p in left.items() if n in names})

    def on_train_start(self) -> None:
        """Allows warnings that trial runs gave to be given again."""
        said_of_cut.clear()

    def on_train_batch_start(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Replaces averages of optimizers that average weights by the trained weights, until their first step."""
        optimizers = self.trainer.optimizers if self._trainer is not None else ()
        for optimizer in filter(switches_weights, optimizers):
            optimizer.train()

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Returns the loss of one batch; see `losses`.

        Raises:
            ConfigurationError: It has references, and the model edits no images.
        """
        if "references" in batch and not self.edits_images:
            raise ConfigurationError(
                f"{self.pipeline_index.get('_class_name', type(self).__name__)} edits no images, and batches have "
                "references; leave data.references out, or take a pipeline that does"
            )
        return self._logged("train", batch, self.losses(batch))

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Logs the loss with the same noise in every validation, so that losses compare."""
        generator = torch.Generator(self.device).manual_seed(batch_idx)
        self._logged("val", batch, self.losses(batch, generator), sync_dist=True)

    def losses(
        self, batch: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Computes the values to log for a batch, among them `loss`, which is trained; for subclasses.

        Args:
            batch: `image`, `(B, 3, H, W)` in [-1, 1], and further entries that the module learns from.
            generator: Generator of the noise in validation, which drops no captions; None in training.
        """
        raise NotImplementedError

    def _logged(
        self, stage: str, batch: Mapping[str, Any], losses: Mapping[str, Tensor], **options: Any
    ) -> Tensor:
        size = len(batch["video"] if "video" in batch else batch["image"])
        for name, loss in losses.items():
            if not name.startswith(LOSS_BY_TIME):
                is_shown = name == "loss"
                self.log(f"{stage}/{name}", loss, prog_bar=is_shown, batch_size=size, **options)
            elif stage == "train":
                self.log(name, loss, logger=False, reduce_fx="sum")
        return losses["loss"]

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns the optimizer and learning rates of `optimization`."""
        return self.optimization.configure(self)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which all modules are in evaluation mode; afterwards each has its former mode."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def sampling_call(self, prompts: Sequence[str], **settings: Any) -> PipelineCall:
        """Returns the call of `sample`, for samplers that run its loop step by step."""
        parts = {**self.parts, "scheduler": self.scheduler}
        arguments = {"prompts": list(prompts), **settings}
        return PipelineCall(self, "sample", arguments, parts, tuple(parts), self.device)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        frozen_dtype: str | torch.dtype | Mapping[str, Any] | None = None,
        quantization: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Reads every part this module knows from a diffusers folder or hub id.

        Args:
            path: Folder with `model_index.json`, or a hub id.
            frozen_dtype: Type of what is not trained, of all parts or in a mapping of some by their names; None for
                that in which each part is stored, but for an autoencoder that asks for float32
                (`force_upcast`). One that is given float32 computes in it under `bf16-mixed`, too. What
                is trained has float32.
            quantization: Format to which each rank quantizes its frozen linear layers: `"nf4"`, `"int8"`,
                `"float8"`, or more; for all components but autoencoders, or by their names. See
                `quantization_named`.
            kwargs: Further arguments of `__init__`; a part given here replaces the stored one.

        Raises:
            ConfigurationError: There is no such folder, its index asks for a part of an unsupported library, or
                there is no such type or quantization.
        """
        index = read_index(str(path))
        folder = fetched(str(path))
        stored = {
            name: (folder_of_part(folder, index, name), name, index[name])
            for name in cls.part_names
            if name not in kwargs and index.get(name) and index[name][0] is not None
        }
        cls.check_parts({**stored, **kwargs}, f"{path}/model_index.json")
        replacing = {name: kwargs[name] for name in cls.part_names if kwargs.get(name) is not None}
        outlines = {n: PartOutline(type(p), getattr(p, "config", {})) for n, p in replacing.items()}
        cls._check_outlines(outlines | {n: outline_of_part(*each) for n, each in stored.items()})
        dtypes = frozen_dtypes(frozen_dtype, stored)
        quantizations = quantizations_of(quantization, [*stored, *replacing])
        parts = {name: load_for_training(*entry, dtypes[name]) for name, entry in stored.items()}
        module = cls(**parts, **kwargs)
        module.train_in_float32()
        quantize_components(quantizations, module.parts, every=isinstance(quantization, Mapping))
        module.pipeline_index = {  # parts that are not read, such as a safety checker, are absent
            key: [None, None] if isinstance(value, (list, tuple)) else value
            for key, value in index.items()
            if key not in cls.part_names and key != OTHER_PARTS
        }
        module._note_base(path, stored)
        return module

    @classmethod
    def _assembled(
        cls, parts: Mapping[str, Any], index: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> Self:
        """Returns the module of these parts, before its weights are loaded; for subclasses."""
        return cls(**{**parts, **arguments})

    @classmethod
    def check_parts(cls, given: Collection[str], origin: str) -> None:
        """Raises ConfigurationError if a part that every such module needs is not among the names given."""
        required = [
            name
            for name, parameter in inspect.signature(cls.__init__).parameters.items()
            if name in cls.part_names and parameter.default is parameter.empty
        ]
        if missing := [name for name in required if name not in given]:
            raise ConfigurationError(
                f"{origin} has no {missing[0]!r}, which {cls.__name__} needs; "
                f"it needs {', '.join(required)}"
            )

    @classmethod
    def _check_outlines(cls, outlines: Mapping[str, PartOutline]) -> None:
        """Refuses parts before weights, perhaps of many gigabytes, are read; for subclasses."""

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Writes every part into its sub-folder and adds it to `model_index.json`; adapters go into the weights.

        Of several processes the first one writes and the others return at once: call it on all of them,
        or on that one. Every file is whole or not there.

        Args:
            path: Folder to write into; parts of other modules in it are kept.
            dtype: Type of the stored weights; `None` keeps the present one.

        Raises:
            ConfigurationError: Checkpoints of adapters leave weights to that folder.
        """
        self.refuse_folder(path)
        if not is_first_process():
            return
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        index_path = folder / "model_index.json"
        index = json.loads(index_path.read_text()) if index_path.exists() else {}
        # Modules that train one part only write into the folder of a whole model.
        index = {"_class_name": "LatentDiffusion"} | self.pipeline_index | index
        index |= self._replaced(index) | {"_diffusers_version": diffusers.__version__}
        self._swap_quantized()  # into the plain base, also where a run that was interrupted has left it quantized
        try:
            for name, part in self.parts.items():
                part = merged(part)
                index[name] = index_entry(part)
                if isinstance(part, nn.Module) and dtype is not None:
                    # Past diffusers' own `to`, which warns about every change of type.
                    part = nn.Module.to(copied(part), dtype)
                write_part(part, folder / name)
        finally:
            self._swap_quantized()
        write_atomically(index_path, json.dumps(index, indent=2, sort_keys=True) + "\n")

    def save_lora(
        self,
        path: str | Path,
        names: Mapping[str, str] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Writes the adapters of all parts as one file that `pipe.load_lora_weights(path)` of diffusers takes.

        Of several processes the first one writes and the others return at once.

        Args:
            path: Folder to write `pytorch_lora_weights.safetensors` into; that of a second denoiser into the
                folder `transformer_2` in it.
            names: Regular expressions, and their replacements in names of tensors, one after the other: for
                programs that know a model by the names of its first code, which diffusers reads, too.
            state: Weights of the module, as `strategy.lightning_module_state_dict()` returns them in training.

        Raises:
            ConfigurationError: See `lora_weights`.
        """
        if is_first_process():
            for folder, weights in self.lora_weights(names, state, path).items():
                parts = lora_files(Path(path), adapted_parts(self.parts))[folder]
                write_lora(folder, parts, weights)

    def lora_weights(
        self,
        names: Mapping[str, str] | None = None,
        state: Mapping[str, Tensor] | None = None,
        path: str | Path = "",
    ) -> dict[Path, dict[str, Tensor]]:
        """Returns the tensors that `save_lora` writes, by folder, and warns of those that diffusers does not load.

        Before training, it tells whether they can be written.

        Arguments are those of `save_lora`.

        Raises:
            ConfigurationError: No part has adapters, they are more than such a file can hold, or names cannot be
                replaced so.
        """
        files = lora_files(Path(path), adapted_parts(self.parts) or self.parts)
        weights = {folder: lora_weights(parts, names, state) for folder, parts in files.items()}
        # Of a class outside of diffusers the index has a list.
        pipeline = getattr(diffusers, str(self.pipeline_index.get("_class_name")), None)
        loaded = getattr(pipeline, "_lora_loadable_modules", [])
        adapted = adapted_parts(self.parts)
        left_out = [f"{n} ({type(p).__name__})" for n, p in adapted.items() if n not in loaded]
        if pipeline is not None and left_out:
            rank_zero_warn(
                f"{pipeline.__name__} of diffusers loads LoRAs of {', '.join(loaded) or 'no part'} only, "
                f"and leaves out the adapters of {', '.join(left_out)}; save_pretrained(FOLDER), "
                "or save_to=FOLDER in the command, merges them into the weights"
            )
        return weights

    def _replaced(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """Returns entries to replace in the index of another model; for subclasses that are whole models."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the configs and vocabularies of all parts to the checkpoint, and the settings of adapters.

        Weights below adapters that are as they were read from a folder are left out, and the folder is named.
        """
        self.leave_to_base(checkpoint)
        checkpoint[_FILES_KEY] = {
            name: {"class": index_entry(p), "files": text_files(p), "adapters": settings_of(p)}
            for name, p in self.parts.items()
        }
        checkpoint[_INDEX_KEY] = self.pipeline_index

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compares the adapters of the checkpoint with those of the module, and completes its weights.

        Raises:
            CheckpointError: They are on other layers, have another rank or scale, or were trained with another
                model.
        """
        weights = checkpoint.get("state_dict", {})
        with raised_by_all():
            for name, stored in checkpoint.get(_FILES_KEY, {}).items():
                if self.strict_loading and weights and name in self.parts and "adapters" in stored:
                    own = weights_of(name, weights)
                    refuse_others(name, self.parts[name], stored["adapters"], own)
        base = BaseModel.recorded(checkpoint)
        if weights and base.samples:
            checkpoint["state_dict"] = self._completed(weights, base)

    def _completed(self, weights: Mapping[str, Tensor], base: BaseModel) -> dict[str, Tensor]:
        """Returns the weights of a checkpoint, completed by those of its base, with which the parts were opened."""
        completed = dict(weights)
        parts = self.parts
        for name in [name for name in base.samples if name in parts]:
            present, stored = parts[name].state_dict(), weights_of(name, weights)
            whole = base.completed(name, present, stored)
            completed |= {f"{name}.{key}": value for key, value in whole.items()}
        return completed

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, ema: bool = True, base: str | Path | None = None, **kwargs: Any
    ) -> Self:
        """Rebuilds a module from a training checkpoint, and from the model below its adapters if it needs that.

        Args:
            path: A full checkpoint file, written by any strategy.
            ema: Take the averaged weights where the checkpoint holds some.
            base: Folder or hub id of the model below the adapters; None for that which the checkpoint names.
            kwargs: Override the stored arguments of `__init__`; a part given here replaces the stored
                one, and keeps its own weights.

        Returns:
            The module, on the CPU.

        Raises:
            CheckpointError: The file is no checkpoint of such a module, or the model below its adapters is not
                there, or another one.
            ConfigurationError: There is a `base`, and the checkpoint needs none.
        """
        checkpoint = read_checkpoint(path, cls.__name__)
        below = BaseModel.recorded(checkpoint, base)
        parts = {
            name: from_base(below, name, stored) if name in below.samples else from_stored(stored)
            for name, stored in checkpoint[_FILES_KEY].items()
            if name not in kwargs
        }
        index = checkpoint.get(_INDEX_KEY, {})
        module = cls._assembled(parts, index, {**checkpoint.get("hyper_parameters", {}), **kwargs})
        module.pipeline_index = index
        replaced = tuple(f"{name}." for name in cls.part_names if name in kwargs)
        weights = checkpoint_weights(checkpoint, ema)
        for name in parts:
            if not checkpoint[_FILES_KEY][name].get("adapters"):
                refuse_adapted(weights_of(name, weights), str(path))
        to_load = {name: value for name, value in weights.items() if not name.startswith(replaced)}
        below = BaseModel(below.path, {n: s for n, s in below.samples.items() if n in parts})
        to_load = module._completed(to_load, below)
        module.load_state_dict(to_load, strict=not replaced)
        stores_all = module._lora is not None and module._lora.store_all
        left = {n: s for n, s in below.samples.items() if not stores_all or has_quantized(parts[n])}
        module._base = BaseModel(below.path, left) if left else None
        return module


def read_checkpoint(path: str | Path, wanted: str = "PartsModule") -> dict[str, Any]:
    """Maps a training checkpoint of a `PartsModule` into memory; tensors are read when used, those of shards now.

    Args:
        path: A full checkpoint, a file or a folder of shards.
        wanted: Class that will be built from it, for messages.

    Raises:
        CheckpointError: There is no such file, or it is no checkpoint of such a module.
    """
    checkpoint = mapped(path, True, wanted=lambda name: not is_optimizer_state(name))
    checkpoint = consolidated(checkpoint) if isinstance(checkpoint, dict) else {}
    if _FILES_KEY not in checkpoint:
        raise CheckpointError(
            f"{path} holds no configs of its parts ({_FILES_KEY!r}); it was not written by a "
            f"{wanted}. Load its weights with load_from_checkpoint(path, unet=..., ...). {SINGLE_FILE}"
        )
    return checkpoint


def checkpoint_weights(checkpoint: Mapping[str, Any], ema: bool = True) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint by name, averaged ones in the place of others if `ema`.

    Lightning's own weight averaging puts the averages into `state_dict`, and the weights in training elsewhere.
    """
    if not ema:
        return dict(checkpoint.get("current_model_state", checkpoint["state_dict"]))
    weights = dict(checkpoint["state_dict"])
    for key, state in checkpoint.get("callbacks", {}).items():
        if key.startswith("EMA"):
            weights |= state.get("averages", {})
    return weights


def checkpoint_part(checkpoint: Mapping[str, Any], name: str) -> PartOutline:
    """Returns class and config of one part of a checkpoint, such as `"unet"`."""
    stored = checkpoint[_FILES_KEY][name]
    config = json.loads(stored["files"]["config.json"])
    return PartOutline(class_of(*stored["class"]), config)


def checkpoint_part_weights(
    checkpoint: Mapping[str, Any], name: str, ema: bool = True, base: str | Path | None = None
) -> dict[str, Tensor]:
    """Returns the weights of one part of a checkpoint by their names in it, with adapters merged into them.

    Args:
        checkpoint: From `read_checkpoint`.
        name: Such as `"unet"`.
        ema: Take the averaged weights where the checkpoint holds some.
        base: Folder or hub id of the model below the adapters; None for that which the checkpoint names.

    Raises:
        CheckpointError: The checkpoint leaves weights to that model, which is not there or another one.
        ConfigurationError: There is a `base`, and the checkpoint needs none.
    """
    stored = checkpoint[_FILES_KEY][name]
    own = weights_of(name, checkpoint_weights(checkpoint, ema))
    below = BaseModel.recorded(checkpoint, base)
    if name in below.samples:
        part = from_base(below, name, stored)
        own = below.completed(name, part.state_dict(), own)
    elif not stored.get("adapters"):
        return own
    else:
        part = from_stored(stored)
    part.load_state_dict(own)
    return merged(part).state_dict()


def checkpoint_parts(checkpoint: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns names of the parts of a checkpoint."""
    return tuple(checkpoint[_FILES_KEY])


def built_in(name: str) -> Path:
    """Returns the diffusers folder of built-in weights.

    In a checkout it is `examples/<name>`; a wheel carries the same folder inside the package.

    Args:
        name: One of `BUILT_IN`.

    Raises:
        ConfigurationError: There are no such weights.
    """
    if name not in BUILT_IN:
        raise ConfigurationError(f"no built-in weights {name!r}; there are: {', '.join(BUILT_IN)}")
    packaged = Path(__file__).parents[1] / "weights" / name
    checkout = Path(__file__).parents[2] / "examples" / name
    return packaged if packaged.is_dir() else checkout
