"""Image transformers that take latents as a sequence of tokens, with ids for their positions."""

import diffusers
import torch
from torch import nn

from .case import Case, filled, grid_ids, listed, mask, normal, steps, times, uniform

IDS = {"img_ids": grid_ids(4, 6, num_axes=3), "txt_ids": torch.zeros(7, 3)}
DOUBLE_AND_SINGLE = {"num_layers": 3, "num_single_layers": 4, "in_channels": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
LATENTS_AND_TEXT = {"hidden_states": normal(24, 4), "encoder_hidden_states": normal(7, 12)}

NUCLEUS = (
    HEADS
    | dict(in_channels=16, out_channels=4, num_layers=6, joint_attention_dim=12)
    | dict(axes_dims_rope=(4, 6, 6), num_experts=4, moe_intermediate_dim=16)
    | dict(capacity_factors=2.0, mlp_ratio=6.0)
)


def nucleus() -> nn.Module:
    """The experts are left uninitialised by their class, to be loaded from a checkpoint."""
    model = diffusers.NucleusMoEImageTransformer2DModel(**NUCLEUS)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.1)
    return model


CASES = [
    Case(
        "FluxTransformer2DModel",
        DOUBLE_AND_SINGLE
        | HEADS
        | dict(joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8))
        | dict(guidance_embeds=True),
        LATENTS_AND_TEXT
        | dict(pooled_projections=normal(10), timestep=uniform(), guidance=uniform()),
        IDS,
    ),
    Case(
        "Flux2Transformer2DModel",
        DOUBLE_AND_SINGLE
        | HEADS
        | dict(joint_attention_dim=12, timestep_guidance_channels=8, axes_dims_rope=(4, 4, 4, 4)),
        LATENTS_AND_TEXT | dict(timestep=uniform(), guidance=uniform()),
        {"img_ids": grid_ids(4, 6, num_axes=4), "txt_ids": torch.zeros(7, 4)},
    ),
    Case(
        "Flux3Transformer2DModel",
        DOUBLE_AND_SINGLE
        | HEADS
        | dict(joint_attention_dim=12, timestep_channels=8, axes_dims_rope=(4, 4, 4, 4))
        | dict(cond_in_channels=4),
        LATENTS_AND_TEXT | dict(timestep=uniform(), image_cond_hidden_states=normal(6, 4)),
        {"img_ids": grid_ids(4, 6, num_axes=4), "txt_ids": torch.zeros(7, 4)}
        | {"image_cond_ids": grid_ids(2, 3, num_axes=4)},
    ),
    Case(
        "BriaTransformer2DModel",
        DOUBLE_AND_SINGLE | HEADS | dict(joint_attention_dim=12, axes_dims_rope=[4, 4, 8]),
        LATENTS_AND_TEXT | dict(timestep=uniform()), IDS,
    ),
    Case(
        "BriaFiboTransformer2DModel",
        DOUBLE_AND_SINGLE
        | HEADS
        | dict(joint_attention_dim=12, axes_dims_rope=[4, 4, 8], text_encoder_dim=6),
        LATENTS_AND_TEXT | dict(timestep=uniform(), layers=normal(7, 7, 6)),
        call=lambda model, batch: model(
            **{k: v for k, v in batch.items() if k != "layers"},
            text_encoder_layers=list(batch["layers"].unbind(1)),
            **IDS,
        ),
    ),
    Case(
        "BriaFibo2Transformer2DModel",
        dict(in_channels=4, dim=24, n_layers=5, n_refiner_layers=2, n_heads=2, cap_feat_dim=8)
        | dict(injection_layer_ids=(1, 3), perceiver_num_layers=2, min_num_gist_tokens=4)
        | dict(max_num_gist_tokens=8, gist_step=2, gist_min_text_len=4, gist_max_text_len=16)
        | dict(axes_dims=(4, 4, 4), axes_lens=(64, 64, 64)),
        dict(
            hidden_states=normal(4, 8, 12),
            timestep=uniform(),
            encoder_hidden_states=normal(3, 7, 8),
        ),
    ),
    Case(
        "ChromaTransformer2DModel",
        DOUBLE_AND_SINGLE
        | HEADS
        | dict(joint_attention_dim=12, axes_dims_rope=(4, 4, 8), approximator_num_channels=8)
        | dict(approximator_hidden_dim=16, approximator_layers=2),
        LATENTS_AND_TEXT | dict(timestep=uniform()),
        IDS,
    ),
    Case(
        "LongCatImageTransformer2DModel",
        DOUBLE_AND_SINGLE
        | HEADS
        | dict(joint_attention_dim=12, pooled_projection_dim=12, axes_dims_rope=[4, 4, 8]),
        LATENTS_AND_TEXT | dict(timestep=uniform()),
        IDS,
    ),
    Case(
        "OvisImageTransformer2DModel",
        DOUBLE_AND_SINGLE
        | HEADS
        | dict(out_channels=4, joint_attention_dim=12, axes_dims_rope=(4, 4, 8)),
        LATENTS_AND_TEXT | dict(timestep=uniform()),
        IDS,
    ),
    Case(
        "QwenImageTransformer2DModel",
        HEADS
        | dict(in_channels=16, out_channels=4, num_layers=4, joint_attention_dim=12)
        | dict(axes_dims_rope=(4, 6, 6)),
        dict(
            hidden_states=normal(24, 16), encoder_hidden_states=normal(7, 12), encoder_hidden_states_mask=mask(7),
            timestep=uniform(), img_shapes=listed([(1, 4, 6)]),
        ),
    ),
    Case(
        "QwenImage21Transformer2DModel",
        HEADS
        | dict(in_channels=16, out_channels=16, num_layers=4, context_in_dim=12)
        | dict(axes_dims_rope=(4, 6, 6)),
        dict(
            hidden_states=normal(24, 16), encoder_hidden_states=normal(7, 12), timestep=uniform(),
            img_shapes=listed([(1, 4, 6)]), img_mask=lambda n, generator: (torch.arange(13) >= 7).expand(n, -1),
        ),
    ),
    Case(
        "NucleusMoEImageTransformer2DModel",
        NUCLEUS,
        dict(
            hidden_states=normal(24, 16), encoder_hidden_states=normal(7, 12), timestep=uniform(),
            img_shapes=listed((1, 4, 6)),
        ),
        make=nucleus,
    ),
    Case(
        "Krea2Transformer2DModel",
        HEADS
        | dict(in_channels=4, num_layers=4, num_key_value_heads=1, intermediate_size=24)
        | dict(timestep_embed_dim=8, text_hidden_dim=12, num_text_layers=3)
        | dict(text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=16)
        | dict(axes_dims_rope=(4, 6, 6)),
        dict(
            hidden_states=normal(24, 4), encoder_hidden_states=normal(7, 3, 12), timestep=uniform()
        ),
        {"position_ids": torch.cat([torch.zeros(7, 3).double(), grid_ids(4, 6, num_axes=3)])},
    ),
    Case(
        "Ideogram4Transformer2DModel",
        dict(in_channels=4, num_layers=4, attention_head_dim=24, num_attention_heads=2)
        | dict(intermediate_size=24, adaln_dim=8, llm_features_dim=12, mrope_section=(4, 4, 4)),
        dict(
            hidden_states=normal(31, 4),
            timestep=uniform(),
            encoder_hidden_states=normal(31, 12),
            position_ids=lambda n, generator: torch.cat(
                [torch.arange(7).expand(3, 7).T, grid_ids(4, 6, num_axes=3).long()]
            ).expand(n, -1, -1),
            segment_ids=filled(0, 31),
            indicator=lambda n, generator: (3 - (torch.arange(31) >= 7).long()).expand(n, -1),
        ),
    ),
    Case(
        "ErnieImageTransformer2DModel",
        dict(hidden_size=16, num_attention_heads=2, num_layers=4, ffn_hidden_size=24)
        | dict(in_channels=4, out_channels=4, text_in_dim=12, rope_axes_dim=(4, 2, 2)),
        dict(
            hidden_states=normal(4, 4, 6), timestep=steps(), text_bth=normal(7, 12),
            text_lens=lambda n, generator: 7 - torch.arange(n) % 3,
        ),
    ),
    Case(
        "HiDreamImageTransformer2DModel",
        HEADS
        | dict(patch_size=2, in_channels=4, num_layers=3, num_single_layers=3)
        | dict(caption_channels=[12, 8], text_emb_dim=10, axes_dims_rope=(4, 6, 6))
        | dict(max_resolution=(16, 16), llama_layers=(0, 1, 2, 3, 4, 5)),
        dict(
            hidden_states=normal(4, 8, 12), timesteps=steps(), encoder_hidden_states_t5=normal(5, 12),
            pooled_embeds=normal(10), llama=normal(6, 7, 8),
        ),
        call=lambda model, batch: model(
            **{k: v for k, v in batch.items() if k != "llama"},
            encoder_hidden_states_llama3=batch["llama"].transpose(0, 1),
        ),
    ),
    Case(
        "ZImageTransformer2DModel",
        dict(in_channels=4, dim=24, n_layers=4, n_refiner_layers=2, n_heads=2, n_kv_heads=2)
        | dict(cap_feat_dim=12, axes_dims=[4, 4, 4], axes_lens=[64, 64, 64]),
        dict(x=normal(4, 1, 8, 12), t=uniform(), cap_feats=normal(7, 12)),
        call=lambda model, batch: torch.stack(
            model(list(batch["x"]), batch["t"], list(batch["cap_feats"])).sample
        ),
    ),
    Case(
        "HunyuanImageTransformer2DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, num_layers=3, num_single_layers=4)
        | dict(num_refiner_layers=2, text_embed_dim=12, text_embed_2_dim=8, rope_axes_dim=(8, 8))
        | dict(guidance_embeds=True),
        dict(
            hidden_states=normal(4, 4, 6), timestep=times(), encoder_hidden_states=normal(7, 12),
            encoder_attention_mask=mask(7), encoder_hidden_states_2=normal(5, 8), encoder_attention_mask_2=mask(5),
            guidance=uniform(),
        ),
    ),
]  # fmt: skip
