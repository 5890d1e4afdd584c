"""`Predictor`: prompts in, images out, on all ranks together.

    predictor = Predictor.from_pretrained("path/to/PixArt", method="pipefusion", num_patches=4)
    images = predictor(["a lighthouse in fog"], num_inference_steps=20, seed=0)   # PIL on rank 0, else None

The journey of a request:

    rank 0     prompts -> text encoders -> start noise -> Call          sampling/dry_run.py, record.py
    all ranks  Call, broadcast -> this rank's share of samples, branch  sampling/call.py, world.py
    all ranks  denoising steps, this rank's layers or rows of them      sampling/pipefusion/, distrifusion/
    all ranks  latents -> tiles or images, decoded -> rank 0          sampling/decoding.py
    rank 0     images, report                                         sampling/report.py

Text encoders live on rank 0 only, and so does the autoencoder unless all decode. Under PipeFusion a rank reads only
the weights of its own layers; under the other methods each has the whole denoiser.

Sources:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430
    DistriFusion, Li et al. (CVPR 2024), https://arxiv.org/abs/2402.19481
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from lightning_diffpipe.comm.waiting import ask_for_queues
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    GraphError,
    SamplingError,
    raised_by_all,
    require_timeout,
)
from lightning_diffpipe.graph.placement import held_bytes
from lightning_diffpipe.host_memory import keep_freed_memory
from lightning_diffpipe.model_sources import (
    open_source,
    refuse_ignored_size,
    refuse_method,
    refuse_module,
    source_of_module,
)
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.decoding import Decoding
from lightning_diffpipe.sampling.digests import as_texts, refuse_other, refuse_other_models
from lightning_diffpipe.sampling.dry_run import observe_samples
from lightning_diffpipe.sampling.methods import (
    Chooser,
    MethodOptions,
    Worker,
    fitted,
    free_memory,
    merge,
    prepare_denoiser,
)
from lightning_diffpipe.sampling.rehearsal import forget_variables, release_memory
from lightning_diffpipe.sampling.report import SamplingReport
from lightning_diffpipe.sampling.skeleton import dtype_named
from lightning_diffpipe.sampling.source import Settings, Source
from lightning_diffpipe.sampling.world import World, join_world
from lightning_diffpipe.training.processes import take_place_in_slurm

OnStep = Callable[[int, int], None]
_OPTIONAL_PART = re.compile(
    r"(text_encoder|tokenizer|image_encoder|feature_extractor|safety_checker)(_\d+)?"
)
_SHARED_OPTIONS = {f.name for f in fields(MethodOptions)} - {"method", "further", "mesh", "reason"}


class Predictor:
    """Samples a diffusion model with all ranks. Make it with `from_pretrained` or `from_module`.

    Collective: every rank makes it and calls it at the same time, with the same arguments.

    Args:
        source: The model.
        options: Method, mesh and further settings of sampling.
        world: All ranks, from `join_world`.
        device: Device of this rank.
        timeout_s: Longest wait for a message, in seconds.

    Example:
        >>> predictor = Predictor.from_pretrained("examples/glyphs", method="single")  # doctest: +SKIP
        >>> predictor(["digit four, serif"], num_inference_steps=10, seed=3)[0].size  # doctest: +SKIP
        (64, 64)
    """

    def __init__(
        self,
        source: Source,
        options: MethodOptions,
        world: World,
        device: torch.device,
        timeout_s: float = 120.0,
    ) -> None:
        if device.type == "cpu":
            keep_freed_memory()
        self.source, self.options, self.device = source, options, device
        self.timeout_s = timeout_s
        self.report: SamplingReport | None = None
        """Of the last request; on rank 0."""
        self._world = world
        self._worker: Worker | None = None
        self._chooser: Chooser | None = None
        self._on_step: OnStep | None = None
        self._functions: dict[str, Any] = {}  # among the pipeline's arguments; they do not travel
        self._compared: set[str] = set()  # parts, the denoiser aside, that were equal on all ranks
        self._decoders: dict[str, dict[str, Any]] = {}  # known properties of decoders, by name
        self._is_closed = False
        self._broken_by: str | None = None  # the error in the middle of an earlier request

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        method: str = "pipefusion",
        num_patches: int | None = None,
        warmup_steps: int | Literal["auto"] | None = 1,
        *,
        device: torch.device | str | None = None,
        dtype: str | torch.dtype | None = None,
        variant: str | None = None,
        timeout_s: float = 120.0,
        busy_timeout_s: float | None = None,
        ema: bool = True,
        alone: bool = False,
        loras: Mapping[str | Path, float] | None = None,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        pipeline_class: str | type | None = None,
        ip_adapters: Mapping[str | Path, Any] | None = None,
        base: str | Path | None = None,
        quantization: Any = None,
        **further: Any,
    ) -> Self:
        """Opens a model for sampling by all ranks.

        Args:
            path: A diffusers folder, a hub id that is on this machine, or a training checkpoint (`.ckpt`).
            method: `"pipefusion"`, `"distrifusion"`, `"sequence"`, `"single"`, `"auto"`; see docs/sampling.md.
            num_patches: Patches of PipeFusion, refused with other methods; None takes as many as stages.
            warmup_steps: Sampler warm-up: synchronous steps at the start, `"auto"` until latents hardly change, or
                None for what suits the method, which for DistriFusion is better than the default.
            device: Device to compute on; None takes this rank's GPU, or the CPU.
            dtype: Type of all weights; None for that in which the denoiser is stored.
            variant: Variant of the files of a diffusers folder, such as `"fp16"` for `*.fp16.safetensors`.
            timeout_s: Longest wait for a message, or for the next denoising step of a rank, in seconds.
            busy_timeout_s: Longest time, in seconds, in which a rank that reads, probes or encodes may give no sign
                of progress while another waits; None leaves half an hour, or what a Predictor or a strategy has set
                in this process.
            ema: Take the averaged weights of a checkpoint that has some.
            alone: Whether to sample in this process only, whatever process groups there are.
            loras: Scale of each LoRA file, or folder of one, such as `{"style": 0.8}`; added as weights are read.
            vae_tiling: Decode tile by tile, in less memory; images differ a little.
            vae_slicing: Decode image by image.
            pipeline_class: Name of a class of diffusers, such as `"StableDiffusionImg2ImgPipeline"`, or a class of
                your own, in place of the folder's.
            ip_adapters: Scale of each IP-Adapter's file, or another value for `set_ip_adapter_scale`. The image
                encoder is the pipeline's, the folder `image_encoder` next to a file, or given as `image_encoder=`.
            base: Folder or hub id of the model below the adapters of a checkpoint; None for that which it names.
            quantization: Format to which each rank quantizes linear layers of a diffusers folder: `"nf4"`,
                `"int8"`, `"float8"`, or more; of all components but autoencoders, or by their names, such as
                `{"transformer": "nf4"}`. See `quantization_named`.
            further: The mesh, `compile`, `attention`, `cache`, `decoding` and options of the method, see
                `MethodOptions`; or a part of a pipeline, alike on all ranks, such as `scheduler=`, or None to leave
                one out: `text_encoder_3=None`.

        Raises:
            ConfigurationError: The model, the method or the mesh cannot work; on all ranks.
            CheckpointError: Weights are missing; on all ranks.
        """
        # None leaves out a part of a pipeline; others are saved in folders.
        is_part = lambda n, v: (
            _OPTIONAL_PART.fullmatch(n) if v is None else hasattr(v, "save_pretrained")
        )
        parts = {n: v for n, v in further.items() if is_part(n, v)}
        settings = {n: v for n, v in further.items() if n not in parts}
        settings |= {"num_patches": num_patches, "warmup_steps": warmup_steps}
        options = _options_of(method, settings)
        _limit_waits(timeout_s, busy_timeout_s)
        with raised_by_all():
            dtype = dtype_named("dtype", dtype)
        if not alone:
            take_place_in_slurm()
        where = _device(device)
        world = World.alone(where) if alone else join_world(where, timeout_s)
        vae = [name for name, is_on in (("tiling", vae_tiling), ("slicing", vae_slicing)) if is_on]
        loading = {"dtype": dtype, "ema": ema, "variant": variant, "parts": parts, "vae": vae}
        loading |= {"pipeline_class": pipeline_class, "ip_adapters": ip_adapters, "base": base}
        loading |= {"quantization": quantization}
        read = partial(open_source, path, world.rank == 0, where, loras=loras, **loading)
        source = _opened(read, options, world, loading)
        return cls(source, options, world, where, timeout_s)

    @classmethod
    def from_module(
        cls,
        module: Any,
        method: str = "pipefusion",
        *,
        timeout_s: float = 120.0,
        busy_timeout_s: float | None = None,
        **options: Any,
    ) -> Self:
        """Samples a `LatentDiffusion` or `CascadedDiffusion` that is in memory, whole, on every rank.

        Args:
            module: The module; not changed.
            method: As in `from_pretrained`.
            timeout_s: Longest wait for a message, in seconds.
            busy_timeout_s: As in `from_pretrained`.
            options: As in `from_pretrained`: `num_patches`, `warmup_steps`, the mesh and options of the method.
                Device, dtype and weights are those of the module.

        Raises:
            ConfigurationError: The module is of another kind, or divided into the stages of a training; or the
                method, its options or the mesh cannot work; on all ranks.
        """
        choice = _options_of(method, options)
        _limit_waits(timeout_s, busy_timeout_s)
        refuse_module(module)
        for name in ("compile", "attention"):
            if value := getattr(choice, name):
                raise ConfigurationError(
                    f"{name}={value} would change the module; open a saved one"
                )
        world = join_world(module.device, timeout_s)
        source = _opened(partial(source_of_module, module), choice, world)
        return cls(source, choice, world, module.device, timeout_s)

    def __call__(
        self,
        prompts: Sequence[Any],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int = 0,
        height: int | None = None,
        width: int | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> list[Any] | None:
        """Samples images.

        Args:
            prompts: One image each; class numbers for class-conditional models.
            num_inference_steps: Denoising steps; None takes the pipeline's default.
            guidance_scale: Strength of guidance; None takes the pipeline's default.
            seed: Of the start noise: as `generator=torch.Generator().manual_seed(seed)` in diffusers.
            height: In pixels; None takes the pipeline's default.
            width: In pixels.
            on_step: Called with (steps done, steps) after each denoising step of this rank. What it raises ends the
                request, on all ranks; ranks connect again for the next one.
            options: Further arguments of the pipeline's `__call__`, such as `negative_prompt`.

        Returns:
            Images on rank 0, a list of frames for each video, several of one prompt (`num_images_per_prompt`) in
            a row; None elsewhere.

        Raises:
            ConfigurationError: An argument cannot work; on all ranks.
            SamplingError: The final latents are not finite; on all ranks.
            PipelineTimeoutError: A rank stopped, or did not answer in time; on all other ranks.
            DiffPipeError: The predictor is closed. Over NCCL, an earlier request ended in the middle.
        """
        if self._is_closed:
            raise DiffPipeError("this predictor is closed; make another one")
        self._reconnect()
        compare, guard = self._compare_part, self._ending_together
        self._decoding = Decoding(
            self._world, self.source.part, compare, guard, self.device, self._decoders
        )

        def check() -> Settings:
            if on_step is not None and not callable(on_step):
                raise ConfigurationError(
                    f"on_step must be a function of two numbers; got {on_step!r}"
                )
            sizes = height, width
            return Settings(prompts, num_inference_steps, guidance_scale, seed, *sizes, options)

        self._on_step = on_step
        self._functions = {name: value for name, value in options.items() if callable(value)}
        started_s = time.perf_counter()
        images = self._lead(check) if self._world.rank == 0 else self._follow(check)
        watcher.publish(phase="between two requests", step=0)
        if self.report is not None:
            self.report = replace(self.report, total_s=time.perf_counter() - started_s)
        return images

    def close(self) -> None:
        """Ends the process groups of this predictor, which samples no more; collective."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._worker is not None:
            self._worker.mesh_links.disconnect()
            self._worker = None
        links = self._world.links
        links.disconnect() if self._broken_by is None else links.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:  # else the other ranks may not be there any more
            self.close()

    # ------------------------------------------------------------------------------ one request

    def _lead(self, check: Callable[[], Settings]) -> list[Any]:
        """Runs a request on rank 0: sends the others the call, or the error that ends it before there is one."""
        broadcast, has_begun = self._world.links.broadcast_object, False
        watcher.publish(phase="encoding prompts", step=-1)  # others may wait for it there

        def sample(call: Call) -> Tensor:
            nonlocal has_begun
            has_begun = True
            num_ranks = self._world.num_ranks
            if num_ranks > 1:
                # To divide samples or branches of guidance, as with "auto" they may, they have to know rows.
                mesh = fitted(self.options, num_ranks).mesh
                if mesh is None or max(mesh.data, mesh.guidance) > 1:
                    call = observe_samples(call)
                if self.options.decoding == "auto":
                    self._decoding.divide_in(call.pipeline)
            latents = self._sample(broadcast(lambda: (settings.as_texts(), call.packed()))[1])
            self._decoding.others_wait = num_ranks > 1
            return latents

        try:
            settings = check()
            refuse_ignored_size(self.source, settings)
            images: list[Any] = self.source.images(settings, sample)
            if self.report is not None and (done := self._decoding.num_calls):
                sent = self.report.bytes_sent | {"images": self._decoding.num_bytes}
                decoder_bytes = self._decoding.weight_bytes
                self.report = replace(
                    self.report, bytes_sent=sent, decoder_calls=done, decoder_bytes=decoder_bytes
                )
            return images
        except Exception as error:
            if not has_begun:
                reason = error
                if not isinstance(error, DiffPipeError):
                    reason = DiffPipeError(f"rank 0 failed before sampling: {error!r}")

                def fail() -> Any:
                    raise reason

                with contextlib.suppress(Exception):
                    broadcast(fail)
            raise
        finally:
            self._decoding.end()

    def _follow(self, check: Callable[[], Settings]) -> None:
        watcher.publish(phase="waiting for the request", step=0)
        with raised_by_all():
            texts, packed = self._world.links.broadcast_object(lambda: None)  # rank 0 has them

        def compare() -> None:
            refuse_other(self._world.rank, check().as_texts(), texts)

        self._sample(packed, compare)
        self._decoding.follow()

    def _sample(self, packed: Call, compare: Callable[[], None] = lambda: None) -> Tensor:
        with self._ending_together():
            self._world.agree("comparing requests", compare)
            # Parts that every rank reads whole, such as a second denoiser.
            for name in packed.pipeline.needed if self._world.num_ranks > 1 else ():
                self._compare_part(name)
            worker, latents = self._sampled(packed)
            # Before decoding, so that no rank waits for rank 0 if that fails.
            reports = self._world.links.gather_object(worker.report())
        watcher.publish(phase="decoding latents", step=-1 if self._world.rank == 0 else 0)
        num_steps, denoiser = len(packed.timesteps), self.source.denoiser
        if self._world.rank == 0:
            whole_bytes = sum(map(held_bytes, denoiser.parameters()))
            self.report = merge(worker.options, num_steps, whole_bytes, reports)
        if ranks := [str(rank) for rank, each in enumerate(reports) if not each.is_finite]:
            dtype = str(denoiser.dtype)[6:]
            advice = "lower guidance_scale, or check the weights and the pipeline's arguments"
            if dtype == "float16":
                advice = "the model may overflow: choose dtype=bfloat16 or float32"
            with raised_by_all():
                # Images would be black.
                raise SamplingError(
                    f"final latents are not finite (ranks {', '.join(ranks)}; {num_steps} steps in "
                    f"{dtype}): {advice}"
                )
        return latents

    def _compare_part(self, name: str) -> None:
        """Raises ConfigurationError, on all ranks, if a part that all read whole differs on one of them."""
        if name not in self._compared:
            texts = self._world.agree("comparing weights", lambda: self.source.texts(name))
            refuse_other_models(self._world, texts, self.source.origin)
            self._compared.add(name)

    def _sampled(self, packed: Call) -> tuple[Worker, Tensor]:
        """Returns final latents, by the requested method, or the first choice of `"auto"` that is not refused."""

        def on_step(index: int) -> None:
            watcher.step()
            if self._on_step is not None:
                self._on_step(index + 1, len(packed.timesteps))

        while True:
            worker = self._worker_for(packed)
            # With generators as they were, whatever was tried before.
            call = packed.unpacked(self.device)
            try:
                # What NCCL has posted cannot be taken back, so that peers wait for as long as they may.
                give_up = (
                    worker.mesh_links.abandon if self._world.backend == "gloo" else lambda: None
                )
                # All have loaded before the first message, whose receiver waits for `timeout_s` only.
                load = partial(self._load, worker, call)
                prepared = self._world.agree("reading weights and probing", load, give_up)
                # Ranks without a prompt of their own learn here that the others refuse the request.
                sample = partial(worker.sample, call, on_step, prepared)
                mine = self._world.agree("sampling", sample, give_up)
                latents = worker.gather(call, mine)
                if self._world.rank > 0:
                    call.close()
                return worker, latents
            except (ConfigurationError, GraphError) as error:
                call.close()
                if error.leaves_messages:
                    raise
                shares = self._world.num_ranks > 1 and self._world.backend == "gloo"
                if shares or self._chooser is not None:
                    worker.mesh_links.abandon()  # ranks may have sent what others have not received
                    self._worker = None
                if self._chooser is None:
                    raise
                forget_variables(error)
                release_memory()
                self._chooser.refuse(worker.options, error)
            except BaseException:
                call.close()
                raise

    def _load(self, worker: Worker, call: Call) -> dict[str, Any]:
        """Reads what this rank needs: parts that the loop calls whole, and its share of the denoiser."""
        if self._world.rank > 0:
            parts = {name: self.source.part(name) for name in call.pipeline.needed}
            parts[self.source.name] = self.source.denoiser
            call.pipeline = call.pipeline.here(parts, self.device, self._functions)
        return worker.load(call)

    @contextlib.contextmanager
    def _ending_together(self) -> Iterator[None]:
        """Ends a request on all ranks with an error that is raised inside."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, ConfigurationError | GraphError):
                error.is_of_all_ranks = True
                if not error.leaves_messages:
                    raise  # they go on together
            if self._world.num_ranks == 1:
                raise
            # Ranks are at different points of the request, whose messages end here.
            if not getattr(error, "is_of_all_ranks", False):
                watcher.fail(error)  # so that others do not count it as lost first
            self._broken_by, worker, self._worker = repr(error), self._worker, None
            if self._world.backend == "gloo":
                forget_variables(error)
                if worker is not None:
                    worker.mesh_links.abandon()
            raise

    def _reconnect(self) -> None:
        """Joins all ranks again after an error in the middle of a request; collective."""
        if self._broken_by is None:
            return
        if self._world.backend != "gloo":
            raise DiffPipeError(
                f"an earlier request ended in the middle: {self._broken_by}; over NCCL its messages cannot be "
                "taken back, so that this predictor samples no more: start its processes again"
            )
        self._world.links.abandon()
        self._world = join_world(self.device, self.timeout_s)
        self._broken_by = None

    def _worker_for(self, packed: Call) -> Worker:
        """Chooses the method and divides the ranks at the first request; later ones keep them."""
        if self._worker is None:
            if self.options.method == "auto" and self._chooser is None:
                link = self._world.measured_link()
                left = self._world.links.gather_object(free_memory(self.device))
                least = min((each for each in left if each is not None), default=None)
                model, num_ranks = self.source.denoiser, self._world.num_ranks
                self._chooser = Chooser(model, link, self.device, num_ranks, least, self.options)
            watcher.publish(phase="choosing a method", step=0)

            def decide() -> MethodOptions:
                if self._chooser is not None:
                    return self._chooser.choose(packed)
                return fitted(self.options, self._world.num_ranks)

            chosen = self._world.links.broadcast_object(decide)
            self._worker = Worker(self.source, chosen, self._world, self.device, self.timeout_s)
        return self._worker


@raised_by_all()
def _options_of(method: str, given: Mapping[str, Any]) -> MethodOptions:
    """Separates options that all methods have from those of this one; refuses other settings that cannot be."""
    shared = {name: value for name, value in given.items() if name in _SHARED_OPTIONS}
    further = {name: value for name, value in given.items() if name not in shared}
    return MethodOptions(method, **shared, further=further)


@raised_by_all()
def _limit_waits(timeout_s: float, busy_timeout_s: float | None) -> None:
    require_timeout(timeout_s)
    if busy_timeout_s is not None:
        require_timeout(busy_timeout_s, "busy_timeout_s")
        watcher.busy_timeout_s = float(busy_timeout_s)


def _opened(
    read: Callable[[], Source],
    options: MethodOptions,
    world: World,
    loading: Mapping[str, Any] | None = None,
) -> Source:
    """Opens a model on all ranks, which must have equal arguments, and weights unless it is in memory."""

    def open_it() -> Source:
        fitted(options, world.num_ranks)
        source = read()
        refuse_method(source, options.method)
        prepare_denoiser(source.denoiser, options)
        return source

    source = world.agree("opening the model", open_it)
    if world.num_ranks > 1 and loading is not None:
        arguments = {f.name: getattr(options, f.name) for f in fields(options)} | dict(loading)
        arguments["parts"] = list(loading["parts"])
        if (cache := options.cache) is not None:  # which does not print all of its fields
            arguments["cache"] = [type(cache).__name__, vars(cache)]
        # Paths may differ between hosts; the contents of the files are among the weights.
        arguments["ip_adapters"] = list((loading["ip_adapters"] or {}).values())
        arguments.pop("base")
        texts = world.agree("comparing weights", lambda: source.texts(source.name))
        refuse_other_models(world, as_texts(arguments) | texts, source.origin)
    return source


def _device(device: torch.device | str | None) -> torch.device:
    """Returns the device to compute on; among several processes this one's GPU, which becomes the current one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device={device!r}; choose cpu or cuda") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device={device!r}, but torch finds no GPU; take device='cpu'")
    if where.type != "cuda":
        return where
    among_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if among_several:
        ask_for_queues()
    is_named = where.index is not None
    if not is_named:
        gpu_index = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        gpu_index %= torch.cuda.device_count()
        where = torch.device("cuda", torch.cuda.current_device() or gpu_index)
    if among_several or not is_named:  # exchanges over NCCL need it
        torch.cuda.set_device(where)
    return where
