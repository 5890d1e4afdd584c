"""A folder of images with captions, as users have it."""

import json

from PIL import Image


def write_folder(folder, count=40):
    lines = []
    for i in range(count):
        Image.new("RGB", (20 + i, 30), (i, 0, 255)).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"image {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
