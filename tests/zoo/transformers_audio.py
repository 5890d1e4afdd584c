"""Audio transformers, and those that denoise image and sound together."""

import torch

from .case import Case, filled, mask, normal, times, uniform

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}

CASES = [
    Case(
        "AceStepTransformer1DModel",
        dict(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2)
        | dict(num_key_value_heads=1, head_dim=8, in_channels=12, audio_acoustic_hidden_dim=4)
        | dict(sliding_window=4),
        dict(
            hidden_states=normal(14, 4), timestep=uniform(), timestep_r=uniform(),
            encoder_hidden_states=normal(7, 16), context_latents=normal(14, 8),
        ),
    ),
    Case(
        "StableAudioDiTModel",
        dict(sample_size=8, in_channels=4, num_layers=4, attention_head_dim=8)
        | dict(num_attention_heads=2, num_key_value_attention_heads=1, out_channels=4)
        | dict(cross_attention_dim=8, time_proj_dim=8, global_states_input_dim=6)
        | dict(cross_attention_input_dim=10),
        dict(
            hidden_states=normal(4, 8), timestep=uniform(), encoder_hidden_states=normal(7, 10),
            global_hidden_states=normal(1, 6),
        ),
        {"rotary_embedding": (torch.ones(9, 4).double(), torch.zeros(9, 4).double())},
    ),
    Case(
        "StableAudio3DiTModel",
        dict(io_channels=4, embed_dim=16, depth=4, num_heads=2, cond_token_dim=10)
        | dict(global_cond_dim=6, local_add_cond_dim=5, timestep_features_dim=8)
        | dict(ff_mult=2.0, num_memory_tokens=3),
        dict(
            hidden_states=normal(4, 8), timestep=uniform(), encoder_hidden_states=normal(7, 10),
            global_hidden_states=normal(6), encoder_attention_mask=mask(7), local_add_cond=normal(5, 8),
        ),
    ),
    Case(
        "LongCatAudioDiTTransformer",
        dict(dit_dim=16, dit_depth=4, dit_heads=2, dit_text_dim=10, latent_dim=4, ff_mult=2.0),
        dict(
            hidden_states=normal(12, 4), encoder_hidden_states=normal(7, 10), encoder_attention_mask=mask(7),
            timestep=uniform(), attention_mask=lambda n, generator: torch.ones(n, 12, dtype=torch.bool),
            latent_cond=normal(12, 4),
        ),
    ),
    Case(
        "MiniMaxMusic3Transformer1DModel",
        HEADS
        | dict(in_channels=4, condition_dim=6, num_layers=4, ff_inner_dim=24, rotary_dim=8)
        | dict(fourier_embedding_dim=8),
        dict(hidden_states=normal(4, 8), timestep=uniform(), encoder_hidden_states=normal(8, 6)),
    ),
    Case(
        "MiniMaxMusic3RVQDepthDecoder",
        dict(hidden_size=16, num_layers=4, num_attention_heads=2, intermediate_size=24)
        | dict(audio_vocab_size=20, num_codebooks=4, max_position_embeddings=8),
        dict(inputs_embeds=normal(6, 16)),
    ),
    Case(
        "T5FilmDecoder",
        dict(input_dims=4, targets_length=8, d_model=16, num_layers=4, num_heads=2, d_kv=8, d_ff=24)
        | dict(dropout_rate=0.1),
        dict(
            decoder_input_tokens=normal(8, 4), decoder_noise_time=uniform(), encoded=normal(5, 16),
            encoded_mask=filled(1.0, 5),
        ),
        call=lambda model, batch: model(
            [(batch["encoded"], batch["encoded_mask"])],
            batch["decoder_input_tokens"],
            batch["decoder_noise_time"],
        ),
    ),
    Case(
        "LTX2VideoTransformer3DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=4)
        | dict(audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2)
        | dict(audio_attention_head_dim=8, audio_cross_attention_dim=16, caption_channels=12),
        dict(
            hidden_states=normal(24, 4), audio_hidden_states=normal(5, 4), encoder_hidden_states=normal(7, 12),
            audio_encoder_hidden_states=normal(7, 12), timestep=times(),
        ),
        {"num_frames": 2, "height": 3, "width": 4, "audio_num_frames": 5, "fps": 25.0},
    ),
    Case(
        "Kandinsky6Transformer3DModel",
        dict(in_visual_dim=4, out_visual_dim=4, in_text_dim=12, in_text_dim2=8, time_dim=8)
        | dict(model_dim=32, ff_dim=48, num_text_blocks=2, num_visual_blocks=4)
        | dict(axes_dims=(4, 6, 6), visual_cond=False, in_audio_dim=4, out_audio_dim=4)
        | dict(cross_gates=True),
        dict(
            hidden_states=normal(2, 8, 12, 4), encoder_hidden_states=normal(7, 12), pooled_projections=normal(8),
            timestep=times(), audio_hidden_states=normal(5, 4),
        ),
    ),
    Case(
        "MiniMaxH3Transformer3DModel",
        HEADS
        | dict(hidden_size=32, num_layers=4, num_refiner_layers=2, ffn_dim=48, in_channels=4)
        | dict(audio_in_channels=4, text_dim=12, freq_dim=8, time_embed_hidden_dim=16)
        | dict(time_embed_dim=8, rope_freq_dim=2),
        dict(
            hidden_states=normal(24, 16),
            audio_hidden_states=normal(5, 4),
            encoder_hidden_states=normal(7, 12),
        ),
        {
            "timestep": torch.tensor([500.0]),
            "timestep_indices": torch.zeros(36).long(),
            "token_tags": torch.tensor([0] * 7 + [1] * 24 + [2] * 5),
            "position_ids": torch.arange(36).expand(3, -1).T,
            "text_indices": torch.arange(7),
            "video_indices": torch.arange(7, 31),
            "audio_indices": torch.arange(31, 36),
        },
    ),
]  # fmt: skip
