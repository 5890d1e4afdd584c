"""Colours of images: what shows through transparent pixels, and colours of other spaces than sRGB."""

import io
import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from lightning_diffpipe.data import ImageFolderDataModule, WebDatasetDataModule
from lightning_diffpipe.data.pixels import Crop, to_pixels
from tests.data.folders import write_shard

SIZE = 16
ALPHA = np.full((SIZE, SIZE), 255, np.uint8)
ALPHA[:8] = 0
ALPHA[8:10] = 100
KEY = np.where(ALPHA < 255, 0, 255).astype(
    np.uint8
)  # of formats that know clear pixels and full ones only


def rgba(alpha=ALPHA):
    """Green, and magenta under what cannot be seen."""
    pixels = np.zeros((SIZE, SIZE, 4), np.uint8)
    pixels[..., :3] = np.where(alpha[..., None] > 0, (0, 200, 0), (255, 0, 255))
    pixels[..., 3] = alpha
    return Image.fromarray(pixels)


def grey(alpha=ALPHA):
    """Grey of level 60, and 170 under what cannot be seen."""
    return Image.fromarray(np.where(alpha > 0, 60, 170).astype(np.uint8))


def saved(image, form, **options):
    image.save(file := io.BytesIO(), form, **options)
    return file.getvalue()


def with_alpha(image, alpha):
    image.putalpha(Image.fromarray(alpha))
    return image


def sixteen_bits():
    levels = np.asarray(grey(KEY)).astype(np.uint16) * 257
    return Image.fromarray(levels), 170 * 257


def palette(alphas):
    image = Image.fromarray(np.where(KEY > 0, 1, 0).astype(np.uint8), "P")
    image.putpalette([255, 0, 255, 0, 200, 0] + [0] * 6)
    return saved(image, "PNG", transparency=alphas)


GREEN, DARK = (0, 200, 0), (60, 60, 60)
TRANSPARENT = {
    "RGBA.png": (lambda: saved(rgba(), "PNG"), GREEN, ALPHA),
    "RGBA.webp": (lambda: saved(rgba(), "WEBP", lossless=True, exact=True), GREEN, ALPHA),
    "RGBA.tiff": (lambda: saved(rgba(), "TIFF"), GREEN, ALPHA),
    "LA.png": (lambda: saved(with_alpha(grey(), ALPHA), "PNG"), DARK, ALPHA),
    "PA.tiff": (lambda: saved(rgba(KEY).convert("PA"), "TIFF"), GREEN, KEY),
    "P.png": (lambda: palette(bytes([0, 255])), GREEN, KEY),
    "P of one index.png": (lambda: palette(0), GREEN, KEY),
    "P.gif": (lambda: saved(rgba(KEY), "GIF"), GREEN, KEY),
    "RGB of one colour.png": (
        lambda: saved(rgba(KEY).convert("RGB"), "PNG", transparency=(255, 0, 255)), GREEN, KEY,
    ),
    "L of one level.png": (lambda: saved(grey(KEY), "PNG", transparency=170), DARK, KEY),
    "I;16 of one level.png": (
        lambda: saved(sixteen_bits()[0], "PNG", transparency=sixteen_bits()[1]), DARK, KEY,
    ),
}  # fmt: skip


def onto(color, alpha, behind):
    """Reference: what a viewer shows, `(3, SIZE, SIZE)` in [0, 255]."""
    share = torch.tensor(alpha / 255.0)[None]
    of = lambda levels: torch.tensor(levels, dtype=torch.float64)[:, None, None]
    return share * of(color) + (1 - share) * of(behind)


def shown(image):
    return (image.double() + 1) * 127.5


def folder_of(path, content, **options):
    path.mkdir()
    names = {"image": "a.png", "condition": "b.png"}
    for name in names.values():
        (path / name).write_bytes(content)
    line = {"file_name": names["image"], "text": "x", "conditioning_image": names["condition"]}
    (path / "metadata.jsonl").write_text(json.dumps(line))
    return ImageFolderDataModule(
        path, SIZE, num_workers=0, condition="conditioning_image", **options
    )


