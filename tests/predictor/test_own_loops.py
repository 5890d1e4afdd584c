"""What loops do besides denoising: they encode again, ask parts, sample noise, and have guiders with a memory."""

import diffusers
import pytest
import torch
from diffusers import guiders
from diffusers.hooks import LayerSkipConfig
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.methods import MethodOptions
from tests.predictor import tiny_pipelines as tiny
from tests.predictor.scenarios import failure_of_each, latents_of_each
from tests.ranks import run_ranks
from tests.rows import row
from tests.zoo.case import perturb
from tests.zoo.pipelines import build as build_any
from tests.zoo.sample_pipelines import close, drawn_by_two, settings_of

NUM_STEPS = 4
GIVEN = {"prompts": ["a cat 1", "dog b"], "num_inference_steps": NUM_STEPS}


class OwnLoop(diffusers.PixArtSigmaPipeline):
    """Does more than a loop has to, from its second step on."""

    @torch.no_grad()
    def __call__(self, prompt, num_inference_steps=NUM_STEPS, does="", generator=None):
        def encoded(texts):
            with_prompt, mask, without, free_mask = self.encode_prompt(texts, clean_caption=False)
            return torch.cat([without, with_prompt]), torch.cat([free_mask, mask])

        text, mask = encoded(prompt)
        self.scheduler.set_timesteps(num_inference_steps)
        latents = torch.randn(len(prompt), 4, 16, 16, generator=generator)
        for index, t in enumerate(self.scheduler.timesteps):
            if does == "encodes" and index:
                text, mask = encoded(["fog 2", "a", "sea"][: len(prompt)])
            if does == "asks" and index:
                latents = latents * (1 + 1e-5 * self.vae.num_parameters())
                latents = latents.to(self._execution_device)
            if does == "samples" and index:
                latents = latents + 0.1 * torch.randn_like(latents)
            if does == "samples by the generator" and index:
                latents = latents + 0.1 * torch.randn(latents.shape, generator=generator)
            out = self.transformer(
                torch.cat([latents] * 2), encoder_hidden_states=text, encoder_attention_mask=mask,
                timestep=t.expand(2 * len(latents)), return_dict=False,
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            )[0]  # fmt: skip
            without, given = out.chunk(2, 1)[0].chunk(2)
            guided = without + 4.0 * (given - without)
            if does == "compares":  # norms of all rows
                norms = [(x.norm(), limit.norm()) for x, limit in zip(guided, given, strict=True)]
                scales = [limit / norm if norm > limit else 1.0 for norm, limit in norms]
                guided = torch.stack([x * scale for x, scale in zip(guided, scales, strict=True)])
            latents = self.scheduler.step(guided, t, latents)[0]
        self.vae.decode(latents)
        return diffusers.ImagePipelineOutput(latents)


