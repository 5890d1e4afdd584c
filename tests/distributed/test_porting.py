"""The loops of `examples/porting.py` with tiny models: two ranks equal one process."""

import diffusers
import pytest
import torch
import transformers
from torch.utils.data import Dataset

from examples import porting
from tests.distributed.scenarios import check_parity
from tests.distributed.tiny import Data, Pairs, subject_first
from tests.modules.tiny_parts import tiny_clip, tiny_unet, tiny_vae
from tests.rows import row
from tests.zoo.case import perturb

pytestmark = pytest.mark.distributed


def text_encoder(kind=transformers.CLIPTextModel):
    sizes = {"vocab_size": 50, "num_hidden_layers": 2, "max_position_embeddings": 8}
    return tiny_clip(kind, **sizes, projection_dim=8, eos_token_id=2)


def alive(root):
    """No gate is left at zero."""
    perturb(root, torch.Generator().manual_seed(2))
    return root


def common():
    return {
        "vae": tiny_vae(),
        "unet": alive(tiny_unet()),
        "scheduler": diffusers.DDPMScheduler(num_train_timesteps=50),
        "lr": 1e-3,
    }


class TextToImage(porting.TextToImage):
    def __init__(self):
        super().__init__(text_encoder(), **common(), snr_gamma=5.0)


class TextToImageXL(porting.TextToImageXL):
    def __init__(self):
        second = text_encoder(transformers.CLIPTextModelWithProjection)
        unet = tiny_unet(
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=4,
            projection_class_embeddings_input_dim=8 + 6 * 4,
        )
        super().__init__(text_encoder(), second, **common() | {"unet": alive(unet)})


class DreamBoothLoRA(porting.DreamBoothLoRA):
    def __init__(self):
        peft = pytest.importorskip("peft")
        options = {"r": 2, "init_lora_weights": False}
        adapter = peft.LoraConfig(target_modules=["to_q", "to_k", "to_v", "to_out.0"], **options)
        text_adapter = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **options)
        super().__init__(adapter, text_adapter, 0.7, text_encoder=text_encoder(), **common())


class ControlNetTraining(porting.ControlNetTraining):
    def __init__(self):
        parts = common()
        controlnet = diffusers.ControlNetModel.from_unet(
            parts["unet"], conditioning_embedding_out_channels=(4, 8)
        )
        super().__init__(alive(controlnet), text_encoder=text_encoder(), **parts)


class Images(Dataset):
    """What all of them want, made up."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(size, 3, 8, 8, generator=generator, dtype=torch.float64) * 2 - 1
        self.ids = torch.randint(3, 50, (size, 8), generator=generator)
        self.ids[:, -1] = 2

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {
            "image": self.images[index],
            "input_ids": self.ids[index],
            "input_ids_2": self.ids[index],
            "original_size": torch.tensor([9 + index, 12]),
            "crop": torch.tensor([index % 3, 1]),
            "condition": self.images[index].abs(),
        }


class ImageData(Data):
    pairs = False

    def train_dataloader(self):
        images = Images(48)
        if not self.pairs:
            return torch.utils.data.DataLoader(images, self.batch_size)
        pairs = Pairs(24)
        pairs.samples = images
        return torch.utils.data.DataLoader(pairs, self.batch_size, collate_fn=subject_first)

    def val_dataloader(self):
        return []


class PairData(ImageData):
    pairs = True


@pytest.mark.parametrize(
    "module_class", [TextToImage, row(TextToImageXL), row(DreamBoothLoRA), ControlNetTraining]
)
def test_two_ranks_train_as_one_process(module_class):
    data_class = PairData if module_class is DreamBoothLoRA else ImageData
    check_parity(
        2, tolerance=1e-9, module_class=module_class, data_class=data_class, data={"batch_size": 4},
        strategy={"num_stages": 2},
    )  # fmt: skip