@pytest.mark.parametrize(
    ("background", "behind"), [({}, (255,) * 3), ({"background": "#102030"}, (16, 32, 48))]
)
@pytest.mark.parametrize("kind", TRANSPARENT)
def test_hidden_colours_are_not_learnt(kind, background, behind, tmp_path):
    """History: colours that lie under an alpha of 0, which nobody sees, were learnt."""
    content, color, alpha = TRANSPARENT[kind]
    content, expected = content(), onto(color, alpha, behind)
    near = {"atol": 1.01, "rtol": 0}
    for share in (0.0, 1.0):  # trained, and held back
        data = folder_of(tmp_path / f"{share}", content, validation_share=share, **background)
        data.setup("fit" if share == 0 else "validate")
        (sample,) = data.validation_set if share else data.train_set
        torch.testing.assert_close(shown(sample["image"]), expected, **near)
        torch.testing.assert_close(sample["condition"].double() * 255, expected, **near)
    (tmp_path / "frames" / "clip").mkdir(parents=True)
    (tmp_path / "frames" / "clip" / "0.png").write_bytes(content)
    (tmp_path / "frames" / "metadata.jsonl").write_text('{"file_name": "clip", "text": "x"}')
    videos = ImageFolderDataModule(
        tmp_path / "frames", SIZE, validation_share=0.0, num_frames=1, **background
    )
    videos.setup("fit")
    torch.testing.assert_close(shown(videos.train_set[0]["video"][:, 0]), expected, **near)
    write_shard(tmp_path / "0.tar", {"0.png": content, "0.txt": b"x", "0.cond.png": content})
    shard = str(tmp_path / "0.tar")
    shards = WebDatasetDataModule(
        shard, 1, shard, SIZE, batch_size=1, num_workers=0, condition="cond.png", **background
    )
    for loader in (shards.train_dataloader(), shards.val_dataloader()):
        batch = next(iter(loader))
        torch.testing.assert_close(shown(batch["image"][0]), expected, **near)
        torch.testing.assert_close(batch["condition"][0].double() * 255, expected, **near)


def test_transparent_frames_of_videos_show_the_background(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "clip.gif").write_bytes(
        saved(rgba(KEY), "GIF", save_all=True, append_images=[rgba(KEY[::-1])], disposal=2)
    )
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "clip.gif", "text": "x"}')
    data = ImageFolderDataModule(
        tmp_path, SIZE, validation_share=0, num_frames=2, background="blue"
    )
    data.setup("fit")
    video = shown(data.train_set[0]["video"])
    for frame, alpha in zip(video.unbind(1), (KEY, KEY[::-1].copy()), strict=True):
        torch.testing.assert_close(frame, onto(GREEN, alpha, (0, 0, 255)), atol=1.01, rtol=0)


def test_scaled_edges_do_not_take_hidden_colours_along():
    """Magenta under the transparent half would tint the edge of the green one."""
    pixels = np.zeros((4 * SIZE, 4 * SIZE, 4), np.uint8)
    pixels[..., :3], pixels[: 2 * SIZE + 2] = (0, 200, 0), (255, 0, 255, 0)
    red, _, blue = shown(to_pixels(Image.fromarray(pixels), Crop(SIZE, SIZE)))
    torch.testing.assert_close(red, blue, atol=1.01, rtol=0)


def profile(space, **tags):
    """Bytes of a colour profile, version 2.1: its tags begin behind a header of 128 bytes and their table."""
    body, table = b"", b""
    for name, content in tags.items():
        content += b"\0" * (-len(content) % 4)
        offset = 132 + 12 * len(tags) + len(body)
        table += name.encode() + struct.pack(">II", offset, len(content))
        body += content
    rest = struct.pack(">I", len(tags)) + table + body
    white = struct.pack(">3i", 63190, 65536, 54061)  # D50, as all profiles have it
    header = struct.pack(
        ">I4sI4s", 128 + len(rest), b"", 0x02100000, b"prtr" if space == "CMYK" else b"mntr"
    )
    header += space.encode() + (b"Lab " if space == "CMYK" else b"XYZ ") + b"\0" * 12 + b"acsp"
    return header.ljust(68, b"\0") + white + b"\0" * 48 + rest


