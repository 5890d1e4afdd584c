"""U-Nets: down blocks whose outputs are read again by the up blocks."""

from .case import Case, mask, normal, steps, tokens, uniform

# Images: three resolutions, cross-attention at the two higher ones. Videos: two and one.
WIDTHS = {"block_out_channels": (8, 16, 16), "norm_num_groups": 4}
TWO_WIDTHS = WIDTHS | {"block_out_channels": (8, 16)}
LATENTS = {"in_channels": 4, "out_channels": 4, "sample_size": 16}
IMAGE = {"sample": normal(4, 16, 24), "timestep": steps()}
TEXT = {"encoder_hidden_states": normal(7, 12)}
VIDEO = {"sample": normal(4, 3, 8, 16), "timestep": steps()}


def blocks(kind: str, with_text: int = 2) -> dict:
    """Names of the blocks of a U-Net: some resolutions with cross-attention, one below without."""
    return {
        "down_block_types": (*[f"CrossAttnDownBlock{kind}"] * with_text, f"DownBlock{kind}"),
        "up_block_types": (f"UpBlock{kind}", *[f"CrossAttnUpBlock{kind}"] * with_text),
    }


SD = LATENTS | WIDTHS | blocks("2D") | dict(cross_attention_dim=12, attention_head_dim=4)

CASES = [
    Case(
        "UNet2DModel",
        dict(block_out_channels=(8, 16), in_channels=3, out_channels=3, sample_size=16)
        | dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=4)
        | dict(up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4),
        dict(sample=normal(3, 16, 24), timestep=steps()),
    ),
    Case("UNet2DConditionModel", SD, IMAGE | TEXT),
    Case(
        "UNet2DConditionModel SDXL",
        SD
        | dict(transformer_layers_per_block=(1, 2, 2), use_linear_projection=True)
        | dict(addition_embed_type="text_time", addition_time_embed_dim=8)
        | dict(projection_class_embeddings_input_dim=16 + 6 * 8),
        IMAGE | TEXT | dict(text_embeds=normal(16), time_ids=uniform(6)),
        call=lambda model, batch: model(
            **{k: v for k, v in batch.items() if k not in ("text_embeds", "time_ids")},
            added_cond_kwargs={k: batch[k] for k in ("text_embeds", "time_ids")},
        ),
    ),
    Case(
        "UNet1DModel",
        dict(block_out_channels=(8, 8, 16), in_channels=4, out_channels=4, sample_size=16)
        | dict(time_embedding_type="positional", use_timestep_embedding=True)
        | dict(down_block_types=("DownResnetBlock1D",) * 3, norm_num_groups=4)
        | dict(up_block_types=("UpResnetBlock1D",) * 2, mid_block_type="MidResTemporalBlock1D")
        | dict(out_block_type="OutConv1DBlock", layers_per_block=2, act_fn="swish")
        | dict(downsample_each_block=False),
        dict(sample=normal(4, 32), timestep=steps()),
    ),
    Case(
        "UNet1DModel audio",
        dict(block_out_channels=(32, 32, 64), extra_in_channels=64, sample_size=64)
        | dict(sample_rate=16),
        dict(sample=normal(2, 64), timestep=steps()),
    ),
    Case(
        "UNet3DConditionModel",
        LATENTS | TWO_WIDTHS | blocks("3D", 1) | dict(cross_attention_dim=12, attention_head_dim=4),
        VIDEO | TEXT,
    ),
    Case(
        "I2VGenXLUNet",
        LATENTS | TWO_WIDTHS | blocks("3D", 1) | dict(cross_attention_dim=12, attention_head_dim=4),
        VIDEO
        | TEXT
        | dict(fps=tokens(30), image_latents=normal(4, 3, 8, 16), image_embeddings=normal(12)),
    ),
    Case(
        "UNetMotionModel",
        LATENTS
        | TWO_WIDTHS
        | blocks("Motion", 1)
        | dict(cross_attention_dim=12, num_attention_heads=2, motion_num_attention_heads=2),
        VIDEO | TEXT,
        call=lambda model, batch: model(
            batch["sample"],
            batch["timestep"],
            batch["encoder_hidden_states"].repeat_interleave(3, 0),
        ),
    ),
    Case(
        "UNetSpatioTemporalConditionModel",
        dict(in_channels=8, out_channels=4, sample_size=16, block_out_channels=(32, 64))
        | blocks("SpatioTemporal", 1)
        | dict(cross_attention_dim=12, num_attention_heads=(2, 4), num_frames=2)
        | dict(addition_time_embed_dim=8, projection_class_embeddings_input_dim=24),
        dict(
            sample=normal(2, 8, 4, 8), timestep=steps(), encoder_hidden_states=normal(1, 12),
            added_time_ids=uniform(3),
        ),
    ),
    Case(
        "Kandinsky3UNet",
        dict(time_embedding_dim=8, groups=4, attention_head_dim=4, layers_per_block=2)
        | dict(block_out_channels=(8, 8, 16, 16), cross_attention_dim=12, encoder_hid_dim=10),
        IMAGE | dict(encoder_hidden_states=normal(7, 10), encoder_attention_mask=mask(7)),
    ),
    Case(
        "StableCascadeUNet",
        dict(in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, conditioning_dim=16)
        | dict(block_out_channels=(8, 16), num_attention_heads=(2, 2), dropout=(0.0, 0.0))
        | dict(down_num_layers_per_block=(2, 2), up_num_layers_per_block=(2, 2))
        | dict(clip_text_in_channels=10, clip_text_pooled_in_channels=6)
        | dict(clip_image_in_channels=6, clip_seq=2),
        dict(
            sample=normal(4, 8, 12), timestep_ratio=uniform(), clip_text_pooled=normal(1, 6),
            clip_text=normal(7, 10), clip_img=normal(1, 6),
        ),
    ),
    Case(
        "DreamLiteUNetModel",
        LATENTS | WIDTHS | dict(cross_attention_dim=12, attention_head_dim=4, ff_mult=2),
        IMAGE | TEXT,
    ),
    Case(
        "MotionAdapter", dict(block_out_channels=(8, 16), motion_num_attention_heads=2, motion_norm_num_groups=4),
        IMAGE, call=lambda model, batch: model(batch["sample"]),
        reason="holds weights for UNetMotionModel; its forward is empty", error="no attribute 'backward'",
    ),
]  # fmt: skip
