"""ControlNets, alone (the loss reads every residual) and training through a locked denoiser."""

from collections.abc import Callable

import diffusers
import torch
from diffusers.models.controlnets.multicontrolnet_union import MultiControlNetUnionModel
from torch import nn

from . import transformers_image as image
from . import transformers_image_packed as packed
from .case import Batch, Case, filled, listed, mask, normal, steps, tokens, uniform
from .unets import IMAGE, SD, TEXT, VIDEO, WIDTHS, blocks


def config_of(cases: list[Case], name: str) -> dict:
    """The configuration of a case of another family."""
    return next(dict(case.config) for case in cases if case.name == name)


class Controlled(nn.Module):
    """A ControlNet being trained, and the locked denoiser that reads its residuals."""

    def __init__(self, control: nn.Module, denoiser: nn.Module) -> None:
        super().__init__()
        self.control = control
        self.denoiser = denoiser.requires_grad_(False)


def several(name: str, config: dict) -> Callable[[], nn.Module]:
    """Makes two ControlNets of one configuration inside the multi-ControlNet class `name`."""
    single = getattr(diffusers, name.replace("Multi", ""))
    many = getattr(diffusers, name, MultiControlNetUnionModel)  # the one that is not exported
    return lambda: many([single(**config), single(**config)])


DOWN = {k: v for k, v in SD.items() if k not in ("up_block_types", "out_channels", "sample_size")}
CONTROL = DOWN | dict(conditioning_embedding_out_channels=(8, 16))
HINT = {"controlnet_cond": normal(3, 32, 48)}

UNION = (
    CONTROL
    | dict(num_control_type=3, num_trans_channel=8, num_trans_head=2, num_trans_layer=2)
    | dict(num_proj_channel=8, addition_time_embed_dim=4, projection_class_embeddings_input_dim=12)
)

FLUX = config_of(packed.CASES, "FluxTransformer2DModel")
FLUX_INPUTS = packed.LATENTS_AND_TEXT | {
    "pooled_projections": normal(10),
    "timestep": uniform(),
    "guidance": uniform(),
}
SD3 = config_of(image.CASES, "SD3Transformer2DModel")
SD3_INPUTS = {
    "hidden_states": normal(4, 16, 24),
    "encoder_hidden_states": normal(7, 12),
    "pooled_projections": normal(10),
    "timestep": steps(),
}
SD3_HINTED = SD3_INPUTS | dict(controlnet_cond=normal(4, 16, 24))
QWEN = config_of(packed.CASES, "QwenImageTransformer2DModel")
QWEN_INPUTS = {
    "hidden_states": normal(24, 16),
    "encoder_hidden_states": normal(7, 12),
    "encoder_hidden_states_mask": mask(7),
    "timestep": uniform(),
    "img_shapes": listed([(1, 4, 6)]),
}
HUNYUAN = config_of(image.CASES, "HunyuanDiT2DModel")
HUNYUAN_CONTROL = {k: v for k, v in HUNYUAN.items() if k != "num_layers"} | dict(
    transformer_num_layers=8, conditioning_channels=4
)
HUNYUAN_CASE = next(case for case in image.CASES if case.name == "HunyuanDiT2DModel")
HUNYUAN_HINTED = HUNYUAN_CASE.batch | dict(controlnet_cond=normal(4, 16, 16))
SANA = config_of(image.CASES, "SanaTransformer2DModel")
SANA_HINTED = dict(
    hidden_states=normal(4, 8, 12), encoder_hidden_states=normal(7, 8), timestep=steps(),
    controlnet_cond=normal(4, 8, 12),
)  # fmt: skip
Z_IMAGE = config_of(packed.CASES, "ZImageTransformer2DModel")


def unet_with_control(model: Controlled, batch: Batch):
    text, hint = batch["encoder_hidden_states"], batch["controlnet_cond"]
    down, middle = model.control(batch["sample"], batch["timestep"], text, hint, return_dict=False)
    return model.denoiser(
        batch["sample"],
        batch["timestep"],
        text,
        down_block_additional_residuals=down,
        mid_block_additional_residual=middle,
    )


def flux_with_control(model: Controlled, batch: Batch):
    inputs = {k: v for k, v in batch.items() if k != "controlnet_cond"} | packed.IDS
    double, single = model.control(
        **inputs, controlnet_cond=batch["controlnet_cond"], return_dict=False
    )
    return model.denoiser(
        **inputs, controlnet_block_samples=double, controlnet_single_block_samples=single
    )


def sd3_with_control(model: Controlled, batch: Batch):
    inputs = {k: v for k, v in batch.items() if k != "controlnet_cond"}
    (residuals,) = model.control(
        **inputs, controlnet_cond=batch["controlnet_cond"], return_dict=False
    )
    return model.denoiser(**inputs, block_controlnet_hidden_states=residuals)