XYZ = lambda *values: b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(65536 * v) for v in values))
CURVE = lambda gamma: b"curv\0\0\0\0" + struct.pack(">IH", 1, round(256 * gamma))
SRGB = {"r": (0.4361, 0.2225, 0.0139), "g": (0.3851, 0.7169, 0.0971), "b": (0.1431, 0.0606, 0.7141)}


def exchanged():
    """RGB whose red is sRGB's green, and the other way round."""
    primaries = {"rXYZ": XYZ(*SRGB["g"]), "gXYZ": XYZ(*SRGB["r"]), "bXYZ": XYZ(*SRGB["b"])}
    curves = {f"{channel}TRC": CURVE(2.2) for channel in "rgb"}
    return profile("RGB ", wtpt=XYZ(0.9642, 1, 0.8249), **primaries, **curves)


def linear_grey():
    return profile("GRAY", wtpt=XYZ(0.9642, 1, 0.8249), kTRC=CURVE(1.0))


def only_black():
    """CMYK of which only the black ink prints: Lab of 16 corners, L from 0 to 100."""
    identity = b"".join(struct.pack(">9i", *(65536 * (i % 4 == 0) for i in range(9))) for _ in "x")
    ramp = bytes(range(256))
    corners = b"".join(bytes([0 if corner & 1 else 255, 128, 128]) for corner in range(16))
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + identity + ramp * 4 + corners + ramp * 3
    return profile("CMYK", wtpt=XYZ(0.9642, 1, 0.8249), A2B0=table)


def of(mode, color):
    return Image.new(mode, (SIZE, SIZE), color)