@pytest.fixture
def own(folder_of, tmp_path, monkeypatch):
    """Saves a pipeline with its own loop; returns the folder, and what diffusers samples."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder_of("pixart")))
    pipeline = OwnLoop(**pipeline.components)
    pipeline.save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers, "OwnLoop", OwnLoop, raising=False)

    def expected(does):
        torch.manual_seed(0)
        given = {"does": does, "generator": torch.Generator().manual_seed(0)}
        return pipeline(GIVEN["prompts"], **given).images

    return tmp_path, expected


WAYS = [
    MethodOptions("single", data=2),
    MethodOptions("single", guidance=2, data=1),
    MethodOptions("sequence"),
    MethodOptions("pipefusion", num_patches=2, warmup_steps=9),
]
EXTRAS = ["encodes", "asks", "samples by the generator", "compares"]


@pytest.mark.parametrize("does", EXTRAS)
def test_what_a_loop_does_besides_is_that_of_one_process(does, own):
    """History: prompts of one length that a loop encodes were all given the answer of the first."""
    path, expected = own
    found = Predictor.from_pretrained(path, "single")(**GIVEN, does=does)
    assert torch.equal(found, expected(does))
    assert (found - expected("")).norm() > 1e-3 * found.norm()


@pytest.mark.slow
@pytest.mark.parametrize("does", EXTRAS)
@pytest.mark.parametrize("options", WAYS, ids=lambda way: f"{way.method}")
def test_two_ranks_do_besides_what_one_process_does(does, options, own):
    """History: what rank 0 had asked its parts in the loop was an AttributeError on rank 1.

    Norms that a comparison looks at were those of a rank's own rows, and 0.4 % of the image was another.
    """
    path, expected = own
    found = drawn_by_two(path, options, [{**GIVEN, "does": does}])[0]
    assert close(found, expected(does), 1e-5)


def test_noise_of_the_default_generator_between_steps(own):
    """History: each patch had other noise, and 1 % of the image was another."""
    path, expected = own
    for options in ({"method": "single"}, {"num_patches": 1}):
        predictor = Predictor.from_pretrained(path, **options)
        torch.manual_seed(0)
        assert torch.equal(predictor(**GIVEN, does="samples"), expected("samples"))
    with pytest.raises(ConfigurationError, match="OwnLoop samples noise between its steps by tor"):
        Predictor.from_pretrained(path, num_patches=2)(**GIVEN, does="samples")


SKIPPED = LayerSkipConfig(indices=[1], fqn="transformer_blocks")
GUIDERS = {
    "momentum": lambda: guiders.AdaptiveProjectedGuidance(4.0, -0.5),
    "some steps": lambda: guiders.ClassifierFreeGuidance(4.0, stop=0.6),
    "SVD": lambda: guiders.TangentialClassifierFreeGuidance(4.0),
    "zeros": lambda: guiders.ClassifierFreeZeroStarGuidance(4.0, zero_init_steps=1),
    "skipped": lambda: guiders.SkipLayerGuidance(
        4.0, 2.0, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0, skip_layer_config=SKIPPED
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["some steps", "SVD", *map(row, sorted({*GUIDERS} - {"some steps", "SVD"}))]
)
def test_guiders_begin_each_request_anew(kind, tmp_path):
    """History: they went on where the first run had ended, and those that NaN stop were refused."""
    name = "MotifVideoPipeline"
    given = {**settings_of(name), "num_inference_steps": 5}
    build_any(name, tmp_path / "words", guider=GUIDERS[kind]()).save_pretrained(tmp_path / "saved")
    plain = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved")
    expected = plain(GIVEN["prompts"], **given, generator=torch.Generator().manual_seed(0)).frames
    predictor = Predictor.from_pretrained(tmp_path / "saved", "single")
    for _ in range(2):
        assert torch.equal(predictor(GIVEN["prompts"], **given), expected)
    request = {"prompts": GIVEN["prompts"], **given}
    found = drawn_by_two(tmp_path / "saved", WAYS[0], [request])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_prediction_has_whatever_name_its_denoiser_gives_it(tmp_path):
    """History: `predicted_image_embedding` of a prior was an AttributeError; take another scheduler, it said."""
    torch.manual_seed(0)
    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=12,
        additional_embeddings=4,
    )  # fmt: skip
    perturb(prior, torch.Generator().manual_seed(1))
    sizes = {"height": 32, "width": 32}
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=32, patch_size=8,
    )  # fmt: skip
    pipeline = diffusers.KandinskyV22PriorPipeline(
        prior=prior, image_encoder=CLIPVisionModelWithProjection(vision),
        text_encoder=tiny.clip_encoder(projection=16), tokenizer=tiny.clip_tokenizer(tmp_path),
        scheduler=diffusers.UnCLIPScheduler(prediction_type="sample", variance_type="fixed_small_log"),
        image_processor=CLIPImageProcessor(size=sizes, crop_size=sizes),
    )  # fmt: skip
    pipeline.save_pretrained(tmp_path / "saved")
    given = {"num_inference_steps": 3, "output_type": "pt"}
    generator = torch.Generator().manual_seed(0)
    expected = pipeline(GIVEN["prompts"], **given, generator=generator).image_embeds
    found = Predictor.from_pretrained(tmp_path / "saved", "single")(GIVEN["prompts"], **given)
    assert torch.equal(found, expected)


def encodes_another(pipeline, index, t, tensors):
    """A prompt is changed in the middle."""
    pipeline.encode_prompt(["fog"], "cpu", 1, True)
    return tensors


def previews(pipeline, index, t, tensors):
    pipeline.vae.decode(tensors["latents"])
    return tensors


def previews_on_rank_0(pipeline, index, t, tensors):
    return previews(pipeline, index, t, tensors) if torch.distributed.get_rank() == 0 else tensors


@pytest.mark.distributed
def test_what_callbacks_ask_parts_of_rank_0_is_refused_on_all_ranks(folder_of):
    """History: an AttributeError on rank 1, and a lost rank on rank 0."""

    def job(callback, **options):
        given = {"num_inference_steps": 2, **tiny.SIZE, "callback_on_step_end": callback}
        return folder_of("stable_diffusion"), ["a", "b"], given, {"method": "single", **options}

    cases = {encodes_another: "tokenizer is on rank 0 only", previews: "vae is on rank 0 only"}
    jobs = [job(each, guidance=guidance) for each in cases for guidance in (1, 2)]
    for said in run_ranks(failure_of_each, 2, jobs):
        for (callback, *_), message in zip([(c,) for c in cases for _ in "12"], said, strict=True):
            assert message.startswith(f"ConfigurationError: {cases[callback]}")
            assert "look at images on rank 0 alone" in message
    [with_previews], _ = run_ranks(latents_of_each, 2, [job(previews_on_rank_0, guidance=2)])
    [without], _ = run_ranks(latents_of_each, 2, [job(None, guidance=2)])
    assert torch.equal(with_previews, without)