def residuals_with_control(model: Controlled, batch: Batch, constants: dict | None = None):
    inputs = {k: v for k, v in batch.items() if k != "controlnet_cond"} | (constants or {})
    residuals = model.control(**inputs, controlnet_cond=batch["controlnet_cond"])
    return model.denoiser(**inputs, controlnet_block_samples=residuals.controlnet_block_samples)


def several_controls(
    name: str,
    config: dict,
    batch: dict,
    constants: dict | None = None,
    doubled: tuple[str, ...] = (),
) -> Case:
    """Two ControlNets, to each of which goes the same hint."""

    def call(model: nn.Module, batch: Batch):
        twice = {key: [batch[key]] * 2 for key in ("controlnet_cond", *doubled)}
        return model(
            **batch | twice, **constants or {}, conditioning_scale=[0.5, 1.0], return_dict=False
        )

    return Case(name, batch=batch, make=several(name, config), call=call)


def locked(
    name: str, config: dict, denoiser: str, frozen_config: dict, batch: dict, call: Callable
) -> Case:
    """A ControlNet that trains through a locked transformer."""
    make = lambda: Controlled(
        getattr(diffusers, name)(**config), getattr(diffusers, denoiser)(**frozen_config)
    )
    return Case(f"{name} with locked transformer", batch=batch, make=make, call=call)


def z_image_pair() -> Controlled:
    denoiser = diffusers.ZImageTransformer2DModel(**Z_IMAGE)
    control = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 2], control_refiner_layers_places=[0, 1], control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner", dim=24, n_heads=2, n_kv_heads=2,
    )  # fmt: skip
    control = diffusers.ZImageControlNetModel.from_transformer(control, denoiser)
    control.gradient_checkpointing = False  # its forward reads this, its constructor forgets it
    return Controlled(control, denoiser)


def z_image_with_control(model: Controlled, batch: Batch):
    latents, text = list(batch["x"]), list(batch["cap_feats"])
    residuals = model.control(latents, batch["t"], text, list(batch["hint"]))
    output = model.denoiser(latents, batch["t"], text, controlnet_block_samples=residuals)
    return torch.stack(output.sample)