LINEAR = 255 * (
    1.055 * (100 / 255) ** (1 / 2.4) - 0.055
)  # sRGB's level of 100 of 255 parts of the light
PROFILES = {
    "RGB.png": (lambda: saved(of("RGB", (200, 0, 0)), "PNG", icc_profile=exchanged()), (0, 200, 0)),
    "RGB.jpg": (lambda: saved(of("RGB", (200, 0, 0)), "JPEG", icc_profile=exchanged()), (0, 200, 0)),
    "RGBA.webp": (
        lambda: saved(with_alpha(of("RGB", (200, 0, 0)), KEY * 0), "WEBP", icc_profile=exchanged()),
        (255, 255, 255),
    ),
    "RGBA.png": (
        lambda: saved(with_alpha(of("RGB", (200, 0, 0)), KEY * 0 + 255), "PNG", icc_profile=exchanged()),
        (0, 200, 0),
    ),
    "P.png": (lambda: saved(of("RGB", (200, 0, 0)).quantize(4), "PNG", icc_profile=exchanged()), (0, 200, 0)),
    "L of RGB.png": (lambda: saved(of("L", 100), "PNG", icc_profile=exchanged()), (100,) * 3),
    "L.png": (lambda: saved(of("L", 100), "PNG", icc_profile=linear_grey()), (LINEAR,) * 3),
    "LA.png": (
        lambda: saved(with_alpha(of("L", 100), KEY * 0 + 255), "PNG", icc_profile=linear_grey()),
        (LINEAR,) * 3,
    ),
    "I;16.png": (
        lambda: saved(
            Image.fromarray(np.full((SIZE, SIZE), 25700, np.uint16)), "PNG", icc_profile=linear_grey()
        ),
        (LINEAR,) * 3,
    ),
    "CMYK.jpg": (lambda: saved(of("CMYK", (255, 255, 255, 0)), "JPEG", icc_profile=only_black()), (255,) * 3),
    "CMYK without.jpg": (lambda: saved(of("CMYK", (255, 255, 255, 0)), "JPEG"), (0,) * 3),
    "grey profile of RGB.png": (
        lambda: saved(of("RGB", (200, 0, 0)), "PNG", icc_profile=linear_grey()), (200, 0, 0),
    ),
    "broken.png": (lambda: saved(of("RGB", (200, 0, 0)), "PNG", icc_profile=exchanged()[:200]), (200, 0, 0)),
    "sRGB.png": (
        lambda: saved(
            of("RGB", (200, 10, 99)), "PNG",
            icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        ),
        (200, 10, 99),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROFILES)
def test_colours_are_those_that_viewers_show(kind):
    """History: numbers of Adobe RGB and Display P3, which cameras and phones write, were taken for sRGB."""
    content, color = PROFILES[kind]
    image = Image.open(io.BytesIO(content()))
    expected = onto(color, KEY * 0 + 255, (0, 0, 0))
    torch.testing.assert_close(
        shown(to_pixels(image, Crop(SIZE, SIZE))), expected, atol=2.01, rtol=0
    )


MASKS = {
    "alpha.png": (lambda: saved(with_alpha(of("RGB", 0), KEY * 0 + 100), "PNG", icc_profile=linear_grey()), 100),
    "alpha of grey.png": (
        lambda: saved(with_alpha(of("L", 0), KEY * 0 + 100), "PNG", icc_profile=linear_grey()), 100,
    ),
    "alpha.webp": (
        lambda: saved(with_alpha(of("RGB", 0), KEY * 0 + 100), "WEBP", icc_profile=exchanged(), lossless=True), 100,
    ),
    "L.png": (lambda: saved(of("L", 100), "PNG", icc_profile=linear_grey()), 100),
    "L of RGB.png": (lambda: saved(of("L", 100), "PNG", icc_profile=exchanged()), 100),
    "RGBA.png": (lambda: saved(of("RGBA", (255, 255, 255, 100)), "PNG"), 100),
    "clear.png": (lambda: saved(of("LA", (255, 0)), "PNG"), 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_levels_and_no_colours(kind, tmp_path):
    """History: profiles changed masks of 100 to 168, and what was clear in a mask counted."""
    content, level = MASKS[kind]
    content, of_alpha = content(), kind.startswith("alpha")
    image = content if of_alpha else saved(of("RGB", 0), "PNG")
    (tmp_path / "a.png").write_bytes(image)
    (tmp_path / "b.png").write_bytes(content)
    line = {"file_name": "a.png", "text": "x", "where": "b.png"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    mask = "alpha" if of_alpha else "where"
    data = ImageFolderDataModule(tmp_path, SIZE, num_workers=0, validation_share=0.0, mask=mask)
    data.setup("fit")
    write_shard(tmp_path / "0.tar", {"0.png": image, "0.txt": b"x", "0.mask.png": content})
    mask, shard = "alpha" if of_alpha else "mask.png", str(tmp_path / "0.tar")
    shards = WebDatasetDataModule(shard, 1, shard, SIZE, batch_size=1, num_workers=0, mask=mask)
    [batch] = shards.val_dataloader()
    expected = torch.full((1, SIZE, SIZE), level / 255)
    torch.testing.assert_close(data.train_set[0]["mask"], expected)
    torch.testing.assert_close(batch["mask"][0], expected)


def test_folders_with_equal_names_are_split_apart(tmp_path):
    """History: by base names, `a/1.png` and `b/1.png` fell together, and a class could lack a whole half."""
    names = [f"{folder}/{number}.png" for folder in "ab" for number in range(40)]
    lines = [json.dumps({"file_name": name, "text": name}) for name in names]
    for folder in "ab":
        (tmp_path / folder).mkdir()
    for name in names:
        of("RGB", 0).save(tmp_path / name)
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    held = []
    for folder in (tmp_path, tmp_path / "a" / ".."):  # another name of the same one
        data = ImageFolderDataModule(folder, validation_share=0.5)
        data.setup("fit")
        held.append([entry.caption for entry in data.validation_set.entries])
    assert held[0] == held[1]
    by_folder = [{name[2:] for name in held[0] if name.startswith(folder)} for folder in "ab"]
    assert by_folder[0] != by_folder[1]
    assert 20 < len(held[0]) < 60