CASES = [
    Case("ControlNetModel", CONTROL, IMAGE | TEXT | HINT),
    Case(
        "ControlNetModel with locked U-Net",
        batch=IMAGE | TEXT | HINT,
        make=lambda: Controlled(
            diffusers.ControlNetModel(**CONTROL), diffusers.UNet2DConditionModel(**SD)
        ),
        call=unet_with_control,
    ),
    several_controls("MultiControlNetModel", CONTROL, IMAGE | TEXT | HINT),
    Case(
        "ControlNetUnionModel",
        UNION,
        IMAGE | TEXT | HINT | dict(control_type=filled(1.0, 3)),
        call=lambda model, batch: model(
            **(batch | {"controlnet_cond": [batch["controlnet_cond"]] * 2}),
            control_type_idx=[0, 2],
            conditioning_scale=[0.5, 1.0],
        ),
    ),
    Case(
        "MultiControlNetUnionModel",
        batch=IMAGE | TEXT | HINT | dict(control_type=filled(1.0, 3)),
        make=several("MultiControlNetUnionModel", UNION),
        call=lambda model, batch: model(
            **(
                batch
                | {"controlnet_cond": [[batch["controlnet_cond"]]] * 2}
                | {"control_type": [batch["control_type"]] * 2}
            ),
            control_type_idx=[[0], [2]],
            conditioning_scale=[[0.5], [1.0]],
            return_dict=False,
        ),
    ),
    Case(
        "UNetControlNetXSModel",
        dict(sample_size=16, cross_attention_dim=12, num_attention_heads=2, **WIDTHS)
        | blocks("2D")
        | dict(ctrl_conditioning_embedding_out_channels=(8, 16), ctrl_num_attention_heads=2)
        | dict(ctrl_block_out_channels=(4, 8, 8), ctrl_max_norm_num_groups=4)
        | dict(ctrl_learn_time_embedding=True, time_embedding_mix=0.5),
        IMAGE | TEXT | HINT,
    ),
    Case(
        "ControlNetXSAdapter",
        dict(block_out_channels=(4, 8, 8), base_block_out_channels=(8, 16, 16))
        | dict(cross_attention_dim=12, num_attention_heads=2, max_norm_num_groups=4)
        | dict(down_block_types=blocks("2D")["down_block_types"]),
        call=lambda model, batch: model(),
        reason="holds weights for UNetControlNetXSModel; has no forward of its own",
        error="cannot be run by itself",
    ),
    Case(
        "SparseControlNetModel",
        CONTROL
        | dict(down_block_types=blocks("Motion")["down_block_types"])
        | dict(use_simplified_condition_embedding=False, motion_num_attention_heads=2),
        VIDEO
        | TEXT
        | dict(controlnet_cond=normal(4, 3, 16, 32), conditioning_mask=filled(1.0, 1, 3, 16, 32)),
        call=lambda model, batch: model(
            **(
                batch
                | {"encoder_hidden_states": batch["encoder_hidden_states"].repeat_interleave(3, 0)}
            )
        ),
    ),
    Case(
        "FluxControlNetModel", {**FLUX, "num_single_layers": 2}, FLUX_INPUTS | dict(controlnet_cond=normal(24, 4)),
        packed.IDS,
    ),
    locked(
        "FluxControlNetModel", FLUX | dict(num_layers=2, num_single_layers=2), "FluxTransformer2DModel", FLUX,
        FLUX_INPUTS | dict(controlnet_cond=normal(24, 4)), flux_with_control,
    ),
    several_controls(
        "FluxMultiControlNetModel", FLUX | dict(num_single_layers=2, num_mode=2),
        FLUX_INPUTS | dict(controlnet_cond=normal(24, 4), controlnet_mode=tokens(2)), packed.IDS,
        doubled=("controlnet_mode",),
    ),
    Case("SD3ControlNetModel", SD3, SD3_HINTED),
    locked(
        "SD3ControlNetModel", SD3 | dict(num_layers=2), "SD3Transformer2DModel", SD3, SD3_HINTED,
        sd3_with_control,
    ),
    several_controls("SD3MultiControlNetModel", SD3, SD3_HINTED),
    Case("QwenImageControlNetModel", QWEN, QWEN_INPUTS | dict(controlnet_cond=normal(24, 16))),
    locked(
        "QwenImageControlNetModel", QWEN | dict(num_layers=2), "QwenImageTransformer2DModel", QWEN,
        QWEN_INPUTS | dict(controlnet_cond=normal(24, 16)), residuals_with_control,
    ),
    Case(
        "QwenImageMultiControlNetModel",
        batch=QWEN_INPUTS | dict(controlnet_cond=normal(24, 16)),
        make=lambda: diffusers.QwenImageMultiControlNetModel(
            [diffusers.QwenImageControlNetModel(**QWEN)]
        ),
        call=lambda model, batch: model(
            **(batch | {"controlnet_cond": [batch["controlnet_cond"]] * 2}),
            conditioning_scale=[0.5, 1.0],
            return_dict=False,
        ),
    ),
    Case("HunyuanDiT2DControlNetModel", HUNYUAN_CONTROL, HUNYUAN_HINTED, HUNYUAN_CASE.constants),
    locked(
        "HunyuanDiT2DControlNetModel", HUNYUAN_CONTROL, "HunyuanDiT2DModel", HUNYUAN | dict(num_layers=8),
        HUNYUAN_HINTED, lambda model, batch: residuals_with_control(model, batch, HUNYUAN_CASE.constants),
    ),
    several_controls(
        "HunyuanDiT2DMultiControlNetModel", HUNYUAN_CONTROL, HUNYUAN_HINTED, HUNYUAN_CASE.constants
    ),
    Case("SanaControlNetModel", SANA, SANA_HINTED),
    locked(
        "SanaControlNetModel", SANA | dict(num_layers=2), "SanaTransformer2DModel", SANA, SANA_HINTED,
        residuals_with_control,
    ),
    Case(
        "ZImageControlNetModel with locked transformer",
        batch=dict(
            x=normal(4, 1, 8, 12), t=uniform(), cap_feats=normal(7, 12), hint=normal(4, 1, 8, 12)
        ),
        make=z_image_pair,
        call=z_image_with_control,
    ),
    Case(
        "CosmosControlNetModel",
        dict(n_controlnet_blocks=4, in_channels=6, latent_channels=6, model_channels=32)
        | dict(num_attention_heads=2, attention_head_dim=16, mlp_ratio=2, text_embed_dim=12)
        | dict(adaln_lora_dim=4, max_size=(4, 16, 16)),
        dict(
            controls_latents=normal(4, 3, 8, 12), latents=normal(4, 3, 8, 12), timestep=steps(),
            encoder_hidden_states=normal(7, 12), condition_mask=filled(1.0, 1, 3, 8, 12),
        ),
        {"padding_mask": torch.zeros(1, 1, 8, 12).double(), "fps": 30},
        reason="needs torchvision, which is not installed",
        error="'transforms' is not defined",
    ),
]  # fmt: skip
